"""Loads and stores of tiles, and of vectors and tiles of optional arrays."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """The rows of one head in an array [b, tokens, heads, width]."""

    base: Any
    stride: Any  # elements between two rows
    count: Any
    WIDTH: tl.constexpr
    PADDED: tl.constexpr  # columns of a tile: a power of two, at least WIDTH


class Pairs(NamedTuple):
    """An array [b, h, t, s] and its strides, which are 0 along axes that are broadcast."""

    base: Any
    batch: Any
    head: Any
    query: Any
    key: Any


class Place(NamedTuple):
    """Batch and query head of a tile, in 64 bits."""

    batch: Any
    head: Any


@triton.jit
def tile_pointers(rows, row, ROWS: tl.constexpr):
    # 64 bits for the row alone. Offsets inside a tile, added up first and kept over a loop, cost
    # forward 9 % on an H200 (d = 128): in this order the compiler advances pointers instead.
    o_r = tl.arange(0, ROWS)
    first = rows.base + row.to(tl.int64) * rows.stride
    return first + o_r[:, None] * rows.stride + tl.arange(0, rows.PADDED)[None, :]


@triton.jit
def load_tile(rows, row, ROWS: tl.constexpr, CHECKED: tl.constexpr):
    """Rows from `row` on; columns beyond WIDTH, and CHECKED rows beyond `count`, are 0."""
    o_c = tl.arange(0, rows.PADDED)
    p = tile_pointers(rows, row, ROWS)  # [ROWS, PADDED]
    if CHECKED:
        m_r = (row + tl.arange(0, ROWS) < rows.count)[:, None]
        if rows.PADDED == rows.WIDTH:
            return tl.load(p, mask=m_r, other=0.0)
        else:
            return tl.load(p, mask=m_r & (o_c < rows.WIDTH)[None, :], other=0.0)
    else:
        if rows.PADDED == rows.WIDTH:
            return tl.load(p)
        else:
            return tl.load(p, mask=(o_c < rows.WIDTH)[None, :], other=0.0)


@triton.jit
def store_tile(rows, row, tile, ROWS: tl.constexpr):
    """Stores what is inside the array, in its dtype."""
    inside = (row + tl.arange(0, ROWS) < rows.count)[:, None]
    inside = inside & (tl.arange(0, rows.PADDED) < rows.WIDTH)[None, :]
    tl.store(tile_pointers(rows, row, ROWS), tile.to(rows.base.dtype.element_ty), mask=inside)


@triton.jit
def load_row(base, row, count, ROWS: tl.constexpr, OTHER: tl.constexpr):
    """A vector of neighbouring elements; OTHER beyond the end."""
    o_r = row + tl.arange(0, ROWS)
    return tl.load(base + o_r, mask=o_r < count, other=OTHER)


@triton.jit
def load_pairs(pairs, at, o_q, o_k, num_q, num_k):
    """A tile of an array over pairs; the two offsets are expanded against each other."""
    inside = (o_q < num_q) & (o_k < num_k)
    base = pairs.base + at.batch * pairs.batch + at.head * pairs.head
    p = base + o_q.to(tl.int64) * pairs.query + o_k.to(tl.int64) * pairs.key
    return tl.load(p, mask=inside, other=0)


@triton.jit
def finite(x):
    """Zeros for what is not finite: a masked pair multiplies it by zero, and 0 * nan is nan."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)


@triton.jit
def spoiled(x):
    """Which rows of a tile hold something that is not finite."""
    return tl.max(tl.where(tl.abs(x.to(tl.float32)) < float("inf"), 0, 1), 1) > 0


@triton.jit
def odd_rows(x):
    """0 for each row of a tile, or nan where it holds inf or nan: one instruction an element."""
    return tl.sum(x * 0.0, 1)


@triton.jit
def any_odd(x):
    """Whether a tile holds inf or nan: what came of a product with something nobody should see?"""
    return (tl.sum(x * 0.0) == 0.0) == 0  # over both axes at once: one exchange of warps
