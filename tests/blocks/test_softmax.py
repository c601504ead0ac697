"""Online softmax: however keys are cut into chunks, the answer is that of one softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel.kernels._xla._blocks import softmax

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)
ROWS, KEYS, WIDTH, SINKS = 4, 12, 3, 2
EXACT = jax.lax.Precision.HIGHEST

seeds = st.integers(0, 2**16)
# which of three chunks a key belongs to; a chunk may stay empty
chunks = st.lists(st.integers(0, 2), min_size=KEYS, max_size=KEYS)
# hidden keys of row r are those with (key * 7 + r) % 12 < hidden: 0 hides none, 12 all
hidden = st.integers(0, KEYS)
scales = st.sampled_from([0.0, 1.0, 100.0, 1e30])
# added to each chunk: the running maximum jumps up, down, or by more than exp can tell
offsets = st.tuples(*[st.sampled_from([0.0, 200.0, -200.0])] * 3)


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def make(seed, chunk, hide, scale=1.0, offset=(0.0, 0.0, 0.0)):
    """Logits [rows, keys] with -inf where hidden, the chunk of each key, and values."""
    rng = np.random.default_rng(seed)
    chunk = np.asarray(chunk)
    logits = rng.standard_normal((ROWS, KEYS)) * scale + np.asarray(offset)[chunk]
    key, row = np.arange(KEYS), np.arange(ROWS)[:, None]
    # row 0 always loses every key when any row loses one
    gone = ((key * 7 + row) % KEYS < hide) | ((row == 0) & (hide > 0))
    logits = np.where(gone, -np.inf, logits).astype(np.float32)
    values = rng.standard_normal((KEYS, WIDTH)).astype(np.float32)
    return jnp.asarray(logits), jnp.asarray(chunk), jnp.asarray(values)


def sinks_of(seed, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed + 2**17).standard_normal((1, SINKS)) * scale, "f")


def dot(weights, values):
    return jnp.einsum("ts,se->te", weights, values, precision=EXACT)


def fold(state, logits, values):
    """One chunk, as the kernel adds it."""
    m, weights, alpha = softmax.weigh(state.m, logits)
    total = state.l * alpha + weights.sum(axis=-1)
    return softmax.State(m, total, state.acc * alpha[..., None] + dot(weights, values))


@functools.partial(jax.jit, static_argnames="sinks_first")
def in_chunks(logits, chunk, values, sinks=None, sinks_first=False):
    """Chunks of any keys: a key outside the chunk is masked in it."""
    state = softmax.init((ROWS,), WIDTH, jnp.float32)
    sinks = None if sinks is None else sinks[0]
    if sinks_first:
        state = softmax.add_sinks(state, sinks)
    for c in range(3):
        state = fold(state, jnp.where(chunk[None] == c, logits, -jnp.inf), values)
    if not sinks_first:
        state = softmax.add_sinks(state, sinks)
    return softmax.finish(state)


@functools.partial(jax.jit, static_argnames="size")
def in_slices(logits, values, size):
    """Chunks of neighbouring keys."""
    state = softmax.init((ROWS,), WIDTH, jnp.float32)
    for start in range(0, KEYS, size):
        state = fold(state, logits[:, start : start + size], values[start : start + size])
    return softmax.finish(state)


@jax.jit
def at_once(logits, values, sinks=None):
    """`jax.nn.softmax` and `logsumexp` over all keys; 0 and -inf for a row without any."""
    if sinks is not None:
        logits = jnp.concatenate([logits, jnp.broadcast_to(sinks, (ROWS, SINKS))], axis=-1)
    empty = jnp.isneginf(logits).all(axis=-1, keepdims=True)
    safe = jnp.where(empty, 0.0, logits)
    weights = jnp.where(empty, 0.0, jax.nn.softmax(safe, axis=-1))[:, :KEYS]
    lse = jnp.where(empty[:, 0], -jnp.inf, jax.nn.logsumexp(safe, axis=-1))
    return dot(weights, values), lse


def assert_same(actual, expected, rtol=1e-5, atol=2e-6):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol)


@SETTINGS
@given(seed=seeds, chunk=chunks, hide=hidden, scale=scales, offset=offsets)
@example(seed=1, chunk=[0] * 12, hide=0, scale=1.0, offset=(0.0, 0.0, 0.0))
@example(seed=2, chunk=[0, 1, 2] * 4, hide=12, scale=1.0, offset=(0.0, 0.0, 0.0))
@example(seed=3, chunk=[2] * 12, hide=5, scale=1.0, offset=(0.0, 0.0, 0.0))
@example(seed=4, chunk=[0, 1, 2] * 4, hide=3, scale=1e30, offset=(0.0, 0.0, 0.0))
@example(seed=5, chunk=[0, 1, 2] * 4, hide=0, scale=1.0, offset=(-200.0, 0.0, 200.0))
@example(seed=6, chunk=[0, 1, 2] * 4, hide=0, scale=1.0, offset=(200.0, 0.0, -200.0))
@example(seed=7, chunk=[1, 2] * 6, hide=1, scale=1.0, offset=(0.0, -200.0, -200.0))
def test_chunking_never_changes_the_answer(seed, chunk, hide, scale, offset):
    logits, chunk, values = make(seed, chunk, hide, scale, offset)
    assert_same(in_chunks(logits, chunk, values), at_once(logits, values))


@pytest.mark.parametrize("size", [1, 5, 12])
@pytest.mark.parametrize("hide", [0, 4, 12])
def test_slices_of_any_size_give_the_same_answer(size, hide):
    logits, _, values = make(size, [0] * KEYS, hide, 3.0)
    assert_same(in_slices(logits, values, size), at_once(logits, values))


@SETTINGS
@given(seed=seeds, chunk=chunks, hide=hidden, scale=scales, height=st.sampled_from([0.0, 30.0]))
@example(seed=1, chunk=[0] * 12, hide=0, scale=1.0, height=0.0)
@example(seed=2, chunk=[0, 1, 2] * 4, hide=0, scale=1.0, height=0.0)
@example(seed=3, chunk=[0, 1, 2] * 4, hide=12, scale=1.0, height=0.0)
@example(seed=4, chunk=[0, 1, 2] * 4, hide=4, scale=100.0, height=1e30)
def test_sinks_count_once_however_many_chunks(seed, chunk, hide, scale, height):
    logits, chunk, values = make(seed, chunk, hide, scale)
    sinks = sinks_of(seed) + height
    expected = at_once(logits, values, sinks)
    assert_same(in_chunks(logits, chunk, values, sinks), expected)
    assert_same(in_chunks(logits, chunk, values, sinks, sinks_first=True), expected)


def test_a_row_that_sees_only_sinks_gives_zero_and_their_logsumexp():
    logits, chunk, values = make(8, [0, 1, 2] * 4, KEYS)
    sinks = sinks_of(8)
    out, lse = in_chunks(logits, chunk, values, sinks)
    assert not np.any(out)
    np.testing.assert_allclose(lse, [jax.nn.logsumexp(sinks)] * ROWS, rtol=1e-6)


def test_a_row_that_sees_nothing_gives_zero_and_minus_infinity():
    logits, chunk, values = make(9, [0, 1, 2] * 4, KEYS)
    absent = jnp.full((1, SINKS), -jnp.inf)
    for sinks in (None, absent):
        out, lse = in_chunks(logits, chunk, values, sinks)
        assert not np.any(out)
        assert np.all(np.isneginf(lse))


def test_sinks_of_heads_go_to_their_heads():
    state = softmax.init((2, 3), WIDTH, jnp.float32)  # [heads, rows]
    sinks = jnp.asarray([[1.0, 2.0], [-5.0, 0.5]])
    _, lse = softmax.finish(softmax.add_sinks(state, sinks))
    expected = np.logaddexp(*np.asarray(sinks).T)
    np.testing.assert_allclose(lse, np.repeat(expected[:, None], 3, axis=1), rtol=1e-6)


def test_a_key_that_is_not_a_number_spoils_its_row_only():
    logits, chunk, values = make(10, [0, 1, 2] * 4, 0)
    out, lse = in_chunks(logits.at[1, 5].set(jnp.nan), chunk, values)
    spoiled = np.isnan(lse)
    np.testing.assert_array_equal(spoiled, [False, True, False, False])
    np.testing.assert_array_equal(np.isnan(out).any(axis=-1), spoiled)


# merge

ULP_OF_LSE = 5e-5  # weights are exp of lse, and a float32 of 200 or more is that coarse


def part(logits, chunk, values, numbers):
    """Attention over the keys of some chunks, differentiable."""
    keep = functools.reduce(jnp.logical_or, [chunk == c for c in numbers])[None]
    logits = jnp.where(keep, logits, -jnp.inf)
    empty = jnp.isneginf(logits).all(axis=-1, keepdims=True)
    safe = jnp.where(empty, 0.0, logits)
    weights = jnp.where(empty, 0.0, jax.nn.softmax(safe, axis=-1))
    lse = jnp.where(empty[:, 0], -jnp.inf, jax.nn.logsumexp(safe, axis=-1))
    return dot(weights, values), lse


@jax.jit
def merged(logits, chunk, values):
    """The union of three chunks, merged in every order and nesting."""
    a, b, c = (part(logits, chunk, values, [n]) for n in range(3))
    merge = softmax.merge
    return (
        merge(*merge(*a, *b), *c),
        merge(*a, *merge(*b, *c)),
        merge(*merge(*c, *b), *a),
        part(logits, chunk, values, range(3)),
    )


@SETTINGS
@given(seed=seeds, chunk=chunks, hide=hidden, scale=scales, offset=offsets)
@example(seed=1, chunk=[0, 1, 2] * 4, hide=0, scale=1.0, offset=(0.0, 0.0, 0.0))
@example(seed=2, chunk=[1] * 12, hide=0, scale=1.0, offset=(0.0, 0.0, 0.0))
@example(seed=3, chunk=[0, 1, 2] * 4, hide=12, scale=1.0, offset=(0.0, 0.0, 0.0))
@example(seed=4, chunk=[0, 2] * 6, hide=4, scale=1.0, offset=(-200.0, 0.0, 200.0))
@example(seed=5, chunk=[0, 1, 2] * 4, hide=4, scale=1e30, offset=(0.0, 0.0, 0.0))
def test_merge_is_associative_and_commutative(seed, chunk, hide, scale, offset):
    logits, chunk, values = make(seed, chunk, hide, scale, offset)
    *orders, whole = merged(logits, chunk, values)
    for one in orders:
        assert_same(one, whole, atol=ULP_OF_LSE)


@jax.jit
def merge_gradients(logits, chunk, values, weight):
    """Gradients of out and of the finite lse, through merged parts and through the whole."""

    def loss(out, lse):
        seen = ~jnp.isneginf(lse)
        return (out * weight).sum() + jnp.where(seen, jnp.where(seen, lse, 0.0), 0.0).sum()

    def through_parts(logits, values):
        a, b, c = (part(logits, chunk, values, [n]) for n in range(3))
        return loss(*softmax.merge(*softmax.merge(*a, *b), *c))

    def directly(logits, values):
        return loss(*part(logits, chunk, values, range(3)))

    return tuple(jax.grad(f, argnums=(0, 1))(logits, values) for f in (through_parts, directly))


@SETTINGS
@given(seed=seeds, chunk=chunks, hide=hidden, offset=offsets)
@example(seed=1, chunk=[0, 1, 2] * 4, hide=0, offset=(0.0, 0.0, 0.0))
@example(seed=2, chunk=[1] * 12, hide=0, offset=(0.0, 0.0, 0.0))
@example(seed=3, chunk=[0, 1, 2] * 4, hide=12, offset=(0.0, 0.0, 0.0))
@example(seed=4, chunk=[0, 2] * 6, hide=3, offset=(0.0, 0.0, 0.0))
@example(seed=5, chunk=[0, 1] * 6, hide=3, offset=(200.0, -200.0, 0.0))
def test_gradients_of_merge_are_those_of_the_whole(seed, chunk, hide, offset):
    logits, chunk, values = make(seed, chunk, hide, 1.0, offset)
    weight = jax.random.normal(jax.random.key(seed), (ROWS, WIDTH))
    through_parts, directly = merge_gradients(logits, chunk, values, weight)
    assert_same(through_parts, directly, atol=ULP_OF_LSE)


def test_gradients_of_merge_at_minus_infinity():
    """Rows: neither side has a key, only a, only b, both."""
    keys = jax.random.split(jax.random.key(0), 4)
    out_a, out_b, dout = (jax.random.normal(k, (4, WIDTH)) for k in keys[:3])
    dlse = jax.random.normal(keys[3], (4,))
    lse_a = jnp.asarray([-jnp.inf, 0.5, -jnp.inf, 1.0])
    lse_b = jnp.asarray([-jnp.inf, -jnp.inf, 2.0, 1.5])
    (out, lse), pull = jax.vjp(softmax.merge, out_a, lse_a, out_b, lse_b)
    np.testing.assert_allclose(out[1], out_a[1], rtol=1e-6)
    np.testing.assert_allclose(out[2], out_b[2], rtol=1e-6)
    np.testing.assert_allclose(lse, [-np.inf, 0.5, 2.0, np.logaddexp(1.0, 1.5)], rtol=1e-6)
    d_out_a, d_lse_a, d_out_b, d_lse_b = pull((dout, dlse))

    share_a = np.asarray([0.0, 1.0, 0.0, 1 / (1 + np.exp(0.5))])
    share_b = np.asarray([0.0, 0.0, 1.0, 1 / (1 + np.exp(-0.5))])
    np.testing.assert_allclose(d_out_a, share_a[:, None] * dout, rtol=1e-5)
    np.testing.assert_allclose(d_out_b, share_b[:, None] * dout, rtol=1e-5)
    pull_apart = np.einsum("te,te->t", np.asarray(out_a) - np.asarray(out_b), np.asarray(dout))
    spread = share_a * share_b * pull_apart
    np.testing.assert_allclose(d_lse_a, share_a * dlse + spread, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d_lse_b, share_b * dlse - spread, rtol=1e-5, atol=1e-6)


def test_merge_keeps_large_and_distant_states_finite():
    out_a, out_b = (jax.random.normal(k, (4, WIDTH)) for k in jax.random.split(jax.random.key(1)))
    lse_a = jnp.asarray([1e30, -1e30, 500.0, -500.0])
    lse_b = jnp.asarray([-1e30, 1e30, 499.0, -499.0])
    out, lse = softmax.merge(out_a, lse_a, out_b, lse_b)
    np.testing.assert_allclose(out[0], out_a[0], rtol=1e-6)
    np.testing.assert_allclose(out[1], out_b[1], rtol=1e-6)
    np.testing.assert_allclose(lse, np.logaddexp(lse_a, lse_b), rtol=1e-6)
