"""NaN in padding changes nothing, in every kernel: neither results nor gradients.

Padding is found by the oracle: in the cases that a spec names, whatever no result depends on.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import _oracle, kernel_registry
from tests.backend import BACKEND
from tests.kernels import harness, oracles

# arguments that say which tokens, pages, rows or steps are real
LENGTHS = frozenset(
    {
        *("cu_seqlens", "cum_seqlens_q", "q_segment_ids", "context_lens", "lengths"),
        *("group_sizes", "slot_mapping", "sequence_start"),
    }
)
# what no list selects is no padding; tokens behind the last sequence are
SELECTED = ("native_sparse_attention", "apply_native_sparse_attention")


def rows():
    """Every case of every kernel; in `make test` the first that it serves, and of derived ops none.

    Unless these compute something before the kernel of their base runs.
    """
    for op in kernel_registry.ops():
        for entry in kernel_registry.list(op):
            for number, case in enumerate(kernel_registry.spec(op).padded):
                slow = harness.interpreted(entry)
                quick = entry.base is None and number == 0
                quick |= case == harness.instead(op, entry.name)
                quick &= not (slow and harness.is_schedule(entry))
                quick |= harness.computes_first(entry) and number == 0 and not slow
                late = [] if quick else [pytest.mark.slow]
                yield pytest.param(op, entry.name, case, marks=[*harness.marks(entry), *late])


def solve(op, case, dtype):
    """The oracle's problem, with gradients by all floats, differentiable or not."""
    spec = kernel_registry.spec(op)

    def make():
        args = spec.make(harness.find_case(op, case), jnp.dtype(dtype), jax.random.key(11))
        floats = (n for n, x in args.arrays().items() if jnp.issubdtype(x.dtype, jnp.floating))
        return _oracle.solve(spec, args, tuple(floats), harness.QUICK)

    return oracles.remember(("padding", op, case, dtype), BACKEND, make)


def spoiled(op, made):
    """The call with NaN wherever the oracle's gradient is 0; how many numbers that are."""
    changed, count = {}, 0
    for name, gradient in made.oracle.gradients.items():
        unused = gradient == 0
        if op in SELECTED:
            tokens = np.arange(gradient.shape[1]) >= np.asarray(made.args.cu_seqlens)[-1]
            unused &= tokens.reshape(1, -1, *(1,) * (gradient.ndim - 2))
        array = made.args.arrays()[name]
        changed[name] = jnp.where(unused, jnp.asarray(jnp.nan, array.dtype), array)
        count += unused.sum()
    return made.args.with_arrays(changed), count


@pytest.mark.parametrize(("op", "entry_name", "case"), list(rows()))
def test_garbage_in_padding_never_matters(op, entry_name, case, record_property):
    entry, made = harness.find_entry(op, entry_name), solve(op, case, "float32")
    if entry.why_not(made.args) is not None:
        record_property("refused", True)
        return
    args, count = spoiled(op, made)
    assert count > 0, "the case has no padding"
    wanted = tuple(n for n in made.wanted if n in kernel_registry.spec(op).differentiable)
    made = dataclasses.replace(made, args=args, wanted=wanted)
    cfg = harness.configs(entry, args, "testing")
    actual = harness.run_entry(entry, made, cfg, compiler_options=harness.QUICK)
    reason = _oracle.mismatch(actual, made)
    assert reason is None, reason


def test_every_op_with_lengths_has_a_case_of_padding():
    missing = []
    for op in kernel_registry.ops():
        spec = kernel_registry.spec(op)
        fields = {field.name for field in dataclasses.fields(spec.args)}
        if fields & LENGTHS and not spec.padded:
            missing.append(op)
    assert missing == []
