"""Programs that write in place, on arrays that differ over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.xla_utils import manual, unchecked


def doubled(x, y):
    """Twice x, and y + x, both written where they were."""

    def body(refs):
        a, b = refs
        b[...] += a[...]
        a[...] = 2 * a[...]

    return pl.run_state(body)((x, y))


def over_two(fn):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return jax.shard_map(fn, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))


@pytest.fixture
def arrays():
    return jnp.arange(8.0).reshape(4, 2), jnp.ones((2, 2))


def test_numbers_and_types_inside_shard_map(arrays):
    def run(x, y):
        a, b = unchecked.run(doubled, x, y)
        assert manual.varying_axes(a) == manual.varying_axes(b) == {"x"}
        return a, b

    x, y = arrays
    a, b = jax.jit(over_two(run))(x, y)
    np.testing.assert_array_equal(a, 2 * x)
    np.testing.assert_array_equal(b, np.concatenate([y, y]) + x)


def test_elsewhere_it_is_a_call(arrays):
    x, _ = arrays
    program = jax.make_jaxpr(lambda x: unchecked.run(doubled, x, x))(x)
    assert "ejkernel_unchecked" not in str(program)
    np.testing.assert_array_equal(unchecked.run(doubled, x, x)[0], 2 * x)
