"""Lists of the blocks to visit, in place of a range; those that need no mask come first."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Lists(NamedTuple):
    """For each block of the side that programs hold, the blocks of the other side to visit.

    Rows are counted along [b or 1, h or 1, held blocks].
    """

    blocks: Any  # int32 [rows, width]
    counts: Any  # int32 [rows, 2]: blocks that need no mask, and all of them
    width: Any
    batch: Any  # rows of a batch; 0 where all share them
    head: Any
    UNIT: tl.constexpr  # tokens of a block; tiles divide it


@triton.jit
def row_of(lists, at, i, SIZE: tl.constexpr):
    """The row of tile i, of SIZE tokens, of the held side."""
    PER: tl.constexpr = lists.UNIT // SIZE
    return at.batch * lists.batch + at.head * lists.head + i // PER


@triton.jit
def bounds(lists, row, SIZE: tl.constexpr):
    """[first, full, ragged, last] of the tiles of SIZE tokens in a row, as of a range."""
    PER: tl.constexpr = lists.UNIT // SIZE
    whole = tl.load(lists.counts + row * 2) * PER
    return whole * 0, whole * 0, whole, tl.load(lists.counts + row * 2 + 1) * PER


@triton.jit
def entries(lists, block, SIZE: tl.constexpr):
    """The list of the block of queries that a program holds."""
    return lists.blocks + row_of(lists, block.at, block.index, SIZE) * lists.width


@triton.jit
def entry(visits, step, last, SIZE: tl.constexpr):
    """The entry of a list for a step; loops read it one step ahead, as addresses wait for it.

    `visits` are `block_ranges.Bounds`. Where they are a range, nothing is read.
    """
    if visits.lists is not None:
        PER: tl.constexpr = visits.lists.UNIT // SIZE
        return tl.load(visits.listed + step // PER, mask=step < last, other=0)
    else:
        return 0


@triton.jit
def tile(visits, listed_block, step, SIZE: tl.constexpr):
    """The tile of SIZE tokens that comes at a step, whose entry is `listed_block`."""
    if visits.lists is not None:
        PER: tl.constexpr = visits.lists.UNIT // SIZE
        return listed_block * PER + step % PER
    else:
        return step
