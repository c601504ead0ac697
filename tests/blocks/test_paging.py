"""Paging: which keys a step brings, where tokens go, and how narrow caches hold them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel.kernels._shared import page_slots
from ejkernel.kernels._xla._blocks import paging

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)
ROWS, BLOCKS, SIZE, TOKENS = 3, 5, 4, 14
ROOM = BLOCKS * SIZE

lengths = st.lists(st.integers(0, ROOM), min_size=ROWS, max_size=ROWS)
counts = st.lists(st.integers(0, 5), min_size=ROWS, max_size=ROWS)


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def walk_all(lens, left, block_k):
    """(row, position) -> the flat place in the cache that a walk brings there, for every step."""
    rng = np.random.default_rng(0)
    table = rng.permutation(ROWS * BLOCKS).reshape(ROWS, BLOCKS).astype(np.int32)
    last = jnp.asarray(lens, jnp.int32)[:, None] - 1
    first = jnp.zeros(ROWS, jnp.int32)
    pages = paging.walk(jnp.asarray(table), first, last, left, block_k, SIZE)
    places = np.arange(ROWS * BLOCKS * SIZE, dtype=np.float32).reshape(-1, 1, SIZE, 1)

    def take(ids):
        got = jnp.asarray(places)[ids]
        return got, got

    found, (lower, upper) = {}, pages.steps(last)
    for step in range(int(lower), int(upper)):
        block = pages.fetch(step, take)
        for row in range(ROWS):
            for position, place in zip(
                np.asarray(block.position)[row], np.asarray(block.key)[row, 0, :, 0], strict=True
            ):
                assert (row, int(position)) not in found  # no key is met twice
                found[row, int(position)] = int(place)
    return table, found


@SETTINGS
@given(
    lens=lengths,
    left=st.sampled_from([None, 0, 1, 3, SIZE, 100]),
    block_k=st.sampled_from([1, SIZE, 2 * SIZE + 1, 3 * SIZE, 99]),
)
@example(lens=[0, 0, 0], left=None, block_k=SIZE)
@example(lens=[ROOM, 1, 0], left=0, block_k=2 * SIZE + 1)
@example(lens=[SIZE, SIZE + 1, SIZE - 1], left=SIZE, block_k=SIZE)
def test_a_walk_meets_every_key_that_is_seen(lens, left, block_k):
    table, found = walk_all(lens, left, block_k)
    for row, length in enumerate(lens):
        begin = 0 if left is None else max(0, length - 1 - left)
        for position in range(begin, length):
            page, slot = divmod(position, SIZE)
            assert found[row, position] == table[row, page] * SIZE + slot


@SETTINGS
@given(lens=lengths, block_k=st.sampled_from([SIZE, 3 * SIZE]))
@example(lens=[1, ROOM, 1], block_k=SIZE)
def test_a_window_shortens_the_walk(lens, block_k):
    steps = len({p for _, p in walk_all(lens, 2, block_k)[1]})
    # a window of three keys lies on two pages at most; rows start at pages of their own
    count = min(block_k // SIZE, BLOCKS)
    assert steps <= ROWS * -(-2 // count) * count * SIZE


@SETTINGS
@given(queries=counts, lens=lengths, count=st.integers(-1, ROWS + 2), shift=st.integers(0, 2))
@example(queries=[0, 0, 0], lens=[3, 0, 1], count=3, shift=0)
@example(queries=[5, 0, 5], lens=[2, 9, 20], count=3, shift=2)
@example(queries=[1, 4, 2], lens=[20, 4, 0], count=1, shift=1)
def test_tokens_go_to_the_last_positions(queries, lens, count, shift):
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32) + shift
    starts[max(count, 0) + 1 :] = -7  # what does not count may be anything
    owner, position = page_slots.places(
        jnp.asarray(starts), jnp.asarray(lens, jnp.int32), jnp.int32(count), TOKENS
    )
    expected = [(None, -1)] * TOKENS
    for row in range(min(max(count, 0), ROWS)):
        for j in range(queries[row]):
            token, place = starts[row] + j, lens[row] - queries[row] + j
            if token < TOKENS:
                expected[token] = (row, place) if place >= 0 else (None, -1)
    for token, (row, place) in enumerate(expected):
        assert int(position[token]) == place
        assert row is None or int(owner[token]) == row
    assert ((np.asarray(owner) >= 0) & (np.asarray(owner) < ROWS)).all()


@SETTINGS
@given(
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([None, 0.01, 0.5, 3.0]),
    dtype=st.sampled_from(["int8", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"]),
)
@example(seed=0, scale=0.01, dtype="int8")
@example(seed=1, scale=0.001, dtype="float8_e4m3fn")
def test_narrow_is_the_nearest_value_that_fits(seed, scale, dtype):
    new = np.random.default_rng(seed).normal(size=(6, 2, 3)).astype(np.float32)
    scales = None if scale is None else jnp.asarray([scale, 2 * scale], jnp.float32)
    held = page_slots.narrow(jnp.asarray(new), scales, jnp.dtype(dtype))
    assert held.dtype == dtype
    wide = new if scale is None else new / np.asarray(scales)[:, None]
    info = jnp.iinfo(dtype) if dtype == "int8" else jnp.finfo(dtype)

    def rounded(x):
        x = np.clip(x, float(info.min), float(info.max)).astype(np.float32)
        return np.rint(x) if dtype == "int8" else jnp.asarray(x).astype(dtype).astype(jnp.float32)

    # a compiler may multiply by 1 / scale, which is off by a rounding
    ends = np.stack([rounded(wide * (1 - 3e-7)), rounded(wide * (1 + 3e-7))])
    held = np.asarray(held.astype(jnp.float32))
    assert ((ends.min(axis=0) <= held) & (held <= ends.max(axis=0))).all()


@functools.partial(jax.jit, static_argnames="block_k")
def attend(kc, vc, lens, block_k):
    args = type("Options", (), dict.fromkeys(("k_scale", "v_scale", "alibi_slopes"), None))()
    args.logits_soft_cap = args.softmax_aux = None
    args.sliding_window, args.softmax_scale = (None, 0), 0.5
    table = jnp.arange(ROWS * BLOCKS, dtype=jnp.int32).reshape(ROWS, BLOCKS)
    last, first = lens[:, None] - 1, jnp.zeros(ROWS, jnp.int32)
    pages = paging.walk(table, first, last, None, block_k, SIZE)
    query = jax.random.normal(jax.random.key(2), (ROWS, 1, 2, 3))
    return paging.attend(
        args, query, first, last, lambda i: pages.fetch(i, lambda ids: (kc[ids], vc[ids])),
        pages.steps(last), (1, 3),
    )  # fmt: skip


@SETTINGS
@given(lens=lengths, block_k=st.sampled_from([SIZE, 2 * SIZE, ROOM]))
@example(lens=[0, ROOM, SIZE], block_k=SIZE)
def test_steps_and_what_is_hidden_do_not_matter(lens, block_k):
    kc, vc = jax.random.normal(jax.random.key(1), (2, ROWS * BLOCKS, 1, SIZE, 3))
    lens = np.asarray(lens, np.int32)
    out, lse = attend(kc, vc, lens, ROOM)
    hidden = np.arange(ROOM)[None] >= lens[:, None]
    hidden = jnp.asarray(hidden.reshape(ROWS * BLOCKS, 1, SIZE, 1))
    dirty = [jnp.where(hidden, jnp.nan, x) for x in (kc, vc)]
    for actual, expected in zip(attend(*dirty, lens, block_k), (out, lse), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_value_that_is_not_finite_shows_in_its_row():
    kc, vc = jax.random.normal(jax.random.key(1), (2, ROWS * BLOCKS, 1, SIZE, 3))
    lens = np.asarray([ROOM, 3, ROOM], np.int32)
    for bad in (jnp.nan, jnp.inf):
        out, lse = attend(kc, vc.at[BLOCKS, 0, 1, 0].set(bad), lens, SIZE)
        assert np.isnan(out[1]).all()
        assert np.isnan(lse[1]).all()
        assert np.isfinite(out[::2]).all()
