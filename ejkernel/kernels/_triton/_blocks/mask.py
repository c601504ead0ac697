"""Which pairs of a tile are visible: lengths, segment ids, windows and dense masks.

Tiles are [held, streamed]: a program holds a block of one side and streams blocks of the other.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import addresses, parts


class Tokens(NamedTuple):
    """Ids and positions of the tokens of one side, [b or 1, tokens], and the steps of a batch."""

    ids: Any
    ids_step: Any
    more_ids: Any  # a second set, of packed calls with segment ids
    more_ids_step: Any
    positions: Any  # None: they follow from the index
    positions_step: Any


class Window(NamedTuple):
    """How far before and after its query a key may be; None is no limit."""

    left: Any
    right: Any
    offset: Any  # position of the first query, where positions follow from the index


def window(limits: Sequence[int | None], offset: int | None) -> Window:
    """Limits that, added to a position, fit into 32 bits: positions are between -2^29 and 2^29."""
    left, right = (None if x is None else min(x, 2**30) for x in limits)
    return Window(left, right, offset)


class Mask(NamedTuple):
    """What hides pairs."""

    window: Any
    dense: Any  # `addresses.Pairs` of int8, or None
    CUT: tl.constexpr  # some blocks reach beyond the last query or key
    BLOCKS: tl.constexpr  # some blocks have hidden pairs, besides those of a dense mask


class Tile(NamedTuple):
    """Indices and positions of queries and keys, expanded against each other."""

    o_q: Any
    o_k: Any
    q_pos: Any
    k_pos: Any


@triton.jit
def load_ids(ids, step, i_b, row, count, SIZE: tl.constexpr):
    """Ids of a block of tokens, -1 beyond the last; 0 where there are no ids."""
    if ids is not None:
        return addresses.load_row(ids + i_b * step, row, count, SIZE, -1)
    else:
        return tl.zeros([SIZE], tl.int32)


@triton.jit
def load_positions(tokens, i_b, row, count, offset, SIZE: tl.constexpr):
    """Positions of a block of tokens; where they follow from the index, `offset` is the first."""
    if tokens.positions is not None:
        base = tokens.positions + i_b * tokens.positions_step
        return addresses.load_row(base, row, count, SIZE, 0)
    else:
        return row + tl.arange(0, SIZE) + offset


@triton.jit
def real_tokens(tokens, i_b, row, count, SIZE: tl.constexpr):
    """Which tokens of a block, which have ids, are no padding: negative ids are."""
    real = load_ids(tokens.ids, tokens.ids_step, i_b, row, count, SIZE) >= 0
    if tokens.more_ids is not None:
        real &= load_ids(tokens.more_ids, tokens.more_ids_step, i_b, row, count, SIZE) >= 0
    return real


@triton.jit
def load_real_tile(base, rows, row, count, tokens, i_b, ROWS: tl.constexpr, CHECKED: tl.constexpr):
    """`parts` of a tile with zeros for padding, which may hold nan: 0 times nan is nan."""
    if tokens.ids is not None:
        real = real_tokens(tokens, i_b, row, count, ROWS)
        return parts.load(base, rows, row, count, real, ROWS, False)
    else:
        return parts.load(base, rows, row, count, None, ROWS, CHECKED)


@triton.jit
def inside_window(q_pos, k_pos, window):
    """Pairs inside a window with a limit; positions are expanded against each other."""
    if window.right is not None:
        seen = k_pos <= q_pos + window.right
        if window.left is not None:
            seen = seen & (k_pos >= q_pos - window.left)
        return seen
    else:
        return k_pos >= q_pos - window.left


@triton.jit
def same_segment(q_id, k_id):
    """Pairs of one segment; a negative id is padding."""
    return (q_id == k_id) & (q_id >= 0)


@triton.jit
def hide(
    x, other, masked, tile, at, row, ids, more_ids, streamed, count, mask, num_q, num_k,
    SIZE: tl.constexpr,
):  # fmt: skip
    """A tile [held, streamed] with `other` in place of hidden pairs.

    All but the dense mask matters only in blocks that are `masked`. `ids` are vectors of the held
    side; those of the `streamed` side, which has `count` tokens, are loaded: SIZE of them, from
    `row` on.
    """
    if mask.BLOCKS:
        if masked:
            seen = tl.full((1, 1), 1, tl.int1)
            if mask.CUT:
                seen &= (tile.o_q < num_q) & (tile.o_k < num_k)
            if streamed.ids is not None:
                b_i = load_ids(streamed.ids, streamed.ids_step, at.batch, row, count, SIZE)
                seen &= same_segment(ids[:, None], b_i[None, :])
            if streamed.more_ids is not None:
                b_i = load_ids(
                    streamed.more_ids, streamed.more_ids_step, at.batch, row, count, SIZE
                )
                seen &= same_segment(more_ids[:, None], b_i[None, :])
            if (mask.window.left is not None) or (mask.window.right is not None):
                seen &= inside_window(tile.q_pos, tile.k_pos, mask.window)
            x = tl.where(seen, x, other)
    if mask.dense is not None:
        given = addresses.load_pairs(mask.dense, at, tile.o_q, tile.o_k, num_q, num_k)
        x = tl.where(given != 0, x, other)
    return x
