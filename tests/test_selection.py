"""The operations that tests are about."""

import pytest

from ejkernel.kernels import kernel_registry
from tests import selection


@pytest.mark.parametrize(
    ("nodeid", "ops"),
    [
        ("tests/kernels/test_conformance.py::test_a[gla-xla/any-plain]", {"gla"}),
        ("tests/kernels/test_conformance.py::test_a[attention-xla/any-plain]", {"attention"}),
        ("tests/kernels/test_effects.py::test_b[page_attention]", {"page_attention"}),
        ("tests/test_docs.py::test_blocks_run[docs/ops/mean_pooling.md]", {"mean_pooling"}),
        (
            "tests/modules/test_native_sparse_attention_edges.py::test_c[1-2]",
            {"native_sparse_attention"},
        ),
        ("tests/modules/test_ragged_page_attention_v3.py::test_d", {"ragged_page_attention_v3"}),
        ("tests/modules/test_sparse_matmul.py::test_e", {"sparse_matmul", "sampled_matmul"}),
        ("tests/kernels/test_edges.py::test_f[no_key-triton/gpu]", {"flash_attention"}),
        ("tests/ops/test_chain.py::test_g", set()),
    ],
)
def test_ops_of_a_test(nodeid, ops):
    assert selection.ops_of(nodeid) == ops


def test_late_tests_are_there():
    root = selection._SPECS.parents[2]
    for nodeid in selection.LATE:
        file, _, test = nodeid.partition("::")
        assert f"def {test.partition('[')[0]}(" in (root / file).read_text(), nodeid


def test_every_op_and_every_file_is_known():
    assert set(kernel_registry.ops()) >= selection.OPS
    root = selection._SPECS.parents[2]
    assert [f for f in selection._FILES if not (root / f).is_file()] == []
    assert {op for ops in selection._FILES.values() for op in ops} <= selection.OPS
