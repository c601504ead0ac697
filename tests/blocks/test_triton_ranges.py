"""Tables of blocks for the Triton kernels against the dense mask, pair by pair."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._triton._blocks import block_ranges, mask, ranges

SETTINGS = settings(max_examples=12, deadline=None, derandomize=True)
SPEC = kernel_registry.spec("flash_attention")
LIMIT = 2**31

windows = st.sampled_from(
    [(None, None), (0, 0), (3, None), (None, 0), (2, 5), (None, 4), (5, 0), (LIMIT - 1, LIMIT - 1)]
)
sizes = st.sampled_from([(1, 1), (4, 2), (2, 4), (4, 4), (16, 16)])
lengths = st.sampled_from([(8, 8), (5, 11), (11, 5), (1, 9), (9, 1), (16, 3)])
# tables of arrays are compiled for each shape: few of them
cuts = st.sampled_from([((5, 11), (2, 4)), ((11, 8), (4, 2))])
seeds = st.integers(0, 2**16)


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def tokens_of(batch, t, s, **options):
    """The canonical form of a call, as the kernels get it."""
    data = {"query": (batch, t, 1, 4), "key": (batch, s, 1, 4), "value": (batch, s, 1, 4)}
    arrays = {name: jnp.zeros(shape) for name, shape in data.items()}
    return ranges.tokens(SPEC.canonicalize(SPEC.complete(arrays | options)))


def dense(q_pos, k_pos, window, ids=()):
    """[b, t, s] from the rules, in 64 bits."""
    left, right = window
    distance = np.asarray(k_pos, np.int64)[:, None, :] - np.asarray(q_pos, np.int64)[:, :, None]
    seen = np.ones(distance.shape, bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    for q, k in ids:
        q, k = np.asarray(q), np.asarray(k)
        seen = seen & (q[:, :, None] == k[:, None, :]) & (q >= 0)[:, :, None]
    return seen


@triton.jit
def rows_kernel(
    schedule, num, num_s, window, out, SIZE: tl.constexpr, SIZE_S: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0)
    first, full, ragged, last = block_ranges.bounds(
        schedule, 0, i, num, num_s, window.offset, window.left, window.right, SIZE, SIZE_S
    )
    tl.store(out + i * 4, first)
    tl.store(out + i * 4 + 1, full)
    tl.store(out + i * 4 + 2, ragged)
    tl.store(out + i * 4 + 3, last)


def computed(num, num_s, offset, window, size, size_s):
    """The rows that kernels compute for themselves, as a table."""
    count = cdiv(num, size)
    # limits as kernels are given them
    limits = (None if x is None else min(x, num + num_s) for x in window)
    return triton_call(
        rows_kernel,
        inputs={
            "schedule": block_ranges.Schedule(None, None, 1),
            "num": num,
            "num_s": num_s,
            "window": mask.Window(*limits, offset),
        },
        outputs={"out": jax.ShapeDtypeStruct((1, count, 4), jnp.int32)},
        grid=(count,),
        SIZE=size,
        SIZE_S=size_s,
    )["out"]


def key_table(of, window, block_q, block_k):
    table = block_ranges.key_table(of, window, block_q, block_k)
    if of.plain:
        assert table is None
        return computed(of.num_q, of.num_k, of.offset, window, block_q, block_k)
    return table


def query_table(of, window, block_q, block_k):
    table = block_ranges.query_table(of, window, block_q, block_k)
    if of.plain:
        assert table is None
        return computed(of.num_k, of.num_q, -of.offset, window[::-1], block_k, block_q)
    return table


def check_tables(of, window, size, seen):
    """Both tables against the dense mask; [b, t, s]."""
    block_q, block_k = size
    check_table(key_table(of, window, block_q, block_k), seen, block_q, block_k)
    turned = seen.transpose(0, 2, 1)
    check_table(query_table(of, window, block_q, block_k), turned, block_k, block_q)


def check_table(table, seen, block_r, block_c):
    """Every visible pair is between first and last, and nothing is hidden from full to ragged."""
    assert table.dtype == np.int32
    batch, rows, columns = seen.shape
    num_r, num_c = -(-rows // block_r), -(-columns // block_c)
    padded = np.zeros((batch, num_r * block_r, num_c * block_c), bool)
    padded[:, :rows, :columns] = seen
    blocks = padded.reshape(batch, num_r, block_r, num_c, block_c)
    some, every = blocks.any(axis=(2, 4)), blocks.all(axis=(2, 4))
    assert table.shape[0] in (1, batch)
    assert table.shape[1:] == (num_r, 4)
    table = np.broadcast_to(np.asarray(table), (batch, num_r, 4))
    first, full, ragged, last = (table[..., i, None] for i in range(4))
    assert (first >= 0).all()
    assert (first <= full).all()
    assert (full <= ragged).all()
    assert (ragged <= last).all()
    assert (last <= num_c).all()
    column = np.arange(num_c)
    assert not (some & ~((first <= column) & (column < last))).any()
    assert not (~every & (full <= column) & (column < ragged)).any()


@SETTINGS
@given(length=lengths, window=windows, size=sizes)
@example(length=(8, 8), window=(None, 0), size=(4, 4))
@example(length=(5, 11), window=(None, 0), size=(2, 4))
@example(length=(11, 5), window=(2, 5), size=(4, 2))
@example(length=(11, 5), window=(3, None), size=(4, 4))
@example(length=(1, 9), window=(5, 0), size=(16, 16))
@example(length=(16, 3), window=(0, 0), size=(1, 1))
def test_plain_calls(length, window, size):
    t, s = length
    of = tokens_of(1, t, s)
    assert of.plain
    q_pos, k_pos = np.arange(t)[None] + s - t, np.arange(s)[None]
    check_tables(of, window, size, dense(q_pos, k_pos, window))


@pytest.mark.parametrize("length", [(64, 64), (32, 64)])
def test_causal_calls_skip_and_unmask_what_they_can(length):
    """Work is saved: on the diagonal one block is masked, and those after it are left out."""
    t, s = length
    table = np.asarray(key_table(tokens_of(1, t, s), (None, 0), 16, 16))[0]
    diagonal = np.arange(t // 16) + (s - t) // 16
    np.testing.assert_array_equal(table[:, 3], diagonal + 1)
    np.testing.assert_array_equal(table[:, 2] - table[:, 1], diagonal)
    assert not table[:, :2].any()


def test_calls_without_a_mask_have_none():
    table = key_table(tokens_of(1, 32, 64), (None, None), 16, 16)[0]
    np.testing.assert_array_equal(table, [[0, 0, 4, 4]] * 2)
    table = key_table(tokens_of(1, 24, 60), (None, None), 16, 16)[0]
    np.testing.assert_array_equal(table, [[0, 0, 3, 4], [0, 0, 0, 4]])


def make_ids(rng, batch, length):
    """Sorted or shuffled ids with padding, or one id for all."""
    ids = rng.integers(-1, 3, (batch, length)).astype(np.int32)
    return [ids, np.sort(ids, axis=1), np.zeros_like(ids), np.full_like(ids, -1)][rng.integers(4)]


@SETTINGS
@given(seed=seeds, cut=cuts, window=windows)
@example(seed=0, cut=((5, 11), (2, 4)), window=(None, 0))
@example(seed=3, cut=((11, 8), (4, 2)), window=(None, None))
def test_segments(seed, cut, window):
    (t, s), size = cut
    rng = np.random.default_rng(seed)
    q_ids, k_ids = make_ids(rng, 2, t), make_ids(rng, 2, s)
    of = tokens_of(2, t, s, q_segment_ids=q_ids, kv_segment_ids=k_ids)
    q_pos, k_pos = np.tile(np.arange(t) + s - t, (2, 1)), np.tile(np.arange(s), (2, 1))
    check_tables(of, window, size, dense(q_pos, k_pos, window, [(q_ids, k_ids)]))


def test_long_segments_have_blocks_without_a_mask():
    ids = np.repeat(np.arange(2, dtype=np.int32), 32)[None]
    of = tokens_of(1, 64, 64, q_segment_ids=ids, kv_segment_ids=ids)
    table = np.asarray(block_ranges.key_table(of, (None, None), 16, 16))[0]
    np.testing.assert_array_equal(table, [[0, 0, 2, 2]] * 2 + [[2, 2, 4, 4]] * 2)


@SETTINGS
@given(seed=seeds, cut=cuts, window=windows, ids=st.booleans())
@example(seed=1, cut=((5, 11), (2, 4)), window=(None, 0), ids=False)
@example(seed=2, cut=((5, 11), (2, 4)), window=(2, 5), ids=True)
def test_packed_sequences(seed, cut, window, ids):
    """One row that holds several sequences, and perhaps ids besides."""
    (t, s), size = cut
    rng = np.random.default_rng(seed)
    cum_q, cum_k = (
        np.concatenate([[0], np.sort(rng.integers(0, n + 1, 3))]).astype(np.int32) for n in (t, s)
    )
    options = {"cum_seqlens_q": cum_q, "cum_seqlens_k": cum_k}
    more = []
    if ids:
        more = [(make_ids(rng, 1, t), make_ids(rng, 1, s))]
        options |= {"q_segment_ids": more[0][0], "kv_segment_ids": more[0][1]}
    seen = np.zeros((1, t, s), bool)
    for i in range(3):
        (q_start, q_stop), (k_start, k_stop) = cum_q[i : i + 2], cum_k[i : i + 2]
        count_q, count_k = q_stop - q_start, k_stop - k_start
        q_pos = np.arange(count_q)[None] + count_k - count_q
        inside = dense(q_pos, np.arange(count_k)[None], window)
        seen[:, q_start:q_stop, k_start:k_stop] = inside
    seen &= dense(np.zeros((1, t)), np.zeros((1, s)), (None, None), more)
    check_tables(tokens_of(1, t, s, **options), window, size, seen)


@SETTINGS
@given(seed=seeds, cut=cuts, window=windows)
@example(seed=1, cut=((5, 11), (2, 4)), window=(None, 0))
@example(seed=2, cut=((11, 8), (4, 2)), window=(2, 5))
def test_padded_rows(seed, cut, window):
    """Rows of different lengths, each aligned at its own end."""
    (t, s), size = cut
    rng = np.random.default_rng(seed)
    len_q, len_k = rng.integers(0, t + 1, 2), rng.integers(0, s + 1, 2)
    cum_q, cum_k = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (len_q, len_k))
    of = tokens_of(2, t, s, cum_seqlens_q=cum_q, cum_seqlens_k=cum_k)
    q_pos = np.arange(t)[None] + (len_k - len_q)[:, None]
    seen = dense(q_pos, np.tile(np.arange(s), (2, 1)), window)
    seen &= (np.arange(t)[None] < len_q[:, None])[:, :, None]
    seen &= (np.arange(s)[None] < len_k[:, None])[:, None, :]
    check_tables(of, window, size, seen)


def make_positions(rng, kind, batch, length):
    if kind == "shifted":
        return (np.arange(length) + rng.integers(-9, 9, (batch, 1))).astype(np.int32)
    if kind == "extreme":
        ends = np.asarray([1 - 2**29, 2 - 2**29, 0, 2**29 - 2, 2**29 - 1])
        return rng.choice(ends, (batch, length)).astype(np.int32)
    return rng.integers(-8, 20, (batch, length)).astype(np.int32)


kinds = st.sampled_from(["shifted", "random", "extreme"])


@SETTINGS
@given(seed=seeds, cut=cuts, window=windows, kind=kinds, rows=st.integers(1, 2))
@example(seed=1, cut=((5, 11), (2, 4)), window=(2, 5), kind="extreme", rows=1)
@example(seed=2, cut=((5, 11), (2, 4)), window=(LIMIT - 1, LIMIT - 1), kind="extreme", rows=2)
@example(seed=3, cut=((11, 8), (4, 2)), window=(None, 0), kind="shifted", rows=2)
def test_given_positions(seed, cut, window, kind, rows):
    (t, s), size = cut
    rng = np.random.default_rng(seed)
    q_pos, k_pos = make_positions(rng, kind, rows, t), make_positions(rng, kind, rows, s)
    of = tokens_of(2, t, s, q_positions=q_pos, kv_positions=k_pos)
    seen = np.broadcast_to(dense(q_pos, k_pos, window), (2, t, s))
    check_tables(of, window, size, seen)


def test_positions_of_one_side_leave_the_other_as_it_was():
    q_pos = np.asarray([[9, 3, 3, 0]], np.int32)
    of = tokens_of(1, 4, 6, q_positions=q_pos)
    check_tables(of, (None, 0), (2, 2), dense(q_pos, np.arange(6)[None], (None, 0)))
    k_pos = np.asarray([[9, 3, 3, 0]], np.int32)
    of = tokens_of(1, 6, 4, kv_positions=k_pos)
    check_tables(of, (2, 0), (2, 2), dense(np.arange(6)[None] - 2, k_pos, (2, 0)))


def test_tables_can_be_traced():
    ids = np.asarray([[0, 0, 0, 0, 1, 1, -1, -1]], np.int32)

    def table(ids):
        of = tokens_of(1, 8, 8, q_segment_ids=ids, kv_segment_ids=ids)
        return block_ranges.key_table(of, (None, 0), 2, 2)

    np.testing.assert_array_equal(jax.jit(table)(ids), table(ids))


@triton.jit
def order_kernel(num_blocks, interleaved, out):
    i_p = tl.program_id(0)
    block, batch_head = block_ranges.order(i_p, num_blocks, interleaved)
    tl.store(out + 2 * i_p, batch_head)
    tl.store(out + 2 * i_p + 1, block)


@pytest.mark.parametrize("interleaved", [1, 2, 6])
def test_batch_head_pairs_take_turns(interleaved):
    num_blocks, pairs = 5, 6
    programs = num_blocks * pairs
    made = triton_call(
        order_kernel,
        inputs={"num_blocks": num_blocks, "interleaved": interleaved},
        outputs={"out": jax.ShapeDtypeStruct((programs, 2), jnp.int32)},
        grid=(programs,),
    )["out"]
    expected = [
        (first + pair, block)
        for first in range(0, pairs, interleaved)
        for block in range(num_blocks)
        for pair in range(interleaved)
    ]
    np.testing.assert_array_equal(made, expected)
