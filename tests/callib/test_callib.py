import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.callib import cdiv, ejit, next_power_of_2, strides_from_shape


def test_sizes():
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert strides_from_shape((2, 3, 4)) == (12, 4, 1)
    assert strides_from_shape(()) == ()
    array = np.zeros((5, 7, 2), np.float32)
    assert strides_from_shape(array.shape) == tuple(s // 4 for s in array.strides)


def test_ejit_shares_one_cache_and_tells_static_types_apart():
    traces = []

    def scaled(x, factor):
        traces.append(factor)
        return x * factor

    x = jnp.arange(3.0)
    for factor in (2, 2, True, 1, 1.0):
        np.testing.assert_array_equal(ejit(scaled, static_argnums=1)(x, factor), x * factor)
    assert [type(f) for f in traces] == [int, bool, int, float]
    assert ejit(scaled, static_argnums=1) is ejit(scaled, static_argnums=(1,))


def test_ejit_as_a_decorator():
    @ejit(static_argnames="power")
    def raised(x, power=2):
        return x**power

    np.testing.assert_array_equal(raised(jnp.arange(3.0), power=3), [0.0, 1.0, 8.0])
    np.testing.assert_array_equal(raised(jnp.arange(3.0)), [0.0, 1.0, 4.0])


def test_ejit_donates():
    x = jnp.arange(4.0)
    out = ejit(lambda x: x + 1, donate_argnums=0)(x)
    np.testing.assert_array_equal(out, [1.0, 2.0, 3.0, 4.0])
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(x)
