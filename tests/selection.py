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
    "tests/kernels/test_pallas_gpu_grouped.py": ("grouped_matmul",),
    "tests/kernels/test_pallas_gpu_lowers.py": ("flash_attention",),
    "tests/kernels/test_pallas_gpu_segments.py": ("flash_attention",),
    "tests/kernels/test_pallas_tpu.py": ("flash_attention",),
    "tests/kernels/test_tpu_blocksparse.py": ("blocksparse_attention",),
    "tests/kernels/test_tpu_latent_pages.py": ("mla_page_attention",),
    "tests/kernels/test_tpu_linear_recurrence.py": _LINEAR,
    "tests/kernels/test_tpu_mean_pooling.py": ("mean_pooling",),
    "tests/kernels/test_tpu_serving.py": (
        *("page_attention", "ragged_page_attention", "ragged_decode_attention"),
    ),
    "tests/kernels/test_tpu_recurrent.py": ("recurrent",),
    "tests/kernels/test_transforms.py": ("flash_attention",),
    "tests/kernels/test_tpu_grouped_matmul.py": ("grouped_matmul",),
    "tests/kernels/test_triton_compiles.py": ("flash_attention",),
    "tests/kernels/test_triton_config.py": ("flash_attention",),
    "tests/kernels/test_triton_grouped_matmul.py": ("grouped_matmul",),
    "tests/kernels/test_triton_mean_pooling.py": ("mean_pooling",),
    "tests/kernels/test_triton_linear.py": _LINEAR,
    "tests/kernels/test_triton_head_sizes.py": ("flash_attention",),
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
    f"tests/{name}"
    for name in (
        "modules/test_native_sparse_attention_edges.py::"
        "test_garbage_outside_sequences_changes_nothing",
        "modules/test_native_sparse_attention_edges.py::test_sizes[sizes3]",
        "modules/test_attention.py::test_matches_flash_attention[plain]",
        "kernels/test_pallas_tpu.py::test_dq_in_the_pass_over_keys[groups]",
        "modules/test_mla_attention.py::test_garbage_beyond_lengths_changes_nothing[True]",
        "modules/test_mla_attention.py::test_a_mesh_changes_nothing[True]",
        "modules/test_mla_attention.py::test_sizes[sizes3]",
        "aot/test_aot_cli.py::test_tuning_by_cycles",
        "bench/test_peers.py::test_the_public_package_serves_mixed_batches_in_a_loop",
        "distributed/test_ring.py::test_a_ring_of_four_tpus_compiles[contiguous]",
        "kernels/test_conformance.py::test_matches_oracle[flash_attention-pallas/tpu-cover00]",
        "kernels/test_traced_scale.py::test_gradient_is_the_oracles[ring_attention-float32]",
        "kernels/test_x64.py::test_under_x64[flash_attention-pallas/tpu-float32]",
        "kernels/test_blocks_and_lengths.py::"
        "test_rows_with_other_lengths_of_queries_than_of_keys[window-pallas/tpu]",
        "kernels/test_blocks_and_lengths.py::test_packed_sequences_in_a_window[pallas/tpu]",
        "kernels/test_pallas_tpu.py::test_a_bias_shared_over_queries_sums_the_parts_of_a_block",
        "kernels/test_pallas_tpu.py::test_a_window_far_from_the_first_fetch",
        "kernels/test_pallas_tpu.py::test_bias_gets_a_gradient_where_nothing_is_seen",
        "kernels/test_pallas_tpu.py::test_lengths_around_a_block[31]",
        "kernels/test_pallas_tpu.py::test_parts_of_blocks_on_an_edge[length0-options0]",
        "ptx/test_candidates.py::test_the_command_runs_configurations",
        "test_integrations.py::test_a_small_gpt_trains_and_draws_its_loss[gpt_nnx]",
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
