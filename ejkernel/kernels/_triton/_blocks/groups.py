"""Which rows belong to which matrix of a ragged product, found in the kernel from group sizes."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Groups(NamedTuple):
    """Consecutive groups of rows; the matrices at hand belong to neighbouring groups."""

    sizes: Any  # [num_groups] int32; None: every group has `rows` rows
    offset: Any  # group of the first matrix, an array of one int32; None: 0
    num_groups: Any
    num_matrices: Any
    rows: Any  # all of them; of one group if there are no sizes
    PADDED: tl.constexpr  # a power of two, at least num_groups


class Bounds(NamedTuple):
    """Rows of each group, and tiles of rows up to it; vectors are [PADDED]."""

    index: Any
    start: Any
    stop: Any
    end: Any  # tiles of this group and all before it
    first: Any  # group of the first matrix
    count: Any  # tiles that have a matrix
    low: Any  # first row that has a matrix
    high: Any  # row after the last one


class Tile(NamedTuple):
    """Rows from `row` on, below `stop`, of one matrix; `owned` is false if they have none."""

    matrix: Any
    row: Any
    stop: Any
    owned: Any


@triton.jit
def _first(groups):
    if groups.offset is None:
        return 0
    else:
        return tl.load(groups.offset)


@triton.jit
def _sizes(groups, index):
    size = tl.load(groups.sizes + index, mask=index < groups.num_groups, other=0)
    return tl.maximum(size, 0)


@triton.jit
def bounds(groups, BM: tl.constexpr):
    """Bounds of all groups in tiles of BM rows; 0 if all groups are of one size."""
    if groups.sizes is None:
        return 0  # a helper cannot return None in Triton 3.6
    else:
        index = tl.arange(0, groups.PADDED)
        size, first = _sizes(groups, index), _first(groups)
        after = tl.cumsum(size, 0)
        # sizes that sum to more than the rows are cut
        start, stop = tl.minimum(after - size, groups.rows), tl.minimum(after, groups.rows)
        mine = (index >= first) & (index < first + groups.num_matrices)
        size = tl.where(mine & (index < groups.num_groups), stop - start, 0)
        end = tl.cumsum(tl.cdiv(size, BM), 0)
        low = tl.min(tl.where(size > 0, start, groups.rows), 0)
        high = tl.maximum(tl.max(tl.where(size > 0, stop, 0), 0), low)
        return Bounds(index, start, stop, end, first, tl.max(end, 0), low, high)


@triton.jit
def num_rows(groups):
    """Rows of all groups."""
    if groups.sizes is None:
        return groups.num_matrices * groups.rows
    else:
        return groups.rows


@triton.jit
def num_tiles(groups, bounds, BM: tl.constexpr, EVERY_ROW: tl.constexpr):
    """Tiles of rows that have a matrix, and with EVERY_ROW those of the other rows too."""
    if groups.sizes is None:
        return groups.num_matrices * tl.cdiv(groups.rows, BM)
    elif EVERY_ROW:
        others = tl.cdiv(bounds.low, BM) + tl.cdiv(groups.rows - bounds.high, BM)
        return bounds.count + others
    else:
        return bounds.count


@triton.jit
def find(groups, bounds, i, BM: tl.constexpr, EVERY_ROW: tl.constexpr):
    """Tile number i: those with a matrix come in its order, then the rows before and after them."""
    if groups.sizes is None:
        each = tl.cdiv(groups.rows, BM)
        matrix = i // each
        start = matrix * groups.rows
        return Tile(matrix, start + (i % each) * BM, start + groups.rows, True)
    else:
        group = tl.sum((bounds.end <= i).to(tl.int32), 0)
        before = tl.max(tl.where(bounds.end <= i, bounds.end, 0), 0)
        here = bounds.index == group
        row = tl.sum(tl.where(here, bounds.start, 0), 0) + (i - before) * BM
        stop = tl.sum(tl.where(here, bounds.stop, 0), 0)
        owned = i < bounds.count
        if EVERY_ROW:
            other = i - bounds.count
            leading = tl.cdiv(bounds.low, BM)
            in_front = other < leading
            trailing = bounds.high + (other - leading) * BM
            row = tl.where(owned, row, tl.where(in_front, other * BM, trailing))
            stop = tl.where(owned, stop, tl.where(in_front, bounds.low, groups.rows))
        return Tile(tl.where(owned, group - bounds.first, 0), row, stop, owned)


@triton.jit
def rows_of(groups, matrix):
    """First row of a matrix and the row after its last."""
    if groups.sizes is None:
        return matrix * groups.rows, (matrix + 1) * groups.rows
    else:
        index = tl.arange(0, groups.PADDED)
        size, group = _sizes(groups, index), matrix + _first(groups)
        start = tl.sum(tl.where(index < group, size, 0), 0)
        stop = start + tl.sum(tl.where(index == group, size, 0), 0)
        return tl.minimum(start, groups.rows), tl.minimum(stop, groups.rows)
