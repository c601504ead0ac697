"""Loads and stores of tiles: [rows, columns] of an array whose rows are `stride` apart."""

import triton
import triton.language as tl


@triton.jit
def tile_pointers(base, row, stride, ROWS: tl.constexpr, PADDED: tl.constexpr):
    # 64 bits for the row alone. Offsets inside a tile, added up first and kept over a loop, cost
    # forward 9 % on an H200 (d = 128): in this order the compiler advances pointers instead.
    o_r = tl.arange(0, ROWS)
    return base + row.to(tl.int64) * stride + o_r[:, None] * stride + tl.arange(0, PADDED)[None, :]


@triton.jit
def load_tile(
    base,
    row,
    stride,
    num_rows,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Rows from `row` on; columns beyond COLUMNS, and CHECKED rows beyond `num_rows`, are 0."""
    o_r = tl.arange(0, ROWS)
    o_c = tl.arange(0, PADDED)
    p = tile_pointers(base, row, stride, ROWS, PADDED)
    if CHECKED:
        m_r = (row + o_r < num_rows)[:, None]
        if PADDED == COLUMNS:
            return tl.load(p, mask=m_r, other=0.0)
        else:
            return tl.load(p, mask=m_r & (o_c < COLUMNS)[None, :], other=0.0)
    else:
        if PADDED == COLUMNS:
            return tl.load(p)
        else:
            return tl.load(p, mask=(o_c < COLUMNS)[None, :], other=0.0)


@triton.jit
def tile_mask(row, num_rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    """Which elements of a tile are inside the array."""
    m = (row + tl.arange(0, ROWS) < num_rows)[:, None]
    return m & (tl.arange(0, PADDED) < COLUMNS)[None, :]


@triton.jit
def load_row(base, row, num_rows, ROWS: tl.constexpr, OTHER: tl.constexpr):
    """A vector of neighbouring elements; OTHER beyond the end."""
    o_r = row + tl.arange(0, ROWS)
    return tl.load(base + o_r, mask=o_r < num_rows, other=OTHER)


@triton.jit
def load_pairs(base, o_q, o_k, stride_q, stride_k, num_q, num_k):
    """A tile of an array over pairs; the two offsets are expanded against each other."""
    inside = (o_q < num_q) & (o_k < num_k)
    return tl.load(
        base + o_q.to(tl.int64) * stride_q + o_k.to(tl.int64) * stride_k, mask=inside, other=0
    )


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
