"""No batch, one row, one token: every kernel of every op that has such an axis."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels import _oracle, _spec, _types, kernel_registry
from tests.backend import BACKEND
from tests.kernels import harness, oracles

SIZES = {"no_batch": ("b", 0), "one_row": ("b", 1), "one_token": ("t", 1), "one_key": ("s", 1)}
QUICK = ("no_batch", "one_token")
# its block mask has a shape of its own for each length
LENGTHS_OF_ITS_OWN = "blocksparse_attention"


def rows():
    for op in kernel_registry.ops():
        fields = _spec.array_fields(kernel_registry.spec(op).args)
        if not all(_types.array_type(f.type) for f in fields):
            continue  # weights in a dict
        axes = {axis for f in fields for axis in _types.axes_of(f.type)}
        for entry in kernel_registry.list(op):
            for name, (axis, _) in SIZES.items():
                if axis in axes and not (op == LENGTHS_OF_ITS_OWN and axis != "b"):
                    quick = name in QUICK and entry.base is None
                    quick &= name == "no_batch" or not harness.interpreted(entry)
                    late = [] if quick else [pytest.mark.slow]
                    yield pytest.param(op, entry.name, name, marks=[*harness.marks(entry), *late])


def resized(op, axis, size):
    """The plain case with another length of an axis."""
    spec = kernel_registry.spec(op)
    args = spec.make(spec.cases()[0], jnp.dtype("float32"), jax.random.key(11))
    axes = spec._axes(args)
    shapes = {
        name: jax.ShapeDtypeStruct(
            tuple(size if a == axis else n for a, n in zip(axes[name], x.shape, strict=True)),
            x.dtype,
        )
        for name, x in args.arrays().items()
    }
    return spec.example(args.with_arrays(shapes))


@pytest.mark.parametrize(("op", "entry_name", "name"), list(rows()))
def test_sizes(op, entry_name, name, record_property):
    entry, spec = harness.find_entry(op, entry_name), kernel_registry.spec(op)
    axis, size = SIZES[name]
    # gradients that are 0 with a single key are compared in the tests of edges
    wanted = () if size and axis in "ts" else tuple(sorted(spec.differentiable))
    solve = lambda: harness.solve(spec, resized(op, axis, size), wanted or ("none",))
    made = oracles.remember(("sizes", op, name), BACKEND, solve)
    if entry.why_not(made.args) is not None:
        record_property("refused", True)
        return
    cfg = harness.configs(entry, made.args, "heuristic")
    actual = harness.run_entry(entry, made, cfg, compiler_options=harness.QUICK)
    reason = _oracle.mismatch(actual, made)
    assert reason is None, reason
