"""Each option, set, changes the result as the oracle says; none is accepted and dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import _spec, kernel_registry
from tests.kernels import harness

OPTIONS = [
    (entry.op, entry.name, option)
    for op in kernel_registry.ops()
    for entry in kernel_registry.list(op)
    for option in kernel_registry.spec(op).changes()
]
# they change which kernel serves, how it splits its work, or only what is allowed
SILENT = {
    "deterministic",
    "num_splits",
    "block_size",
    "donate_cache",
    "axis_name",
    "strategy",
    "layout",
}


@pytest.mark.parametrize("op", sorted({op for op, *_ in OPTIONS}))
def test_every_option_is_covered(op):
    spec = kernel_registry.spec(op)
    optional = {f.name for f in _spec.public_fields(spec.args) if f.name in spec.complete({})}
    assert set(spec.changes()) == optional


@pytest.mark.parametrize(("op", "entry_name", "option"), harness.marked(OPTIONS, quick=False))
def test_option_has_the_oracles_effect(op, entry_name, option):
    spec, entry = kernel_registry.spec(op), harness.find_entry(op, entry_name)
    plain = spec.cases()[0].values(jnp.float32, jax.random.key(2))
    args = spec.canonicalize(spec.complete(plain | spec.changes()[option]))
    if (reason := entry.why_not(args)) is not None:
        assert option in reason or entry.requires(args) is not None
        return
    cfg = harness.configs(entry, args, "testing")[0]
    run = jax.jit(lambda args: entry.fn(args, cfg)[0], compiler_options=harness.QUICK)
    actual, expected = run(args), spec.reference_fn()(args)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-6)
    before = spec.reference_fn()(spec.canonicalize(spec.complete(plain)))
    if option in SILENT:
        np.testing.assert_array_equal(expected[0], before[0])
    elif len(expected) == len(before):
        assert np.abs(np.asarray(expected[0]) - np.asarray(before[0])).max() > 1e-2
