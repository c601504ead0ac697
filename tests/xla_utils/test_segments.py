"""The conversions against token-by-token Python, and against each other."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel import xla_utils

LENGTH = 9
SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def owners(cu, length):
    """(sequence, index inside it) of each token, by the definition; None outside."""
    found = [None] * length
    for n, (start, end) in enumerate(itertools.pairwise(cu)):
        for token in range(start, min(end, length)):
            found[token] = (n, token - start)
    return found


# one shape, so that one compilation serves every example
_OFFSETS = st.lists(st.integers(0, LENGTH + 2), min_size=5, max_size=5).map(sorted)


@SETTINGS
@example([0, 0, 3, 3, 9])
@example([2, 5, 5, 5, 5])
@example([4, 4, 4, 4, 4])
@example([0, 2, 4, 10, 11])
@given(_OFFSETS)
def test_cu_seqlens_to_ids_and_positions(cu):
    expected = owners(cu, LENGTH)
    array = jnp.asarray(cu, jnp.int32)
    ids = jax.jit(xla_utils.cu_seqlens_to_segment_ids, static_argnums=1)(array, LENGTH)
    positions = jax.jit(xla_utils.cu_seqlens_to_positions, static_argnums=1)(array, LENGTH)
    assert ids.dtype == positions.dtype == jnp.int32
    assert ids.tolist() == [-1 if e is None else e[0] for e in expected]
    assert positions.tolist() == [0 if e is None else e[1] for e in expected]


@SETTINGS
@example([0, 0, 3, 3, 9], [1, 2, 2, 2, 8])
@given(_OFFSETS, _OFFSETS)
def test_query_positions_are_bottom_right(cu_q, cu_k):
    function = jax.jit(xla_utils.cu_seqlens_to_query_positions, static_argnums=2)
    got = function(jnp.asarray(cu_q, jnp.int32), jnp.asarray(cu_k, jnp.int32), LENGTH)
    lengths_q, lengths_k = np.diff(cu_q), np.diff(cu_k)
    expected = [
        0 if e is None else lengths_k[e[0]] - lengths_q[e[0]] + e[1] for e in owners(cu_q, LENGTH)
    ]
    assert got.tolist() == expected


@SETTINGS
@example([0, 3, 3, 5, 9])
@example([2, 2, 5, 5, 7])
@given(_OFFSETS.filter(lambda cu: cu[0] < cu[-1] <= LENGTH))
def test_cu_seqlens_round_trips_through_ids(cu):
    ids = xla_utils.cu_seqlens_to_segment_ids(jnp.asarray(cu, jnp.int32), LENGTH)
    back = jax.jit(xla_utils.segment_ids_to_cu_seqlens, static_argnums=1)(ids, 4)
    # empty sequences before the first token stand where it stands
    first = next(start for start, end in itertools.pairwise(cu) if end > start)
    assert back.tolist() == [max(bound, first) for bound in cu]


@SETTINGS
@example([0, 0, 0])
@given(st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_lengths_round_trip(lengths):
    cu = xla_utils.lengths_to_cu_seqlens(jnp.asarray(lengths, jnp.int32))
    assert cu.dtype == jnp.int32
    assert cu.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert xla_utils.cu_seqlens_to_lengths(cu).tolist() == lengths


def test_no_sequences_and_no_tokens():
    one = np.array([1])
    assert xla_utils.cu_seqlens_to_segment_ids(one, 2).tolist() == [-1, -1]
    assert xla_utils.cu_seqlens_to_positions(one, 2).tolist() == [0, 0]
    assert xla_utils.cu_seqlens_to_query_positions(one, one, 2).tolist() == [0, 0]
    assert xla_utils.cu_seqlens_to_segment_ids(one, 0).shape == (0,)
    assert xla_utils.lengths_to_cu_seqlens(np.zeros(0, np.int32)).tolist() == [0]


@pytest.mark.parametrize(
    ("ids", "num_segments", "expected"),
    [
        ([0, 0, 1, 1, 1, 2], 3, [0, 2, 5, 6]),
        ([-1, -1, 0, 2, 2, -1], 3, [2, 3, 3, 5]),
        ([1, 1, 2, 2, 2, 2], 3, [0, 0, 2, 6]),
        ([0, 1, 1, 5, 6, 6], 3, [0, 1, 3, 3]),
        ([-1] * 6, 3, [6, 6, 6, 6]),
        ([], 2, [0, 0, 0]),
    ],
)
def test_segment_ids_to_cu_seqlens(ids, num_segments, expected):
    function = jax.jit(xla_utils.segment_ids_to_cu_seqlens, static_argnums=1)
    got = function(np.array(ids, np.int32), num_segments)
    assert got.dtype == jnp.int32
    assert got.tolist() == expected


def test_lengths_to_segment_ids():
    got = xla_utils.lengths_to_segment_ids(np.array([0, 2, 5]), 3)
    assert got.dtype == jnp.int32
    assert got.tolist() == [[-1, -1, -1], [0, 0, -1], [0, 0, 0]]


def test_segment_ids_to_mask():
    q_ids = np.array([[0, 1, -1], [2, -1, 2]], np.int32)
    kv_ids = np.array([[1, -1], [2, 0]], np.int8)
    mask = xla_utils.segment_ids_to_mask(q_ids, kv_ids)
    assert mask.dtype == jnp.bool_
    assert mask.astype(int).tolist() == [[[[0, 0], [1, 0], [0, 0]]], [[[1, 0], [0, 0], [1, 0]]]]
    own = xla_utils.segment_ids_to_mask(q_ids)
    assert own[1, 0].tolist() == [[True, False, True], [False, False, False], [True, False, True]]


def test_wide_ids_are_not_truncated():
    with jax.enable_x64(True):
        q_ids, narrow = np.array([[2**32 + 1, 1]]), np.array([[1, 2]], np.int32)
        mask = jax.jit(xla_utils.segment_ids_to_mask)(q_ids, narrow)
        assert mask.tolist() == [[[[False, False], [True, False]]]]


def random_ids(seed):
    """Interleaved blocks, with padding on both sides and ids that only one side has."""
    rng = np.random.default_rng(seed)
    return rng.integers(-1, 4, (2, 6)), rng.integers(-1, 4, (2, 7))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rank", [3, 4])
def test_mask_to_segment_ids_reproduces_the_mask(seed, rank):
    mask = xla_utils.segment_ids_to_mask(*random_ids(seed))
    given_mask = mask[:, 0] if rank == 3 else jnp.broadcast_to(mask, (2, 3, 6, 7))
    q_ids, kv_ids = xla_utils.mask_to_segment_ids(given_mask)
    assert q_ids.shape == (2, 6)
    assert kv_ids.shape == (2, 7)
    assert q_ids.dtype == kv_ids.dtype == jnp.int32
    np.testing.assert_array_equal(xla_utils.segment_ids_to_mask(q_ids, kv_ids), mask)
    for row, q_row, kv_row in zip(mask[:, 0], q_ids, kv_ids, strict=True):
        blocks = len({tuple(r) for r in np.asarray(row).tolist() if any(r)})
        assert set(q_row.tolist()) - {-1} == set(kv_row.tolist()) - {-1} == set(range(blocks))
    traced = jax.jit(xla_utils.mask_to_segment_ids)(given_mask)
    np.testing.assert_array_equal(traced[0], q_ids)
    np.testing.assert_array_equal(traced[1], kv_ids)


def test_mask_to_segment_ids_values():
    q_ids, kv_ids = xla_utils.mask_to_segment_ids(np.array([[0, 0, 3], [0, 0, 0], [1, 0, 0]]))
    assert q_ids.tolist() == [[1, -1, 0]]
    assert kv_ids.tolist() == [[0, -1, 1]]
    empty_q, empty_kv = xla_utils.mask_to_segment_ids(np.zeros((2, 1, 3, 0), bool))
    assert empty_q.tolist() == [[-1] * 3] * 2
    assert empty_kv.shape == (2, 0)


def test_a_constant_mask_is_checked_inside_jit():
    good, bad = np.eye(3, dtype=bool), np.tril(np.ones((3, 3), bool))
    assert jax.jit(lambda: xla_utils.mask_to_segment_ids(good)[0])().tolist() == [[0, 1, 2]]
    with pytest.raises(ValueError, match="block-diagonal"):
        jax.jit(lambda: xla_utils.mask_to_segment_ids(bad)[0])()


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (np.tril(np.ones((3, 3), bool)), r"batch=0, head=0, query=0, key=1 breaks"),
        (np.array([[1, 1, 0], [0, 1, 1], [0, 0, 0]]), "block-diagonal"),
        (np.stack([np.eye(3), np.ones((3, 3))])[None] > 0, "head=1"),
        (np.stack([np.eye(3), np.tri(3)]) > 0, "batch=1"),
        (np.ones(3, bool), r"got \(3,\)"),
    ],
)
def test_mask_to_segment_ids_refuses(mask, match):
    with pytest.raises(ValueError, match=match):
        xla_utils.mask_to_segment_ids(mask)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"`cu_seqlens_to_segment_ids`: `cu_seqlens` .* \(1, 2\)"):
        xla_utils.cu_seqlens_to_segment_ids(np.array([[0, 2]]), 2)
    with pytest.raises(ValueError, match="got none"):
        xla_utils.cu_seqlens_to_lengths(np.zeros(0, np.int32))
    with pytest.raises(TypeError, match="`lengths` must hold integers; got float32"):
        xla_utils.lengths_to_cu_seqlens(np.ones(2, np.float32))
    with pytest.raises(ValueError, match=r"same sequences; got \(2,\) and \(3,\)"):
        xla_utils.cu_seqlens_to_query_positions(np.array([0, 1]), np.array([0, 1, 2]), 2)
