"""What attention kernels share: their arguments, the queries of a program, scores of a tile."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import (
    addresses,
    block_lists,
    block_ranges,
    logits,
    philox,
)
from ejkernel.kernels._triton._blocks import mask as masks


class Attention(NamedTuple):
    """The call: lengths, heads, layouts of arrays, masks and scores."""

    num_q: Any
    num_k: Any
    HEADS: tl.constexpr  # of queries
    KEY_HEADS: tl.constexpr
    GROUP: tl.constexpr  # query heads to a key head
    query_rows: Any  # `parts.Rows` of query and dq
    key_rows: Any  # of key and dk
    value_rows: Any  # of value and dv
    out_rows: Any  # of out and dout
    PRECISION: tl.constexpr  # of products
    queries: Any  # `mask.Tokens`
    keys: Any
    mask: Any  # `mask.Mask`
    scores: Any  # `logits.Scores`
    dropout: Any  # `philox.Dropout`, or None
    drop_offset: Any  # uint32 [2], or None: batch and head of the first tile in the user's call


# Ints that the code does not depend on: a call and its reduced twin share one compiled kernel.
# Lengths are not among them: a multiple of 16 makes loads of row vectors wide.
UNSPECIALISED = ("attention.mask.window", "schedule.interleaved")


class QueryBlock(NamedTuple):
    """The block of queries that a program holds; vectors are [BQ]."""

    index: Any
    row: Any  # of its first query
    at: Any  # `addresses.Place`
    query_row: Any  # the first row of its batch and head in [b, t, h]
    key_row: Any  # the first row of its batch and key head in [b, s, g]
    o_q: Any
    q_pos: Any
    ids: Any
    more_ids: Any
    slope: Any
    drop_batch: Any  # indices for dropout
    drop_head: Any


@triton.jit
def query_block(i_p, attention, schedule, BQ: tl.constexpr, REVERSED: tl.constexpr):
    """The queries of program `i_p`. REVERSED: the last ones start first, which see most keys."""
    num_blocks = tl.cdiv(attention.num_q, BQ)
    i_q, batch_head = block_ranges.order(i_p, num_blocks, schedule.interleaved)
    if REVERSED:
        i_q = num_blocks - 1 - i_q
    i_h = batch_head % attention.HEADS
    i_b = batch_head // attention.HEADS
    at = addresses.Place(i_b.to(tl.int64), i_h.to(tl.int64))
    row = i_q * BQ
    tokens = attention.queries
    q_pos = masks.load_positions(
        tokens, at.batch, row, attention.num_q, attention.mask.window.offset, BQ
    )
    ids = masks.load_ids(tokens.ids, tokens.ids_step, at.batch, row, attention.num_q, BQ)
    more_ids = masks.load_ids(
        tokens.more_ids, tokens.more_ids_step, at.batch, row, attention.num_q, BQ
    )
    drop_batch, drop_head = philox.indices(attention.drop_offset, i_b, i_h)
    return QueryBlock(
        i_q,
        row,
        at,
        at.batch * attention.num_q * attention.HEADS + at.head,
        at.batch * attention.num_k * attention.KEY_HEADS + i_h // attention.GROUP,
        row + tl.arange(0, BQ),
        q_pos,
        ids,
        more_ids,
        load_slope(attention.scores.slopes, i_h),
        drop_batch,
        drop_head,
    )


@triton.jit
def load_slope(slopes, i_h):
    if slopes is not None:
        return tl.load(slopes + i_h).to(tl.float32)
    else:
        return tl.full([], 0.0, tl.float32)


@triton.jit
def key_bounds(block, attention, schedule, BQ: tl.constexpr, BK: tl.constexpr):
    """[first, full, ragged, last] of the blocks of keys that a block of queries visits."""
    if schedule.lists is not None:
        row = block_lists.row_of(schedule.lists, block.at, block.index, BQ)
        return block_lists.bounds(schedule.lists, row, BK)
    else:
        window = attention.mask.window
        return block_ranges.bounds(
            schedule, block.at.batch, block.index, attention.num_q, attention.num_k, window.offset,
            window.left, window.right, BQ, BK,
        )  # fmt: skip


@triton.jit
def scores(dots, j, masked, block, attention, BK: tl.constexpr):
    """Scores of a block of queries and block j of the keys, [BQ, BK]; -inf for hidden pairs.

    The second result is what they are after the cap and before bias and slopes.
    """
    row = j * BK
    o_k = row + tl.arange(0, BK)
    k_pos = masks.load_positions(attention.keys, block.at.batch, row, attention.num_k, 0, BK)
    tile = masks.Tile(block.o_q[:, None], o_k[None, :], block.q_pos[:, None], k_pos[None, :])
    x, capped = logits.logits(
        dots, tile, block.at, block.slope, attention.scores, attention.num_q, attention.num_k
    )
    x = masks.hide(
        x, float("-inf"), masked, tile, block.at, row, block.ids, block.more_ids, attention.keys,
        attention.num_k, attention.mask, attention.num_q, attention.num_k, BK,
    )  # fmt: skip
    return x, capped
