"""Loops with static or traced bounds, and blocks along axes that may be broadcast."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from ejkernel.kernels._xla._blocks import loops
from ejkernel.xla_utils import manual

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def step(i, state):
    """Not commutative, so that order and count of the steps show."""
    x, n = state
    return x * 2.0 + jnp.asarray(i, jnp.float32), n + 1


def slow_fori(lower, upper):
    x, n = 1.0, 0
    for i in range(lower, upper):
        x, n = x * 2.0 + i, n + 1
    return x, n


@jax.jit
def traced_fori(lower, upper):
    return loops.fori(lower, upper, step, (jnp.float32(1.0), jnp.int32(0)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def known_fori(lower, upper):
    return loops.fori(lower, upper, step, (jnp.float32(1.0), jnp.int32(0)))


@SETTINGS
@given(lower=st.integers(-2, 4), count=st.integers(-1, 3))
@example(lower=0, count=0)
@example(lower=3, count=1)
@example(lower=2, count=-1)
@example(lower=1, count=2)
def test_fori_is_a_loop(lower, count):
    expected = slow_fori(lower, lower + count)
    assert tuple(map(float, traced_fori(lower, lower + count))) == expected
    assert tuple(map(float, known_fori(lower, lower + count))) == expected


def primitives(function, *args):
    return {str(eqn.primitive) for eqn in jax.make_jaxpr(function)(*args).eqns}


@pytest.mark.parametrize(("count", "loop"), [(0, False), (1, False), (2, True)])
def test_one_known_step_is_no_loop(count, loop):
    def fori():
        return loops.fori(2, 2 + count, step, (jnp.float32(1.0), jnp.int32(0)))

    def scan():
        return loops.scan(count, lambda x, i: (x + 1.0, x), jnp.float32(0.0))

    def stack():
        return loops.stack(count, lambda i: jnp.ones(2))

    looping = {"while", "scan"}
    assert bool(primitives(fori) & looping) == loop
    if count:
        assert bool(primitives(scan) & looping) == loop
        assert bool(primitives(stack) & looping) == loop


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_stack_and_scan_number_their_steps(count):
    x = jax.random.normal(jax.random.key(count), (3,))

    def stacked(x):
        return loops.stack(
            count,
            lambda i: {"a": x * jnp.asarray(i + 1, jnp.float32), "b": jnp.asarray(i, jnp.int32)},
        )

    made = jax.jit(stacked)(x)
    factors = np.arange(1, count + 1, dtype=np.float32)[:, None]
    np.testing.assert_allclose(made["a"], factors * np.asarray(x), rtol=1e-6)
    np.testing.assert_array_equal(made["b"], np.arange(count))

    def body(state, i):
        new = state * 2.0 + jnp.asarray(i, jnp.float32)
        return new, (state, new[:1])

    last, (before, first) = jax.jit(lambda x: loops.scan(count, body, x))(x)
    states = [np.asarray(x)]
    for i in range(count):
        states.append(states[-1] * 2 + i)
    np.testing.assert_allclose(last, states[-1], rtol=1e-6)
    np.testing.assert_allclose(before, np.asarray(states[:-1]).reshape(count, 3), rtol=1e-6)
    np.testing.assert_allclose(first, np.asarray(states[1:]).reshape(count, 3)[:, :1], rtol=1e-6)


@SETTINGS
@given(
    axis=st.integers(0, 2),
    full=st.sampled_from([1, 4, 12]),
    index=st.integers(0, 2),
    traced=st.booleans(),
)
@example(axis=0, full=12, index=2, traced=True)
@example(axis=1, full=1, index=2, traced=True)
@example(axis=2, full=4, index=0, traced=False)
def test_take_cuts_blocks_of_four(axis, full, index, traced):
    """An axis of one element serves every block; an axis of one block is that block."""
    index = index if full == 12 else 0 if full == 4 else index
    shape = [2, 3, 5]
    shape[axis] = full
    x = np.random.default_rng(full).standard_normal(shape).astype(np.float32)
    taken = loops.take(jnp.asarray(x), jnp.int32(index) if traced else index, 4, axis)
    expected = x if full == 1 else np.take(x, range(4 * index, 4 * index + 4), axis=axis)
    np.testing.assert_array_equal(taken, expected)


@SETTINGS
@given(
    shape=st.tuples(st.sampled_from([1, 2, 6]), st.sampled_from([1, 3, 9])),
    at=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
@example(shape=(6, 9), at=(2, 1))
@example(shape=(1, 9), at=(2, 2))
@example(shape=(2, 3), at=(2, 1))
@example(shape=(1, 1), at=(1, 2))
def test_put_adds_a_block_where_it_belongs(shape, at):
    """Blocks of 2 x 3; an axis of one block or one element takes every index."""
    block_shape = tuple(min(n, full) for n, full in zip((2, 3), shape, strict=True))
    old, block = (
        np.random.default_rng(seed).standard_normal(s).astype(np.float32)
        for seed, s in ((1, shape), (2, block_shape))
    )
    made = loops.put(jnp.asarray(old), jnp.asarray(block), tuple(map(jnp.int32, at)))
    expected = old.copy()
    start = [0 if b == n else i * b for i, b, n in zip(at, block_shape, shape, strict=True)]
    where = tuple(slice(s, s + b) for s, b in zip(start, block_shape, strict=True))
    expected[where] += block
    np.testing.assert_allclose(made, expected, rtol=1e-6)


def test_take_and_put_undo_each_other():
    x = jnp.asarray(np.random.default_rng(5).standard_normal((4, 6)), jnp.float32)
    made = jnp.zeros_like(x)
    for i in range(2):
        for j in range(3):
            block = loops.take(loops.take(x, i, 2, 0), j, 2, 1)
            made = loops.put(made, block, (i, j))
    np.testing.assert_array_equal(made, x)


def test_vary_like_changes_nothing_outside_shard_map():
    state = (jnp.zeros(3), jnp.ones((2, 2)))
    assert loops.vary_like(state, jnp.ones(4)) is state


def test_vary_like_lets_a_loop_start_inside_shard_map():
    """A constant first state and a varying step have one type; a varying state stays as it is."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.random.normal(jax.random.key(3), (2, 4))

    def body(x):
        zeros, kept = loops.vary_like((jnp.zeros(4), x[0]), x)
        assert manual.varying_axes(zeros) == manual.varying_axes(kept) == {"x"}
        return loops.fori(0, 2, lambda i, state: state + jnp.take(x, i, axis=0), zeros)[None]

    summed = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(x)
    np.testing.assert_allclose(summed[0], np.asarray(x).sum(axis=0), rtol=1e-6)
