"""Block ranges: what a block of queries may see holds every pair that any of its rows sees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel.kernels._xla._blocks import block_ranges

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)
ROWS, LENGTH = 2, 12  # every array is [2, 12]; blocks divide 12

windows = st.sampled_from(
    [(None, None), (0, 0), (3, None), (None, 0), (2, 5), (None, 4), (5, 0), (2**31 - 1, 2**31 - 1)]
)
sizes = st.sampled_from([(1, 1), (3, 4), (6, 2), (12, 12)])
kinds = st.sampled_from(["arange", "shifted", "random", "constant", "extreme"])
seeds = st.integers(0, 2**16)


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def make_positions(rng, kind):
    if kind == "arange":
        return np.tile(np.arange(LENGTH), (ROWS, 1)).astype(np.int32)
    if kind == "shifted":
        return (np.arange(LENGTH) + rng.integers(-15, 15, (ROWS, 1))).astype(np.int32)
    if kind == "constant":
        return np.full((ROWS, LENGTH), rng.integers(-3, 3), np.int32)
    if kind == "extreme":
        ends = np.asarray([-(2**31), -(2**31) + 1, 0, 2**31 - 2, 2**31 - 1])
        return rng.choice(ends, (ROWS, LENGTH)).astype(np.int32)
    return rng.integers(-8, 20, (ROWS, LENGTH)).astype(np.int32)


def make_ids(rng):
    """Sorted or shuffled ids with padding, or one id for all."""
    ids = rng.integers(-1, 4, (ROWS, LENGTH)).astype(np.int32)
    return [ids, np.sort(ids, axis=1), np.zeros_like(ids), np.full_like(ids, -1)][rng.integers(4)]


def visible_pairs(q_pos, k_pos, q_ids, k_ids, window):
    """[rows, t, s], one pair at a time from the rules, in 64 bits."""
    left, right = window
    distance = k_pos[:, None, :].astype(np.int64) - q_pos[:, :, None]
    seen = (q_ids[:, :, None] == k_ids[:, None, :]) & (q_ids >= 0)[:, :, None]
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def any_in_block(seen, size_q, size_k):
    return seen.reshape(ROWS, LENGTH // size_q, size_q, LENGTH // size_k, size_k).any(axis=(2, 4))


def table(q_pos, k_pos, q_ids, k_ids, window, size):
    """Block pairs as the kernels compute them."""

    def extents(q, k):
        return (
            block_ranges.extent(q, size[0], q_ids >= 0),
            block_ranges.extent(k, size[1], k_ids >= 0),
        )

    return block_ranges.near(*extents(q_pos, k_pos), window) & block_ranges.overlap(
        *extents(q_ids, k_ids)
    )


@SETTINGS
@given(seed=seeds, q_kind=kinds, k_kind=kinds, window=windows, size=sizes)
@example(seed=0, q_kind="arange", k_kind="arange", window=(0, 0), size=(3, 4))
@example(seed=1, q_kind="extreme", k_kind="extreme", window=(2**31 - 1, 2**31 - 1), size=(1, 1))
@example(seed=2, q_kind="extreme", k_kind="random", window=(3, None), size=(6, 2))
@example(seed=3, q_kind="random", k_kind="extreme", window=(None, 4), size=(6, 2))
@example(seed=4, q_kind="shifted", k_kind="arange", window=(None, 0), size=(6, 2))
@example(seed=5, q_kind="random", k_kind="random", window=(2, 5), size=(12, 12))
def test_no_visible_pair_is_outside_the_range(seed, q_kind, k_kind, window, size):
    rng = np.random.default_rng(seed)
    arrays = (
        make_positions(rng, q_kind),
        make_positions(rng, k_kind),
        make_ids(rng),
        make_ids(rng),
    )
    needed = any_in_block(visible_pairs(*arrays, window), *size)
    seen = table(*arrays, window, size)
    assert isinstance(seen, np.ndarray)
    assert not (needed & ~seen).any()

    traced = table(*map(jnp.asarray, arrays), window, size)
    assert isinstance(traced, jax.Array)
    np.testing.assert_array_equal(traced, seen)

    first, last = block_ranges.hull(seen)
    block = np.arange(LENGTH // size[1])
    assert not (needed & ~((first[..., None] <= block) & (block < last[..., None]))).any()


@SETTINGS
@given(shift=st.integers(-14, 14), window=windows, size=sizes)
@example(shift=0, window=(None, 0), size=(3, 4))
@example(shift=0, window=(0, 0), size=(1, 1))
@example(shift=3, window=(2, 5), size=(6, 2))
@example(shift=-5, window=(None, 0), size=(6, 2))
@example(shift=14, window=(5, 0), size=(12, 12))
def test_the_range_of_consecutive_positions_is_exact(shift, window, size):
    """Blocks that a window cannot reach are skipped: work is saved, not only masked."""
    k_pos = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    ids = np.zeros_like(k_pos)
    arrays = (k_pos + np.int32(shift), k_pos, ids, ids)
    needed = any_in_block(visible_pairs(*arrays, window), *size)
    np.testing.assert_array_equal(table(*arrays, window, size), needed)


@SETTINGS
@given(cuts=st.lists(st.integers(0, LENGTH), min_size=3, max_size=3), size=sizes)
@example(cuts=[4, 8, 12], size=(6, 2))
@example(cuts=[0, 0, 6], size=(3, 4))
@example(cuts=[0, 0, 0], size=(12, 12))
def test_the_range_of_sorted_segments_is_exact(cuts, size):
    """Ids in order, then padding: blocks of other segments and of padding are skipped."""
    ids = np.searchsorted(np.sort(cuts), np.arange(LENGTH), side="right").astype(np.int32)
    ids = np.tile(np.where(ids < 3, ids, -1), (ROWS, 1)).astype(np.int32)
    pos = np.zeros_like(ids)
    needed = any_in_block(visible_pairs(pos, pos, ids, ids, (None, None)), *size)
    np.testing.assert_array_equal(table(pos, pos, ids, ids, (None, None), size), needed)


def test_a_block_without_valid_elements_has_an_empty_extent():
    keep = np.asarray([[True, False, False, False]])
    x = np.asarray([[7, 5, 9, 1]], np.int32)
    low, high = block_ranges.extent(x, 2, keep)
    assert (low[0, 0], high[0, 0]) == (7, 7)
    assert low[0, 1] > high[0, 1]
    low, high = block_ranges.extent(x, 2)
    np.testing.assert_array_equal((low, high), ([[5, 1]], [[7, 9]]))


tables = st.lists(st.integers(0, 31), min_size=3, max_size=3)  # three rows of five blocks, as bits


def as_table(rows):
    return (np.asarray(rows)[:, None] >> np.arange(5) & 1).astype(bool)


@SETTINGS
@given(rows=tables)
@example(rows=[0, 0, 0])
@example(rows=[31, 31, 31])
@example(rows=[16, 1, 17])
@example(rows=[0, 4, 10])
def test_hull_is_the_least_interval(rows):
    seen = as_table(rows)
    for form in (seen, jnp.asarray(seen)):
        first, last = block_ranges.hull(form)
        assert first.dtype == last.dtype == np.int32
        for row, (lower, upper) in enumerate(zip(first, last, strict=True)):
            blocks = np.flatnonzero(seen[row])
            expected = (blocks[0], blocks[-1] + 1) if len(blocks) else (0, 0)
            assert (int(lower), int(upper)) == expected


traced_bounds = jax.jit(block_ranges.bounds)


@SETTINGS
@given(rows=tables, index=st.integers(0, 2))
@example(rows=[0, 0, 0], index=1)
@example(rows=[10, 14, 10], index=2)  # different rows of one hull
@example(rows=[6, 6, 6], index=0)
@example(rows=[1, 2, 4], index=1)
@example(rows=[1, 3, 7], index=2)  # one first block, several last ones
def test_bounds_are_the_hull_of_a_row(rows, index):
    seen = as_table(rows)
    first, last = block_ranges.hull(seen)
    expected = (int(first[index]), int(last[index]))
    known = block_ranges.bounds(seen, index)
    assert known == expected
    assert all(type(x) is int for x in known)
    same = len(set(zip(first.tolist(), last.tolist(), strict=True))) == 1
    later = block_ranges.bounds(seen, jnp.int32(index))
    assert all(isinstance(x, int) == same for x in later)
    assert tuple(map(int, later)) == expected
    assert tuple(map(int, traced_bounds(jnp.asarray(seen), index))) == expected


@functools.partial(jax.jit, static_argnums=4)
def _jitted(q_pos, k_pos, q_ids, k_ids, window):
    return table(q_pos, k_pos, q_ids, k_ids, window, (3, 4))


def test_tables_can_be_traced():
    rng = np.random.default_rng(11)
    arrays = [make_positions(rng, "random") for _ in range(2)] + [make_ids(rng) for _ in range(2)]
    np.testing.assert_array_equal(_jitted(*arrays, (2, 1)), table(*arrays, (2, 1), (3, 4)))
