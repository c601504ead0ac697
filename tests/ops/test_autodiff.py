"""The derivative rule under `vmap` where not every result depends on the mapped argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.errors import UnsupportedError
from ejkernel.modules import gla
from ejkernel.ops import Kernel


class SumAndScale(Kernel):
    """Two results: the second depends on `b` alone."""

    def run(self, a, b, cfg):
        return a * b.sum(), jnp.sin(b)

    def heuristic_cfg(self, inv):
        return None

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        a, b = primals
        dx, dy = cotangents
        return dx * b.sum(), (dx * a).sum() + dy * jnp.cos(b)


def normal(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape)


def own_kernel():
    kernel = SumAndScale(name="sum_and_scale")
    return lambda a, b: kernel(a, b), normal(0, (3, 4)), normal(1, (4,))


def state_of_gla():
    k = normal(1, (1, 4, 1, 2))
    call = lambda q, v: gla(q, k, v, return_state=True)
    return call, normal(0, (3, 1, 4, 1, 2)), normal(2, (1, 4, 1, 2))


def eager(function):
    return function


@pytest.mark.parametrize(
    ("make", "transform"), [(own_kernel, eager), (own_kernel, jax.jit), (state_of_gla, jax.jit)]
)
def test_results_without_the_mapped_axis_count_once_a_lane(make, transform):
    call, mapped, shared = make()

    def lane(x, shared):
        first, second = call(x, shared)
        return (first**2).sum() + second.sum() ** 2

    def by_vmap(shared):
        return jax.vmap(lambda x: lane(x, shared))(mapped).sum()

    def by_loop(shared):
        return sum(lane(x, shared) for x in mapped)

    def everything(loss):
        value, gradient = jax.value_and_grad(loss)(shared)
        along = jax.jvp(loss, (shared,), (jnp.ones_like(shared),))
        return value, gradient, along

    actual, expected = (transform(lambda f=f: everything(f))() for f in (by_vmap, by_loop))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_vmap_of_vmap_over_different_arguments():
    call, mapped, shared = own_kernel()
    more = jnp.stack([shared, 2 * shared])
    loss = lambda b: jax.vmap(lambda b: jax.vmap(lambda a: call(a, b)[1].sum())(mapped).sum())(b)
    value, gradient = jax.value_and_grad(lambda b: loss(b).sum())(more)
    np.testing.assert_allclose(value, 3 * jnp.sin(more).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, 3 * jnp.cos(more), rtol=1e-5)


class Checked(SumAndScale):
    """A backward that looks at its cotangents, as kernels do whose padding may hold nan."""

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        clean = [jnp.where(jnp.isfinite(c), c, 0) for c in cotangents]
        return super().custom_vjp(primals, cfg, kwargs, clean)


def test_the_constant_cotangent_of_a_sum_is_not_folded_by_the_compiler():
    kernel = Checked(name="checked")
    gradient = jax.grad(lambda a, b: kernel(a, b)[0].sum())
    program = jax.jit(gradient).lower(jnp.ones((4,)), jnp.ones((4,))).compile().as_text()
    assert "is-finite" in program


@pytest.mark.parametrize("transform", [eager, jax.jit])
def test_linear_transpose_says_what_to_do(transform):
    x = normal(0, (1, 4, 1, 2))
    attend = transform(lambda v: gla(x, x, v))
    with pytest.raises(UnsupportedError, match=r"`jax\.vjp`.*`jax\.linearize`"):
        jax.linear_transpose(attend, x)(x)
    _, linear = jax.linearize(attend, x)
    (found,) = jax.linear_transpose(linear, x)(x)
    np.testing.assert_array_equal(found, jax.vjp(attend, x)[1](x)[0])
