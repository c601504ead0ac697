"""Which operations a test is about: `--op` picks those of one, and they share a process."""

import pathlib
import re

_SPECS = pathlib.Path(__file__).parents[1] / "ejkernel" / "kernels" / "_specs"
OPS = frozenset(p.stem for p in _SPECS.glob("*.py") if not p.stem.startswith("_"))
_LINEAR = ("gla", "lightning_attention", "linear_recurrence")
_PAGED = ("page_attention", "ragged_page_attention", "ragged_decode_attention")
_WRITERS = ("update_paged_cache", "update_kv_pages", "update_latent_pages")
# files of several operations, or named otherwise
_FILES: dict[str, tuple[str, ...]] = {
    "tests/modules/test_linear.py": _LINEAR,
    "tests/modules/test_paged.py": (*_PAGED, *_WRITERS),
    "tests/modules/test_paged_checks.py": (*_PAGED, *_WRITERS, "ragged_page_attention_v3"),
    "tests/modules/test_paged_mesh.py": (*_PAGED, "ragged_page_attention_v3"),
    "tests/modules/test_sparse_matmul.py": ("sparse_matmul", "sampled_matmul"),
    "tests/modules/test_scaled_dot_product_attention.py": ("flash_attention",),
    "tests/distributed/test_ring.py": ("ring_attention",),
    "tests/kernels/test_cudnn.py": ("flash_attention",),
    "tests/kernels/test_edges.py": ("flash_attention",),
    "tests/kernels/test_gpu.py": ("flash_attention",),
    "tests/kernels/test_pallas_gpu.py": ("flash_attention",),
    "tests/kernels/test_pallas_gpu_backward.py": ("flash_attention",),
    "tests/kernels/test_pallas_gpu_lowers.py": ("flash_attention",),
    "tests/kernels/test_pallas_tpu.py": ("flash_attention",),
    "tests/kernels/test_tpu_blocksparse.py": ("blocksparse_attention",),
    "tests/kernels/test_tpu_linear_recurrence.py": _LINEAR,
    "tests/kernels/test_tpu_mean_pooling.py": ("mean_pooling",),
    "tests/kernels/test_tpu_serving.py": (
        *("page_attention", "ragged_page_attention", "ragged_decode_attention"),
    ),
    "tests/kernels/test_transforms.py": ("flash_attention",),
    "tests/kernels/test_tpu_grouped_matmul.py": ("grouped_matmul",),
    "tests/kernels/test_triton_compiles.py": ("flash_attention",),
    "tests/kernels/test_triton_config.py": ("flash_attention",),
    "tests/kernels/test_triton_grouped_matmul.py": ("grouped_matmul",),
    "tests/kernels/test_triton_mean_pooling.py": ("mean_pooling",),
    "tests/kernels/test_triton_linear.py": _LINEAR,
    "tests/kernels/test_triton_latent_pages.py": ("mla_page_attention",),
    "tests/kernels/test_triton_paged_writes.py": _WRITERS,
    "tests/kernels/test_triton_serving.py": _PAGED,
    "tests/kernels/test_triton_serving_config.py": _PAGED,
    "tests/kernels/test_triton_recurrent.py": ("recurrent",),
    "tests/kernels/test_triton_work.py": ("flash_attention",),
    "tests/test_moe_example.py": ("grouped_matmul",),
    "tests/kernels/test_triton_sparse.py": (
        *("blocksparse_attention", "native_sparse_attention", "apply_native_sparse_attention"),
    ),
}


# Long tests of what a generated test or another parameter checks quickly; for `make test-all`.
LATE = frozenset(
    f"tests/modules/test_{name}"
    for name in (
        "native_sparse_attention_edges.py::test_garbage_outside_sequences_changes_nothing",
        "native_sparse_attention_edges.py::test_sizes[sizes3]",
        "mla_attention.py::test_garbage_beyond_lengths_changes_nothing[True]",
        "mla_attention.py::test_a_mesh_changes_nothing[True]",
        "mla_attention.py::test_sizes[sizes3]",
    )
)


def ops_of(nodeid: str) -> frozenset[str]:
    """The operations that a test names: in its parameters, or by its file."""
    file, _, rest = nodeid.partition("::")
    words = re.split(r"[^a-z0-9_]+", rest.partition("[")[2])
    if named := OPS.intersection(words):
        return named
    if file in _FILES:
        return frozenset(_FILES[file])
    stem = pathlib.PurePosixPath(file).stem.removeprefix("test_")
    owners = [op for op in OPS if f"{stem}_".startswith(f"{op}_")]
    return frozenset([max(owners, key=len)] if owners else [])
