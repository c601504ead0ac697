"""Arrays that travel as one: every bit comes back, and numbers of one dtype can be added."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._ring.packed import Packing


def draw(shape, dtype, seed):
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(jax.random.key(seed), shape, -9, 9, dtype)
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype).at[0].set(jnp.nan)


@pytest.mark.parametrize("others", [("bfloat16", "int32"), ("float32", "int32"), ("float32", None)])
def test_bits_come_back(others):
    dtype, ids = others
    tree = (draw((2, 3, 4), dtype, 0), draw((2, 3, 5), dtype, 1), ids and draw((2, 3), ids, 2))
    made = Packing(tree)
    packed = made.join(tree)
    assert packed.ndim == 1
    assert packed.nbytes == sum(x.nbytes for x in jax.tree.leaves(tree))
    again = made.split(packed)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_numbers_of_one_dtype_add_up():
    tree = (jnp.arange(6.0).reshape(2, 3), jnp.ones(4))
    made = Packing(tree)
    a, b = made.split(made.join(tree) + made.join(tree))
    np.testing.assert_array_equal(a, 2 * tree[0])
    np.testing.assert_array_equal(b, 2 * tree[1])
