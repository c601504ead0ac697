"""Loads and stores of tiles and vectors."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """How the rows of one head lie in an array [b, tokens, heads, width]."""

    STRIDE: tl.constexpr  # elements between two rows
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
def tile_pointers(base, rows, row, ROWS: tl.constexpr):
    # 64 bits for the row alone. Offsets inside a tile, added up first and kept over a loop, cost
    # forward 9 % on an H200 (d = 128): in this order the compiler advances pointers instead.
    o_r = tl.arange(0, ROWS)
    first = base + row.to(tl.int64) * rows.STRIDE
    return first + o_r[:, None] * rows.STRIDE + tl.arange(0, rows.PADDED)[None, :]


@triton.jit
def load_tile(base, rows, row, count, valid, ROWS: tl.constexpr, CHECKED: tl.constexpr):
    """Rows from `row` on, [ROWS, PADDED]; `base` points to the first of `count`.

    Zeros stand in columns beyond WIDTH, in CHECKED rows beyond `count`, and in rows that are not
    `valid`; None: all rows are.
    """
    p = tile_pointers(base, rows, row, ROWS)
    inside = tl.full([1, 1], 1, tl.int1)
    if CHECKED:
        inside = inside & (row + tl.arange(0, ROWS) < count)[:, None]
    if valid is not None:
        inside = inside & valid[:, None]
    if rows.PADDED != rows.WIDTH:
        inside = inside & (tl.arange(0, rows.PADDED) < rows.WIDTH)[None, :]
    if CHECKED or (valid is not None) or (rows.PADDED != rows.WIDTH):
        return tl.load(p, mask=inside, other=0.0)
    else:
        return tl.load(p)


@triton.jit
def store_tile(base, rows, row, count, tile, ROWS: tl.constexpr):
    """Stores what is inside the array, in its dtype."""
    inside = (row + tl.arange(0, ROWS) < count)[:, None]
    inside = inside & (tl.arange(0, rows.PADDED) < rows.WIDTH)[None, :]
    p = tile_pointers(base, rows, row, ROWS)
    tl.store(p, tile.to(base.dtype.element_ty), mask=inside)


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
def finite_rows(x):
    """Which rows of a tile hold neither inf nor nan: one instruction an element."""
    return tl.sum(x * 0.0, 1) == 0.0
