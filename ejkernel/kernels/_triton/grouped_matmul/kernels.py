"""The two grouped products in Triton: rows times their matrix, and sums over a matrix's rows.

Programs are persistent: program p takes the tiles p, p + programs, .. of the result. Tiles are in
the order of the groups, so that programs at work at one time share a matrix; a tile has rows of one
group only.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import groups as grouping


class Product(NamedTuple):
    """A product of [rows, inner] and [inner, columns], and how its tiles are made.

    Sizes are in units of INNER_UNIT and COLUMN_UNIT, so that the compiler knows what divides them.
    """

    inner: Any
    columns: Any
    INNER_UNIT: tl.constexpr
    COLUMN_UNIT: tl.constexpr
    TRANSPOSED: tl.constexpr  # the matrices are [columns, inner]
    WHOLE_INNER: tl.constexpr  # tiles divide the inner size
    WHOLE_COLUMNS: tl.constexpr
    CONVERTED: tl.constexpr  # the operands differ in dtype: both become float32
    PRECISION: tl.constexpr
    DESCRIBED: tl.constexpr  # tiles are loaded by tensor descriptors, made in the kernel


class Sums(NamedTuple):
    """Sums over rows of [rows, i] times [rows, j], and how tiles [i, j] of them are made."""

    num_i: Any  # in units of I_UNIT
    num_j: Any
    I_UNIT: tl.constexpr
    J_UNIT: tl.constexpr
    WHOLE_I: tl.constexpr
    WHOLE_J: tl.constexpr
    CONVERTED: tl.constexpr
    PRECISION: tl.constexpr
    DESCRIBED: tl.constexpr


@triton.jit
def banded(tile, num_rows, num_columns, BAND: tl.constexpr):
    """Row and column of a tile: bands of BAND rows, each column by column.

    Programs at work at one time then share few rows and few columns, which stay in the L2 cache.
    """
    band = tile // (BAND * num_columns)
    height = tl.minimum(num_rows - band * BAND, BAND)
    rest = tile % (BAND * num_columns)
    return band * BAND + rest % height, rest // height


@triton.jit
def multiplied(a, b, acc, CONVERTED: tl.constexpr, PRECISION: tl.constexpr):
    if CONVERTED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _tile_product(
    lhs, rhs, at, column, product, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Rows of one tile times columns of their matrix, [BM, BN]; 0 for rows without a matrix."""
    inner, columns = product.inner * product.INNER_UNIT, product.columns * product.COLUMN_UNIT
    o_m, o_n, o_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    # rows beyond the group repeat its last one, which needs no mask; they are not stored
    o_m = tl.minimum(o_m, at.stop - 1 - at.row)
    p_l = lhs + at.row.to(tl.int64) * inner + o_m[:, None] * inner + o_k[None, :]
    matrix = rhs + at.matrix.to(tl.int64) * inner * columns
    if product.TRANSPOSED:
        o_n = tl.minimum(o_n, columns - 1 - column)
        p_r = matrix + column.to(tl.int64) * inner + o_n[:, None] * inner + o_k[None, :]
        step = BK
    else:
        p_r = matrix + column + o_k[:, None] * columns + o_n[None, :]
        step = BK * columns
    m_n = (column + o_n < columns)[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for done in range(0, tl.where(at.owned, inner, 0), BK):
        m_k = o_k < inner - done
        if product.WHOLE_INNER:
            b_l = tl.load(p_l)  # [BM, BK]
        else:
            b_l = tl.load(p_l, mask=m_k[None, :], other=0.0)
        if product.TRANSPOSED:  # [BN, BK]
            if product.WHOLE_INNER:
                b_r = tl.load(p_r)
            else:
                b_r = tl.load(p_r, mask=m_k[None, :], other=0.0)
            acc = multiplied(b_l, tl.trans(b_r), acc, product.CONVERTED, product.PRECISION)
        else:  # [BK, BN]
            if product.WHOLE_INNER and product.WHOLE_COLUMNS:
                b_r = tl.load(p_r)
            else:
                b_r = tl.load(p_r, mask=m_k[:, None] & m_n, other=0.0)
            acc = multiplied(b_l, b_r, acc, product.CONVERTED, product.PRECISION)
        p_l += BK
        p_r += step
    return acc


@triton.jit
def described(base, rows, columns, BR: tl.constexpr, BC: tl.constexpr):
    """A descriptor of a matrix with tiles of [BR, BC]; what is outside is 0."""
    return tl.make_tensor_descriptor(base, [rows, columns], [columns, 1], [BR, BC])


@triton.jit
def _described_product(
    lhs, rhs, at, column, product, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """As `_tile_product`, from descriptors of all rows and all matrices.

    Rows beyond the group, and columns beyond the matrix, are those of others; they are not stored.
    """
    inner, columns = product.inner * product.INNER_UNIT, product.columns * product.COLUMN_UNIT
    acc = tl.zeros([BM, BN], tl.float32)
    if product.TRANSPOSED:
        first = at.matrix * columns + column
    else:
        first = at.matrix * inner
    for done in range(0, tl.where(at.owned, inner, 0), BK):
        b_l = lhs.load([at.row, done])  # [BM, BK]
        if product.TRANSPOSED:
            b_r = tl.trans(rhs.load([first, done]))  # [BK, BN]
        else:
            b_r = rhs.load([first + done, column])
        acc = multiplied(b_l, b_r, acc, product.CONVERTED, product.PRECISION)
    return acc


@triton.jit
def grouped_matmul_kernel(
    lhs, rhs, groups, product, existing, out,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Rows times their group's matrix. Rows without one are set to 0, unless `out` starts as
    `existing`; then they stay as they are.
    """
    EVERY_ROW: tl.constexpr = existing is None
    inner, columns = product.inner * product.INNER_UNIT, product.columns * product.COLUMN_UNIT
    bounds = grouping.bounds(groups, BM)
    num_rows = grouping.num_tiles(groups, bounds, BM, EVERY_ROW)
    num_columns = tl.cdiv(columns, BN)
    if product.DESCRIBED:
        lhs = described(lhs, grouping.num_rows(groups), inner, BM, BK)
        if product.TRANSPOSED:
            rhs = described(rhs, groups.num_matrices * columns, inner, BN, BK)
        else:
            rhs = described(rhs, groups.num_matrices * inner, columns, BK, BN)
    for tile in range(tl.program_id(0), num_rows * num_columns, tl.num_programs(0)):
        i, j = banded(tile, num_rows, num_columns, BAND)
        at = grouping.find(groups, bounds, i, BM, EVERY_ROW)
        column = j * BN
        if product.DESCRIBED:
            acc = _described_product(lhs, rhs, at, column, product, BM, BN, BK)
        else:
            acc = _tile_product(lhs, rhs, at, column, product, BM, BN, BK)
        o_m, o_n = at.row + tl.arange(0, BM), column + tl.arange(0, BN)
        p = out + o_m.to(tl.int64)[:, None] * columns + o_n[None, :]
        inside = (o_m < at.stop)[:, None] & (o_n < columns)[None, :]
        tl.store(p, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row_sums(
    left, right, start, stop, i, j, sums, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """The sum over rows from start to stop of left row times right row, [BM, BN]."""
    num_i, num_j = sums.num_i * sums.I_UNIT, sums.num_j * sums.J_UNIT
    o_i, o_j, o_r = i + tl.arange(0, BM), j + tl.arange(0, BN), tl.arange(0, BK)
    row = start.to(tl.int64)
    p_l = left + row * num_i + o_r[:, None] * num_i + o_i[None, :]
    p_r = right + row * num_j + o_r[:, None] * num_j + o_j[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for done in range(0, stop - start, BK):
        # both sides: 0 times nan of another group's row would be nan
        m_r = (o_r < stop - start - done)[:, None]
        if sums.WHOLE_I:
            b_l = tl.load(p_l, mask=m_r, other=0.0)  # [BK, BM]
        else:
            b_l = tl.load(p_l, mask=m_r & (o_i < num_i)[None, :], other=0.0)
        if sums.WHOLE_J:
            b_r = tl.load(p_r, mask=m_r, other=0.0)  # [BK, BN]
        else:
            b_r = tl.load(p_r, mask=m_r & (o_j < num_j)[None, :], other=0.0)
        acc = multiplied(tl.trans(b_l), b_r, acc, sums.CONVERTED, sums.PRECISION)
        p_l += BK * num_i
        p_r += BK * num_j
    return acc


@triton.jit
def _described_sums(
    left, right, start, stop, i, j, sums, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """As `_row_sums`, from descriptors that end with the group."""
    num_i, num_j = sums.num_i * sums.I_UNIT, sums.num_j * sums.J_UNIT
    left = described(left, stop, num_i, BK, BM)
    right = described(right, stop, num_j, BK, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for row in range(start, stop, BK):
        b_l, b_r = left.load([row, i]), right.load([row, j])  # [BK, BM], [BK, BN]
        acc = multiplied(tl.trans(b_l), b_r, acc, sums.CONVERTED, sums.PRECISION)
    return acc


@triton.jit
def grouped_matmul_drhs_kernel(
    left, right, groups, sums, out,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """For each matrix the sum over its rows of left row times right row; 0 if it has none."""
    num_i, num_j = sums.num_i * sums.I_UNIT, sums.num_j * sums.J_UNIT
    tiles_i, tiles_j = tl.cdiv(num_i, BM), tl.cdiv(num_j, BN)
    each = tiles_i * tiles_j
    for tile in range(tl.program_id(0), groups.num_matrices * each, tl.num_programs(0)):
        matrix = tile // each
        i, j = banded(tile % each, tiles_i, tiles_j, BAND)
        start, stop = grouping.rows_of(groups, matrix)
        if sums.DESCRIBED:
            acc = _described_sums(left, right, start, stop, i * BM, j * BN, sums, BM, BN, BK)
        else:
            acc = _row_sums(left, right, start, stop, i * BM, j * BN, sums, BM, BN, BK)
        o_i, o_j = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
        base = out + matrix.to(tl.int64) * num_i * num_j
        p = base + o_i.to(tl.int64)[:, None] * num_j + o_j[None, :]
        inside = (o_i < num_i)[:, None] & (o_j < num_j)[None, :]
        tl.store(p, acc.to(out.dtype.element_ty), mask=inside)
