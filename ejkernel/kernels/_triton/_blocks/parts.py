"""Tiles whose columns come in two parts: 192 are 128 and 64, and need not be padded to 256.

A tile is a tuple of one or two parts. It is no bundle with a member that may be absent: Triton 3.6
cannot return one from a function.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.callib import next_power_of_2
from ejkernel.kernels._triton._blocks import addresses

_LEAST = 16  # columns of a part: products take no fewer
# From here on tiles are cut. In narrower ones exponentials take the time, and not products.
_LEAST_CUT = 128


class Rows(NamedTuple):
    """How the rows of one head lie in an array [b, tokens, heads, WIDTH]."""

    WIDTH: tl.constexpr
    first: Any  # `addresses.Rows` of the first part
    rest: Any  # of the columns after it, or None


def columns(width: int) -> tuple[int, ...]:
    """Columns of the parts of a tile: one power of two, or two if these are fewer columns."""
    padded = max(next_power_of_2(width), _LEAST)
    first = padded // 2
    rest = max(next_power_of_2(max(width - first, 1)), _LEAST)
    return (first, rest) if padded >= _LEAST_CUT and rest < first else (padded,)


def rows_of(heads: int, width: int) -> Rows:
    """The rows of one head in an array [b, tokens, heads, width]."""
    first, *more = columns(width)
    rest = addresses.Rows(heads * width, width - first, more[0]) if more else None
    return Rows(width, addresses.Rows(heads * width, min(first, width), first), rest)


@triton.jit
def load(base, rows, row, count, valid, ROWS: tl.constexpr, CHECKED: tl.constexpr):
    """A tile, as of `addresses.load_tile`."""
    first = addresses.load_tile(base, rows.first, row, count, valid, ROWS, CHECKED)
    if rows.rest is not None:
        base += rows.first.WIDTH
        return first, addresses.load_tile(base, rows.rest, row, count, valid, ROWS, CHECKED)
    else:
        return (first,)


@triton.jit
def store(base, rows, row, count, tile, ROWS: tl.constexpr):
    """Stores what is inside the array, in its dtype."""
    addresses.store_tile(base, rows.first, row, count, tile[0], ROWS)
    if rows.rest is not None:
        addresses.store_tile(base + rows.first.WIDTH, rows.rest, row, count, tile[1], ROWS)


@triton.jit
def zeros(rows, ROWS: tl.constexpr):
    """Sums to begin with, in float32."""
    first = tl.zeros([ROWS, rows.first.PADDED], tl.float32)
    if rows.rest is not None:
        return first, tl.zeros([ROWS, rows.rest.PADDED], tl.float32)
    else:
        return (first,)


@triton.jit
def dot_transposed(x, y, PRECISION: tl.constexpr):
    """x y^T, summed over all columns."""
    dots = tl.dot(x[0], tl.trans(y[0]), input_precision=PRECISION)
    if len(x) == 2:
        dots = tl.dot(x[1], tl.trans(y[1]), dots, input_precision=PRECISION)
    return dots


@triton.jit
def _halves(tile):
    """The first and the second half of a tile's columns."""
    ROWS: tl.constexpr = tile.shape[0]
    HALF: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, [ROWS, 2, HALF]), (0, 2, 1)))


@triton.jit
def _sum_of_halves(x, y):
    """x y^T in float32; both halves have a sum of their own, unless they are narrow."""
    if x.shape[1] > 32:
        x_first, x_last = _halves(x)
        y_first, y_last = _halves(y)
        dots = tl.dot(x_first, tl.trans(y_first), input_precision="ieee")
        return dots + tl.dot(x_last, tl.trans(y_last), input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(y), input_precision="ieee")


@triton.jit
def close_dot_transposed(x, y, PRECISION: tl.constexpr):
    """x y^T like `dot_transposed`, for differences with other sums of the same size.

    A GPU adds a float32 product's terms one after the other, so that errors grow with their number.
    Sums of 32 or 64 terms that are added have a quarter of the error at 192 columns.
    """
    if (x[0].dtype == tl.float32) and (PRECISION == "ieee"):
        if x[0].shape[1] > 64:
            x_first, x_last = _halves(x[0])
            y_first, y_last = _halves(y[0])
            dots = _sum_of_halves(x_first, y_first) + _sum_of_halves(x_last, y_last)
        else:
            dots = _sum_of_halves(x[0], y[0])
        if len(x) == 2:
            dots += _sum_of_halves(x[1], y[1])
        return dots
    else:
        return dot_transposed(x, y, PRECISION)


@triton.jit
def add_dot(acc, x, tile, PRECISION: tl.constexpr):
    """acc + x tile; x is in one part."""
    x = x.to(tile[0].dtype)
    first = tl.dot(x, tile[0], acc[0], input_precision=PRECISION)
    if len(tile) == 2:
        return first, tl.dot(x, tile[1], acc[1], input_precision=PRECISION)
    else:
        return (first,)


@triton.jit
def scale(tile, factor):
    """All parts times a number or [ROWS, 1]."""
    if len(tile) == 2:
        return tile[0] * factor, tile[1] * factor
    else:
        return (tile[0] * factor,)


@triton.jit
def keep_rows(tile, kept):
    """Zeros in rows that are not kept, which may hold nan."""
    if len(tile) == 2:
        return tl.where(kept[:, None], tile[0], 0.0), tl.where(kept[:, None], tile[1], 0.0)
    else:
        return (tl.where(kept[:, None], tile[0], 0.0),)


@triton.jit
def row_dots(x, y):
    """sum(x * y) of each row, in float32."""
    sums = tl.sum(x[0].to(tl.float32) * y[0].to(tl.float32), 1)
    if len(x) == 2:
        sums += tl.sum(x[1].to(tl.float32) * y[1].to(tl.float32), 1)
    return sums


@triton.jit
def zero_rows(tile):
    """Which rows hold zeros alone."""
    others = tl.max((tile[0] != 0.0).to(tl.int32), 1)
    if len(tile) == 2:
        others = tl.maximum(others, tl.max((tile[1] != 0.0).to(tl.int32), 1))
    return others == 0


@triton.jit
def finite_rows(tile):
    """Which rows hold neither inf nor nan."""
    finite = addresses.finite_rows(tile[0])
    if len(tile) == 2:
        finite &= addresses.finite_rows(tile[1])
    return finite
