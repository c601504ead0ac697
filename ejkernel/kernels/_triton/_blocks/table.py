"""Which blocks a block of tokens has to visit.

Where positions follow from the index, kernels compute it themselves. Where ids or given positions
decide, a table is made on the device: a program makes one row of it, holds a block and looks at all
blocks of the other side, by the least and the greatest of their ids and positions.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import cdiv, next_power_of_2, triton_call

_LOW = tl.constexpr(-(2**31))
_HIGH = tl.constexpr(2**31 - 1)
_AT_ONCE = 2048  # tokens


@triton.jit
def order(i_p, num_blocks, span):
    """Block and line of a program. `span` lines, a divisor of their number, take turns."""
    i_s = i_p // span
    return i_s % num_blocks, i_s // num_blocks * span + i_p % span


@triton.jit
def row(
    table, i, num, num_s, offset, before, after, SIZE: tl.constexpr, SIZE_S: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """[first, full, ragged, last] of block i: from a table or, where there is none, computed.

    Lengths and limits of a window, added up, have to fit into 32 bits.
    """
    if table is None:
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
        if BEFORE:
            first = tl.minimum(tl.maximum(low - before, 0) // SIZE_S, count)
            full = tl.minimum((tl.maximum(high - before, 0) + SIZE_S - 1) // SIZE_S, count)
        if AFTER:
            last = tl.minimum((tl.maximum(high + after + 1, 0) + SIZE_S - 1) // SIZE_S, count)
            ragged = tl.minimum(tl.maximum(low + after + 1, 0) // SIZE_S, ragged)
        last = tl.maximum(first, last)
        some = whole & (full < ragged)
        full = tl.where(some, tl.minimum(tl.maximum(full, first), last), first)
        ragged = tl.where(some, tl.minimum(tl.maximum(ragged, full), last), full)
        return first, full, ragged, last
    else:
        table += i * 4
        return tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)


@triton.jit
def _between(x, valid):
    """Least and greatest of each row, over what is valid."""
    return tl.min(tl.where(valid, x, _HIGH), 1), tl.max(tl.where(valid, x, _LOW), 1)


@triton.jit
def _extents(
    ids, ids_2, positions, start, num, offset,
    ROWS: tl.constexpr, SIZE: tl.constexpr, IDS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Of ROWS blocks: whether all their tokens are valid, and the ends of ids and positions."""
    o = start + tl.arange(0, ROWS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = o < num
    valid = inside
    b_i = o
    b_i_2 = o
    if IDS >= 1:
        b_i = tl.load(ids + o, mask=inside, other=-1)
        valid &= b_i >= 0
    if IDS >= 2:
        b_i_2 = tl.load(ids_2 + o, mask=inside, other=-1)
        valid &= b_i_2 >= 0
    b_p = o + offset
    if POSITIONS:
        b_p = tl.load(positions + o, mask=inside, other=0)
    whole = tl.min(valid.to(tl.int32), 1) > 0
    low, high = _between(b_i, valid)
    low_2, high_2 = _between(b_i_2, valid)
    p_low, p_high = _between(b_p, valid)
    return whole, low, high, low_2, high_2, p_low, p_high


@triton.jit(do_not_specialize=("offset", "offset_s", "before", "after"))
def block_table_kernel(
    ids, ids_2, positions, ids_s, ids_s_2, positions_s,
    num, num_s, offset, offset_s, before, after,
    step_i, step_i_2, step_p, step_i_s, step_i_s_2, step_p_s,
    out,
    SIZE: tl.constexpr, SIZE_S: tl.constexpr, ROWS: tl.constexpr, IDS: tl.constexpr,
    POSITIONS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(num, SIZE)
    num_blocks_s = tl.cdiv(num_s, SIZE_S)
    i_b = tl.program_id(0) // num_blocks
    wide_b = i_b.to(tl.int64)
    i = tl.program_id(0) % num_blocks
    if IDS >= 1:
        ids += wide_b * step_i
        ids_s += wide_b * step_i_s
    if IDS >= 2:
        ids_2 += wide_b * step_i_2
        ids_s_2 += wide_b * step_i_s_2
    if POSITIONS:
        positions += wide_b * step_p
        positions_s += wide_b * step_p_s
    h_whole, h_low, h_high, h_low_2, h_high_2, h_first, h_last = _extents(
        ids, ids_2, positions, i * SIZE, num, offset, 1, SIZE, IDS, POSITIONS
    )
    first, last, count = num_blocks_s, num_blocks_s * 0, num_blocks_s * 0
    start, stop = first, last
    for c in range(0, num_blocks_s, ROWS):
        whole, low, high, low_2, high_2, p_first, p_last = _extents(
            ids_s, ids_s_2, positions_s, c * SIZE_S, num_s, offset_s, ROWS, SIZE_S, IDS, POSITIONS
        )
        j = c + tl.arange(0, ROWS)
        seen = j < num_blocks_s
        full = seen & whole & h_whole
        if IDS >= 1:
            seen &= (h_low <= high) & (low <= h_high)
            full &= (h_low == h_high) & (low == high) & (h_low == low)
        if IDS >= 2:
            seen &= (h_low_2 <= high_2) & (low_2 <= h_high_2)
            full &= (h_low_2 == h_high_2) & (low_2 == high_2) & (h_low_2 == low_2)
        # limits are added on the side where they cannot leave 32 bits
        if BEFORE:
            seen &= p_last >= tl.maximum(h_first, _LOW + before) - before
            full &= p_first >= tl.maximum(h_last, _LOW + before) - before
        if AFTER:
            seen &= p_first <= tl.minimum(h_last, _HIGH - after) + after
            full &= p_last <= tl.minimum(h_first, _HIGH - after) + after
        full &= seen
        first = tl.minimum(first, tl.min(tl.where(seen, j, num_blocks_s), 0))
        last = tl.maximum(last, tl.max(tl.where(seen, j + 1, 0), 0))
        start = tl.minimum(start, tl.min(tl.where(full, j, num_blocks_s), 0))
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


def block_table(
    sides: Sequence[Any], sizes: tuple[int, int], window: tuple[int | None, int | None]
) -> jax.Array:
    """For each block of the first side its blocks of the second; [b or 1, blocks, 4] int32.

    Args:
      sides: (ids, positions or None, length, position of the first token) of both; at most two
        arrays of ids each.
      sizes: Tokens in a block of each.
      window: How far before and after a token of the first side those of the second may be.
    """
    (ids, positions, num, offset), (ids_s, positions_s, num_s, offset_s) = sides
    arrays = [*_two(ids), positions, *_two(ids_s), positions_s]
    arrays = [None if x is None else x.astype(jnp.int32) for x in arrays]
    lead = max(x.shape[0] for x in arrays if x is not None)
    blocks, blocks_s = cdiv(num, sizes[0]), cdiv(num_s, sizes[1])
    before, after = window
    (out,) = triton_call(
        block_table_kernel,
        *arrays,
        num,
        num_s,
        offset,
        offset_s,
        before or 0,
        after or 0,
        *(0 if x is None or x.shape[0] == 1 else x.shape[1] for x in arrays),
        grid=(lead * blocks,),
        out_shape=[jax.ShapeDtypeStruct((lead, blocks, 4), jnp.int32)],
        num_warps=4,
        num_stages=1,
        SIZE=sizes[0],
        SIZE_S=sizes[1],
        ROWS=min(max(_AT_ONCE // sizes[1], 1), next_power_of_2(blocks_s)),
        IDS=len(ids),
        POSITIONS=positions is not None,
        BEFORE=before is not None,
        AFTER=after is not None,
    )
    return out


def _two(ids: Sequence[jax.Array]) -> list[jax.Array | None]:
    return [*ids, *[None] * (2 - len(ids))]
