"""Each option changes the result of the oracle, and every kernel is tested with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import _spec, kernel_registry

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
OPS = [op for op in kernel_registry.ops() if kernel_registry.spec(op).changes is not dict]


def optional(spec):
    return {f.name for f in _spec.public_fields(spec.args) if f.name in spec.complete({})}


def options_of(spec, case):
    """The optional arguments that a case sets to something else than their defaults."""
    values = {}

    def make(key):
        values.update(case.values(jnp.dtype("float32"), key))

    jax.eval_shape(make, jax.random.key(0))
    defaults = spec.complete({})
    is_array = lambda x: isinstance(x, jax.Array | np.ndarray)
    return {
        name
        for name in optional(spec) & values.keys()
        if is_array(values[name]) or values[name] != defaults[name]
    }


@pytest.mark.parametrize("op", OPS)
def test_every_option_is_in_a_case_of_the_matrix(op):
    spec = kernel_registry.spec(op)
    assert set(spec.changes()) == optional(spec)
    covered = set().union(*(options_of(spec, case) for case in spec.cases()))
    assert optional(spec) - SILENT - covered == set()


@pytest.mark.parametrize("op", OPS)
def test_options_change_the_result(op):
    spec = kernel_registry.spec(op)
    plain = spec.cases()[0].values(jnp.float32, jax.random.key(2))
    oracle = lambda values: spec.reference_fn()(spec.canonicalize(spec.complete(values)))
    before = oracle(plain)
    for option, change in spec.changes().items():
        after = oracle(plain | change)
        if option in SILENT:
            np.testing.assert_array_equal(after[0], before[0], err_msg=option)
        elif len(after) == len(before):
            assert np.abs(np.asarray(after[0]) - np.asarray(before[0])).max() > 1e-2, option
