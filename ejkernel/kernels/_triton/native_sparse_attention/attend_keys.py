"""Backward of the selected blocks over keys: dk and dv from the tokens that selected a block.

Blocks that many tokens select are several pieces of work. A piece leaves a partial sum, and the
sums of a block are added in their order: no atomics, the same bits in every run.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import addresses
from ejkernel.kernels._triton.native_sparse_attention import rows as common


class Sums(NamedTuple):
    """`addresses.Rows` of partial sums [pieces, SPAN, width]."""

    key_rows: Any
    value_rows: Any
    SPAN: tl.constexpr  # keys of a block, made a multiple of a tile


@triton.jit
def _tokens(inverse, first, step, length, M: tl.constexpr, PADDED: tl.constexpr):
    """The tokens of a step, one for each row, and whether there is one."""
    place = step + tl.arange(0, M) // PADDED
    real = place < length
    return tl.load(inverse.tokens + first + place, mask=real, other=0), real


@triton.jit
def nsa_attend_bwd_dkv_kernel(
    query, key, value, sparse, inverse, start, stop, num_blocks, dout, lse, delta, sums, dk, dv,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program (piece, part): BK keys of a block; `lse` and `delta` are [b, t, h].

    `dk` and `dv` are partial sums.
    """
    M: tl.constexpr = BT * sparse.PADDED
    D: tl.constexpr = sparse.key_rows.WIDTH
    E: tl.constexpr = sparse.value_rows.WIDTH
    piece = tl.program_id(0)
    length = tl.load(inverse.work + piece * 4 + 2)
    if length == 0:
        return
    row = tl.load(inverse.work + piece * 4)
    first = tl.load(inverse.work + piece * 4 + 1)
    block, bg = row % num_blocks, row // num_blocks
    i_g, batch = bg % sparse.KEY_HEADS, (bg // sparse.KEY_HEADS).to(tl.int64)
    k_first = tl.load(start + block) + tl.program_id(1) * BK
    k_stop = tl.load(stop + block)
    key_row = batch * sparse.num * sparse.KEY_HEADS + i_g
    b_k = common.load_keys(key + key_row * D, sparse.key_rows, k_first, k_stop, BK, False)
    b_v = common.load_keys(value + key_row * E, sparse.value_rows, k_first, k_stop, BK, False)
    o_k = k_first + tl.arange(0, BK)
    acc_k = tl.zeros([BK, sparse.key_rows.PADDED], tl.float32)
    acc_v = tl.zeros([BK, sparse.value_rows.PADDED], tl.float32)
    token, real = _tokens(inverse, first, 0, length, M, sparse.PADDED)
    for i in range(0, length, BT):
        rows = common.rows_of(sparse, batch, i_g, token, real, M)
        b_q = common.load_rows(query, rows, sparse, D, sparse.key_rows.PADDED)  # [M, BD]
        b_do = common.load_rows(dout, rows, sparse, E, sparse.value_rows.PADDED)  # [M, BE]
        b_lse = common.load_row_sums(lse, rows, sparse)
        b_delta = common.load_row_sums(delta, rows, sparse)
        seen = (o_k[:, None] <= token[None, :]) & (o_k < k_stop)[:, None] & real[None, :]
        token, real = _tokens(inverse, first, i + BT, length, M, sparse.PADDED)
        dots = tl.dot(b_k, tl.trans(b_q), input_precision=sparse.PRECISION)  # [BK, M]
        p = common.weights(common.logits(dots, sparse), seen, b_lse[None, :], sparse)
        dp = tl.dot(b_v, tl.trans(b_do), input_precision=sparse.PRECISION)  # [BK, M]
        acc_v = tl.dot(p.to(b_do.dtype), b_do, acc_v, input_precision=sparse.PRECISION)
        ds = p * (dp - b_delta[None, :])
        acc_k = tl.dot(ds.to(b_q.dtype), b_q, acc_k, input_precision=sparse.PRECISION)
    at = piece.to(tl.int64) * sums.SPAN + tl.program_id(1) * BK
    addresses.store_tile(dk + at * D, sums.key_rows, piece * 0, BK, acc_k * sparse.SCALE, BK)
    addresses.store_tile(dv + at * E, sums.value_rows, piece * 0, BK, acc_v, BK)


@triton.jit
def nsa_sum_pieces_kernel(
    parts_k, parts_v, pieces, start, stop, sparse, num_blocks, sums, dk, dv,
    BK: tl.constexpr,
):  # fmt: skip
    """Program (block of a batch and key head, part): BK rows of dk and dv, in float32."""
    D: tl.constexpr = sparse.key_rows.WIDTH
    E: tl.constexpr = sparse.value_rows.WIDTH
    row = tl.program_id(0)
    block, bg = row % num_blocks, row // num_blocks
    i_g, batch = bg % sparse.KEY_HEADS, (bg // sparse.KEY_HEADS).to(tl.int64)
    acc_k = tl.zeros([BK, sparse.key_rows.PADDED], tl.float32)
    acc_v = tl.zeros([BK, sparse.value_rows.PADDED], tl.float32)
    for piece in range(tl.load(pieces + row), tl.load(pieces + row + 1)):
        at = (row * 0 + piece).to(tl.int64) * sums.SPAN + tl.program_id(1) * BK
        acc_k += addresses.load_tile(parts_k + at * D, sums.key_rows, row * 0, BK, None, BK, False)
        acc_v += addresses.load_tile(
            parts_v + at * E, sums.value_rows, row * 0, BK, None, BK, False
        )
    first = tl.load(start + block) + tl.program_id(1) * BK
    end = tl.load(stop + block)
    key_row = batch * sparse.num * sparse.KEY_HEADS + i_g
    addresses.store_tile(dk + key_row * D, sparse.key_rows, first, end, acc_k, BK)
    addresses.store_tile(dv + key_row * E, sparse.value_rows, first, end, acc_v, BK)
