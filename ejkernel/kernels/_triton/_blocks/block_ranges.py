"""Which blocks of the other side a block of tokens has to visit, and which of them need no mask.

They are [first, full, ragged, last]: blocks from `first` to `last` may hold visible pairs, and in
those from `full` to `ragged` every pair is visible. Where positions follow from the index, kernels
compute these numbers. Where ids or given positions decide, a kernel makes a table of them: each of
its programs compares one block with all blocks of the other side, by the ends of ids and positions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import cdiv, next_power_of_2, triton_call
from ejkernel.kernels._triton._blocks import mask

_LOW = tl.constexpr(-(2**31))
_HIGH = tl.constexpr(2**31 - 1)
_AT_ONCE = 2048  # tokens


class Schedule(NamedTuple):
    """The order of programs, and the table of what they visit."""

    table: Any  # [b or 1, blocks, 4], or None
    table_step: Any  # of a batch
    interleaved: Any  # how many (batch, head) pairs take turns; divides their number
    lists: Any = None  # `block_lists.Lists` in place of ranges, or None


class Bounds(NamedTuple):
    """Steps from `first` to `last`, of which those from `full` to `ragged` need no mask.

    A step is a block, or an entry of a list.
    """

    first: Any
    full: Any
    ragged: Any
    last: Any
    lists: Any  # `block_lists.Lists`, or None
    listed: Any  # the first entry of this list


@triton.jit
def order(i_p, num_blocks, interleaved):
    """Block and (batch, head) pair of a program."""
    i_s = i_p // interleaved
    return i_s % num_blocks, i_s // num_blocks * interleaved + i_p % interleaved


@triton.jit
def bounds(
    schedule, i_b, i, num, num_s, offset, before, after, SIZE: tl.constexpr, SIZE_S: tl.constexpr,
):  # fmt: skip
    """[first, full, ragged, last] of block i: from a table or, where there is none, computed.

    Lengths and limits of a window, added up, have to fit into 32 bits.
    """
    if schedule.table is None:
        low = i * SIZE
        whole = low + SIZE <= num
        high = tl.minimum(low + SIZE, num) - 1 + offset
        low += offset
        count = (num_s + SIZE_S - 1) // SIZE_S
        first = low * 0
        full = first
        last = first + count
        ragged = first + num_s // SIZE_S
        # quotients are rounded towards zero: what is negative is cut off before
        if before is not None:
            first = tl.minimum(tl.maximum(low - before, 0) // SIZE_S, count)
            full = tl.minimum((tl.maximum(high - before, 0) + SIZE_S - 1) // SIZE_S, count)
        if after is not None:
            last = tl.minimum((tl.maximum(high + after + 1, 0) + SIZE_S - 1) // SIZE_S, count)
            ragged = tl.minimum(tl.maximum(low + after + 1, 0) // SIZE_S, ragged)
        last = tl.maximum(first, last)
        some = whole & (full < ragged)
        full = tl.where(some, tl.minimum(tl.maximum(full, first), last), first)
        ragged = tl.where(some, tl.minimum(tl.maximum(ragged, full), last), full)
        return first, full, ragged, last
    else:
        table = schedule.table + i_b * schedule.table_step + i * 4
        return tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)


class Side(NamedTuple):
    """The tokens of one side, cut into blocks of SIZE."""

    tokens: Any  # `mask.Tokens`
    count: Any
    offset: Any  # position of the first token, where positions follow from the index
    SIZE: tl.constexpr


@triton.jit
def _between(x, valid):
    """Least and greatest of each row, over what is valid."""
    return tl.min(tl.where(valid, x, _HIGH), 1), tl.max(tl.where(valid, x, _LOW), 1)


@triton.jit
def _extents(side, i_b, first_block, ROWS: tl.constexpr):
    """Of ROWS blocks: whether all their tokens are valid, and the ends of ids and positions."""
    tokens = side.tokens
    o = (first_block + tl.arange(0, ROWS))[:, None] * side.SIZE + tl.arange(0, side.SIZE)[None, :]
    inside = o < side.count
    valid = inside
    b_i = o
    b_more = o
    if tokens.ids is not None:
        b_i = tl.load(tokens.ids + i_b * tokens.ids_step + o, mask=inside, other=-1)
        valid &= b_i >= 0
    if tokens.more_ids is not None:
        b_more = tl.load(tokens.more_ids + i_b * tokens.more_ids_step + o, mask=inside, other=-1)
        valid &= b_more >= 0
    b_p = o + side.offset
    if tokens.positions is not None:
        b_p = tl.load(tokens.positions + i_b * tokens.positions_step + o, mask=inside, other=0)
    whole = tl.min(valid.to(tl.int32), 1) > 0
    low, high = _between(b_i, valid)
    low_more, high_more = _between(b_more, valid)
    p_low, p_high = _between(b_p, valid)
    return whole, low, high, low_more, high_more, p_low, p_high


@triton.jit(do_not_specialize=("held.offset", "streamed.offset", "window"))
def block_table_kernel(held, streamed, window, out, ROWS: tl.constexpr):
    num_blocks = tl.cdiv(held.count, held.SIZE)
    num_streamed = tl.cdiv(streamed.count, streamed.SIZE)
    i_b = (tl.program_id(0) // num_blocks).to(tl.int64)
    h_whole, h_low, h_high, h_low_more, h_high_more, h_first, h_last = _extents(
        held, i_b, tl.program_id(0) % num_blocks, 1
    )
    first, last, count = num_streamed, num_streamed * 0, num_streamed * 0
    start, stop = first, last
    for c in range(0, num_streamed, ROWS):
        whole, low, high, low_more, high_more, p_first, p_last = _extents(streamed, i_b, c, ROWS)
        j = c + tl.arange(0, ROWS)
        seen = j < num_streamed
        full = seen & whole & h_whole
        if held.tokens.ids is not None:
            seen &= (h_low <= high) & (low <= h_high)
            full &= (h_low == h_high) & (low == high) & (h_low == low)
        if held.tokens.more_ids is not None:
            seen &= (h_low_more <= high_more) & (low_more <= h_high_more)
            full &= (h_low_more == h_high_more) & (low_more == high_more) & (h_low_more == low_more)
        if window.left is not None:
            seen &= p_last >= h_first - window.left
            full &= p_first >= h_last - window.left
        if window.right is not None:
            seen &= p_first <= h_last + window.right
            full &= p_last <= h_first + window.right
        full &= seen
        first = tl.minimum(first, tl.min(tl.where(seen, j, num_streamed), 0))
        last = tl.maximum(last, tl.max(tl.where(seen, j + 1, 0), 0))
        start = tl.minimum(start, tl.min(tl.where(full, j, num_streamed), 0))
        stop = tl.maximum(stop, tl.max(tl.where(full, j + 1, 0), 0))
        count += tl.sum(full.to(tl.int32), 0)
    first = tl.minimum(first, last)
    # blocks without a mask form one run, or all of them take the mask
    run = (stop > start) & (count == stop - start)
    start = tl.where(run, start, first)
    stop = tl.where(run, stop, first)
    out += tl.program_id(0) * 4
    tl.store(out, first)
    tl.store(out + 1, start)
    tl.store(out + 2, stop)
    tl.store(out + 3, last)


def key_table(of: Any, window: Any, block_q: int, block_k: int) -> jax.Array | None:
    """For each block of queries, its blocks of keys; [b or 1, blocks, 4] int32."""
    return None if of.plain else _block_table(of, window, (block_q, block_k), slice(None))


def query_table(of: Any, window: Any, block_q: int, block_k: int) -> jax.Array | None:
    """For each block of keys, its blocks of queries; [b or 1, blocks, 4] int32."""
    turned = slice(None, None, -1)  # seen from the keys, the window is mirrored
    return None if of.plain else _block_table(of, window[turned], (block_q, block_k), turned)


def token_bundle(of: Any, side: int, positions: bool = True) -> mask.Tokens:
    """Ids and positions of the queries (side 0) or keys (side 1) of `ranges.Tokens`."""
    arrays = [pair[side] for pair in of.ids]
    arrays = [*arrays, *[None] * (2 - len(arrays))]
    arrays.append((of.q_positions, of.k_positions)[side] if positions else None)
    members = []
    for x in arrays:
        step = None if x is None else 0 if x.shape[0] == 1 else x.shape[1]
        members += [None if x is None else x.astype(jnp.int32), step]
    return mask.Tokens(*members)


def _block_table(of: Any, window: Any, sizes: tuple[int, int], order: slice) -> jax.Array:
    """The table of one side's blocks; `order` puts that side first."""
    sides = [
        Side(token_bundle(of, 0), of.num_q, of.offset, sizes[0]),
        Side(token_bundle(of, 1), of.num_k, 0, sizes[1]),
    ]
    held, streamed = sides[order]
    lead = max(x.shape[0] for side in sides for x in side.tokens[::2] if x is not None)
    blocks = cdiv(held.count, held.SIZE)
    rows = next_power_of_2(cdiv(streamed.count, streamed.SIZE))
    return triton_call(
        block_table_kernel,
        inputs={"held": held, "streamed": streamed, "window": mask.window(window, None)},
        outputs={"out": jax.ShapeDtypeStruct((lead, blocks, 4), jnp.int32)},
        grid=(lead * blocks,),
        num_warps=4,
        num_stages=1,
        ROWS=min(max(_AT_ONCE // streamed.SIZE, 1), rows),
    )["out"]
