"""Attention backward in Triton, from the rows' logsumexp (Dao, 2023).

By default one pass over the keys gives dk and dv and adds dq with atomic additions, five products
a tile. `deterministic=True` leaves dq to a second pass over the queries, seven products in all.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton._blocks import addresses, pairs, philox, softmax
from ejkernel.kernels._triton.flash_attention import call, config


@triton.jit
def _weights(x, b_lse, seen, UNITS: tl.constexpr, MASKED: tl.constexpr):
    """Softmax weights from logits and the rows' logsumexp (base 2, expanded)."""
    p = tl.math.exp2(x * UNITS - b_lse)
    if MASKED:
        p = tl.where(seen, p, 0.0)
    return p


@triton.jit
def _key_step(
    dk, dv, b_k, b_v, i, query, dout, lse, delta, dq, dbias, bias, mask, slope, seed, i_b, i_h,
    k_row, o_k, k_id, k_id_2, k_pos, q_ids, q_ids_2, q_pos, offset, stride_q, stride_o, bias_t, bias_s,
    mask_t, mask_s, dbias_t, dbias_s, left, right, num_q, num_k,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, NATURAL: tl.constexpr,
    UNITS: tl.constexpr, CAP: tl.constexpr, BIAS: tl.constexpr, SLOPES: tl.constexpr,
    IDS: tl.constexpr, POSITIONS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    THRESHOLD: tl.constexpr, KEPT: tl.constexpr, PRECISION: tl.constexpr,
    SUM_Q: tl.constexpr, SUM_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what block i of the queries gives to dk and dv; tiles are [BK, BQ]."""
    row = i * BQ
    o_q = row + tl.arange(0, BQ)
    b_q = addresses.load_tile(query, row, stride_q, num_q, BQ, D, BD, MASKED)
    b_do = addresses.load_tile(dout, row, stride_o, num_q, BQ, E, BE, MASKED)
    b_lse = softmax.shift(addresses.load_row(lse, row, num_q, BQ, 0.0)) * softmax.LOG2_E
    b_delta = addresses.load_row(delta, row, num_q, BQ, 0.0)
    b_qp = o_q + offset
    if POSITIONS:
        b_qp = addresses.load_row(q_pos, row, num_q, BQ, 0)
    seen = o_k[:, None] >= 0
    if MASKED:
        b_qi = o_q
        b_qi_2 = o_q
        if IDS >= 1:
            b_qi = addresses.load_row(q_ids, row, num_q, BQ, -1)
            valid = b_qi >= 0
            if IDS >= 2:
                b_qi_2 = addresses.load_row(q_ids_2, row, num_q, BQ, -1)
                valid &= b_qi_2 >= 0
            b_q = tl.where(valid[:, None], b_q, 0.0)
            b_do = tl.where(valid[:, None], b_do, 0.0)
            b_delta = tl.where(valid, b_delta, 0.0)
        seen = pairs.visible(
            o_q[None, :], o_k[:, None], b_qi[None, :], k_id[:, None], b_qi_2[None, :],
            k_id_2[:, None], b_qp[None, :], k_pos[:, None], left, right, num_q, num_k,
            IDS, LEFT, RIGHT,
        )  # fmt: skip
    if mask is not None:
        given = addresses.load_pairs(
            mask, o_q[None, :], o_k[:, None], mask_t, mask_s, num_q, num_k
        )
        seen &= given != 0
    dots = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BK, BQ]
    x = pairs.logits(
        dots, o_q[None, :], o_k[:, None], b_qp[None, :], k_pos[:, None], bias, bias_t, bias_s,
        slope, num_q, num_k, SCALE, NATURAL, BIAS, SLOPES, CAP,
    )  # fmt: skip
    p = _weights(x, b_lse[None, :], seen, UNITS, MASKED or (mask is not None))
    dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)  # [BK, BQ]
    kept = p
    if THRESHOLD is not None:
        keep = tl.trans(philox.keep(seed, i_b, i_h, o_q, k_row, BQ, BK, THRESHOLD))
        kept = tl.where(keep, p * KEPT, 0.0)
        dp = tl.where(keep, dp * KEPT, 0.0)
    dv = tl.dot(kept.to(b_do.dtype), b_do, dv, input_precision=PRECISION)
    ds = p * (dp - b_delta[None, :])
    if MASKED or (mask is not None):  # p is 0, but the rest may be nan
        ds = tl.where(seen, ds, 0.0)
    if CAP is not None:
        ds *= 1.0 - (x / CAP) * (x / CAP)
    if dbias is not None:
        _add_bias(dbias, ds, o_q, o_k, dbias_t, dbias_s, num_q, num_k, SUM_Q, SUM_K)
    narrow = ds.to(b_q.dtype)
    dk = tl.dot(narrow, b_q, dk, input_precision=PRECISION)
    if dq is not None:
        part = tl.dot(tl.trans(narrow), b_k, input_precision=PRECISION)  # [BQ, BD]
        p_dq = addresses.tile_pointers(dq, row, stride_q, BQ, BD)
        inside = addresses.tile_mask(row, num_q, BQ, D, BD)
        tl.atomic_add(p_dq, part, mask=inside, sem="relaxed")
    return dk, dv


@triton.jit
def _add_bias(dbias, ds, o_q, o_k, stride_t, stride_s, num_q, num_k, SUM_Q: tl.constexpr,
              SUM_K: tl.constexpr):  # fmt: skip
    """Adds a tile [BK, BQ] to dbias, summed first over the axes that the bias does not have."""
    m_q, m_k = o_q < num_q, o_k < num_k
    wide_q, wide_k = o_q.to(tl.int64) * stride_t, o_k.to(tl.int64) * stride_s
    if SUM_Q and SUM_K:
        tl.atomic_add(dbias, tl.sum(tl.sum(ds, 1), 0), sem="relaxed")
    elif SUM_Q:
        tl.atomic_add(dbias + wide_k, tl.sum(ds, 1), mask=m_k, sem="relaxed")
    elif SUM_K:
        tl.atomic_add(dbias + wide_q, tl.sum(ds, 0), mask=m_q, sem="relaxed")
    else:
        p = dbias + wide_k[:, None] + wide_q[None, :]
        tl.atomic_add(p, ds, mask=m_k[:, None] & m_q[None, :], sem="relaxed")


@triton.jit
def flash_attention_bwd_dkv_kernel(
    query, key, value, bias, mask, sinks, slopes, seed, dropout_offset,
    q_ids, k_ids, q_ids_2, k_ids_2, q_positions, k_positions, table,
    num_q, num_k, num_heads, offset, left, right,
    bias_b, bias_h, bias_t, bias_s, mask_b, mask_h, mask_t, mask_s,
    ids_q, ids_k, ids_q_2, ids_k_2, pos_q, pos_k, table_b, sinks_h, num_sinks,
    dout, lse, delta, dbias_b, dbias_h, dbias_t, dbias_s,
    dk_out, dv_out, dq_out, dbias_out,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr, NATURAL: tl.constexpr, UNITS: tl.constexpr, CAP: tl.constexpr,
    IDS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, THRESHOLD: tl.constexpr,
    KEPT: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
    SUM_Q: tl.constexpr, SUM_K: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(num_k, BK)
    num_groups = num_heads // GROUP
    i_p = tl.program_id(0)
    i_k = i_p % num_blocks  # causal: the first keys are seen by most queries, and start first
    i_g = (i_p // num_blocks) % num_groups
    i_b = i_p // (num_blocks * num_groups)
    row = i_k * BK
    o_k = row + tl.arange(0, BK)
    wide_b = i_b.to(tl.int64)
    BIAS: tl.constexpr = bias is not None
    SLOPES: tl.constexpr = slopes is not None
    POSITIONS: tl.constexpr = q_positions is not None

    key += (wide_b * num_k * num_groups + i_g) * D
    value += (wide_b * num_k * num_groups + i_g) * E
    b_k = addresses.load_tile(key, row, num_groups * D, num_k, BK, D, BD, True)
    b_v = addresses.load_tile(value, row, num_groups * E, num_k, BK, E, BE, True)
    k_pos = o_k
    q_pos = q_positions
    if POSITIONS:
        k_pos = addresses.load_row(k_positions + wide_b * pos_k, row, num_k, BK, 0)
        q_pos = q_positions + wide_b * pos_q
    k_id = o_k
    k_id_2 = o_k
    if IDS >= 1:
        k_id = addresses.load_row(k_ids + wide_b * ids_k, row, num_k, BK, -1)
        valid = k_id >= 0
        q_ids += wide_b * ids_q
        if IDS >= 2:
            k_id_2 = addresses.load_row(k_ids_2 + wide_b * ids_k_2, row, num_k, BK, -1)
            valid &= k_id_2 >= 0
            q_ids_2 += wide_b * ids_q_2
        b_k = tl.where(valid[:, None], b_k, 0.0)
        b_v = tl.where(valid[:, None], b_v, 0.0)
    drop_b = i_b
    shift_h = 0
    if dropout_offset is not None:
        drop_b += tl.load(dropout_offset).to(tl.int32)
        shift_h = tl.load(dropout_offset + 1).to(tl.int32)

    table += wide_b * table_b + i_k * 4
    first = tl.load(table)
    full = tl.load(table + 1)
    ragged = tl.load(table + 2)
    last = tl.load(table + 3)
    stride_q = num_heads * D
    stride_o = num_heads * E
    dk = tl.zeros([BK, BD], tl.float32)
    dv = tl.zeros([BK, BE], tl.float32)
    for r in range(GROUP):
        i_h = i_g * GROUP + r
        wide_h = i_h.to(tl.int64)
        h_query = query + (wide_b * num_q * num_heads + wide_h) * D
        h_dout = dout + (wide_b * num_q * num_heads + wide_h) * E
        h_lse = lse + (wide_b * num_heads + wide_h) * num_q
        h_delta = delta + (wide_b * num_heads + wide_h) * num_q
        h_dq = None
        if dq_out is not None:
            h_dq = dq_out + (wide_b * num_q * num_heads + wide_h) * D
        h_dbias = None
        if dbias_out is not None:
            h_dbias = dbias_out + wide_b * dbias_b + wide_h * dbias_h
        h_bias = bias
        if BIAS:
            h_bias = bias + wide_b * bias_b + wide_h * bias_h
        h_mask = mask
        if mask is not None:
            h_mask = mask + wide_b * mask_b + wide_h * mask_h
        slope = 0.0
        if SLOPES:
            slope = tl.load(slopes + i_h).to(tl.float32)
        drop_h = i_h + shift_h
        # 1. the diagonal, the start of a segment
        if HEAD:
            for i in range(first, full):
                dk, dv = _key_step(
                    dk, dv, b_k, b_v, i, h_query, h_dout, h_lse, h_delta, h_dq, h_dbias, h_bias,
                    h_mask, slope, seed, drop_b, drop_h, row, o_k, k_id, k_id_2, k_pos, q_ids,
                    q_ids_2,
                    q_pos, offset, stride_q, stride_o, bias_t, bias_s, mask_t, mask_s, dbias_t,
                    dbias_s, left, right, num_q, num_k, D, E, BD, BE, BQ, BK, SCALE, NATURAL,
                    UNITS, CAP, BIAS, SLOPES, IDS, POSITIONS, LEFT, RIGHT, THRESHOLD, KEPT,
                    PRECISION, SUM_Q, SUM_K, True,
                )  # fmt: skip
        # 2. blocks that need no mask
        for i in range(full, ragged):
            dk, dv = _key_step(
                dk, dv, b_k, b_v, i, h_query, h_dout, h_lse, h_delta, h_dq, h_dbias, h_bias,
                h_mask, slope, seed, drop_b, drop_h, row, o_k, k_id, k_id_2, k_pos, q_ids,
                q_ids_2,
                q_pos, offset, stride_q, stride_o, bias_t, bias_s, mask_t, mask_s, dbias_t,
                dbias_s, left, right, num_q, num_k, D, E, BD, BE, BQ, BK, SCALE, NATURAL,
                UNITS, CAP, BIAS, SLOPES, IDS, POSITIONS, LEFT, RIGHT, THRESHOLD, KEPT,
                PRECISION, SUM_Q, SUM_K, False,
            )  # fmt: skip
        # 3. the end of the window or of a segment, the last block
        if TAIL:
            for i in range(ragged, last):
                dk, dv = _key_step(
                    dk, dv, b_k, b_v, i, h_query, h_dout, h_lse, h_delta, h_dq, h_dbias, h_bias,
                    h_mask, slope, seed, drop_b, drop_h, row, o_k, k_id, k_id_2, k_pos, q_ids,
                    q_ids_2,
                    q_pos, offset, stride_q, stride_o, bias_t, bias_s, mask_t, mask_s, dbias_t,
                    dbias_s, left, right, num_q, num_k, D, E, BD, BE, BQ, BK, SCALE, NATURAL,
                    UNITS, CAP, BIAS, SLOPES, IDS, POSITIONS, LEFT, RIGHT, THRESHOLD, KEPT,
                    PRECISION, SUM_Q, SUM_K, True,
                )  # fmt: skip
    p_dk = addresses.tile_pointers(
        dk_out + (wide_b * num_k * num_groups + i_g) * D, row, num_groups * D, BK, BD
    )
    dk *= SCALE
    tl.store(p_dk, dk.to(dk_out.dtype.element_ty), mask=addresses.tile_mask(row, num_k, BK, D, BD))
    p_dv = addresses.tile_pointers(
        dv_out + (wide_b * num_k * num_groups + i_g) * E, row, num_groups * E, BK, BE
    )
    tl.store(p_dv, dv.to(dv_out.dtype.element_ty), mask=addresses.tile_mask(row, num_k, BK, E, BE))


@triton.jit
def _query_step(
    dq, b_q, b_do, b_lse, b_delta, j, key, value, bias, mask, slope, seed, i_b, i_h, o_q, q_id,
    q_id_2, q_pos, k_ids, k_ids_2, k_pos, stride_k, stride_v, bias_t, bias_s, mask_t, mask_s,
    left, right, num_q, num_k,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, NATURAL: tl.constexpr,
    UNITS: tl.constexpr, CAP: tl.constexpr, BIAS: tl.constexpr, SLOPES: tl.constexpr,
    IDS: tl.constexpr, POSITIONS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    THRESHOLD: tl.constexpr, KEPT: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what block j of the keys gives to dq; tiles are [BQ, BK]."""
    row = j * BK
    o_k = row + tl.arange(0, BK)
    b_k = addresses.load_tile(key, row, stride_k, num_k, BK, D, BD, MASKED)
    b_v = addresses.load_tile(value, row, stride_v, num_k, BK, E, BE, MASKED)
    b_kp = o_k
    if POSITIONS:
        b_kp = addresses.load_row(k_pos, row, num_k, BK, 0)
    seen = o_q[:, None] >= 0
    if MASKED:
        b_ki = o_k
        b_ki_2 = o_k
        if IDS >= 1:
            b_ki = addresses.load_row(k_ids, row, num_k, BK, -1)
            valid = b_ki >= 0
            if IDS >= 2:
                b_ki_2 = addresses.load_row(k_ids_2, row, num_k, BK, -1)
                valid &= b_ki_2 >= 0
            b_k = tl.where(valid[:, None], b_k, 0.0)
            b_v = tl.where(valid[:, None], b_v, 0.0)
        seen = pairs.visible(
            o_q[:, None], o_k[None, :], q_id[:, None], b_ki[None, :], q_id_2[:, None],
            b_ki_2[None, :], q_pos[:, None], b_kp[None, :], left, right, num_q, num_k,
            IDS, LEFT, RIGHT,
        )  # fmt: skip
    if mask is not None:
        given = addresses.load_pairs(
            mask, o_q[:, None], o_k[None, :], mask_t, mask_s, num_q, num_k
        )
        seen &= given != 0
    dots = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BQ, BK]
    x = pairs.logits(
        dots, o_q[:, None], o_k[None, :], q_pos[:, None], b_kp[None, :], bias, bias_t, bias_s,
        slope, num_q, num_k, SCALE, NATURAL, BIAS, SLOPES, CAP,
    )  # fmt: skip
    p = _weights(x, b_lse[:, None], seen, UNITS, MASKED or (mask is not None))
    dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    if THRESHOLD is not None:
        keep = philox.keep(seed, i_b, i_h, o_q, row, BQ, BK, THRESHOLD)
        dp = tl.where(keep, dp * KEPT, 0.0)
    ds = p * (dp - b_delta[:, None])
    if MASKED or (mask is not None):
        ds = tl.where(seen, ds, 0.0)
    if CAP is not None:
        ds *= 1.0 - (x / CAP) * (x / CAP)
    return tl.dot(ds.to(b_k.dtype), b_k, dq, input_precision=PRECISION)


@triton.jit
def flash_attention_bwd_dq_kernel(
    query, key, value, bias, mask, sinks, slopes, seed, dropout_offset,
    q_ids, k_ids, q_ids_2, k_ids_2, q_positions, k_positions, table,
    num_q, num_k, num_heads, offset, left, right,
    bias_b, bias_h, bias_t, bias_s, mask_b, mask_h, mask_t, mask_s,
    ids_q, ids_k, ids_q_2, ids_k_2, pos_q, pos_k, table_b, sinks_h, num_sinks,
    dout, lse, delta,
    dq_out,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr, NATURAL: tl.constexpr, UNITS: tl.constexpr, CAP: tl.constexpr,
    IDS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, THRESHOLD: tl.constexpr,
    KEPT: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, BACKWARDS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(num_q, BQ)
    i_p = tl.program_id(0)
    i_q = i_p % num_blocks
    if BACKWARDS:
        i_q = num_blocks - 1 - i_q
    i_h = (i_p // num_blocks) % num_heads
    i_b = i_p // (num_blocks * num_heads)
    i_g = i_h // GROUP
    num_groups = num_heads // GROUP
    row = i_q * BQ
    o_q = row + tl.arange(0, BQ)
    wide_b = i_b.to(tl.int64)
    wide_h = i_h.to(tl.int64)
    BIAS: tl.constexpr = bias is not None
    SLOPES: tl.constexpr = slopes is not None
    POSITIONS: tl.constexpr = q_positions is not None

    query += (wide_b * num_q * num_heads + wide_h) * D
    dout += (wide_b * num_q * num_heads + wide_h) * E
    key += (wide_b * num_k * num_groups + i_g) * D
    value += (wide_b * num_k * num_groups + i_g) * E
    stride_k = num_groups * D
    stride_v = num_groups * E
    b_q = addresses.load_tile(query, row, num_heads * D, num_q, BQ, D, BD, True)
    b_do = addresses.load_tile(dout, row, num_heads * E, num_q, BQ, E, BE, True)
    rows = (wide_b * num_heads + wide_h) * num_q
    b_lse = softmax.shift(addresses.load_row(lse + rows, row, num_q, BQ, 0.0)) * softmax.LOG2_E
    b_delta = addresses.load_row(delta + rows, row, num_q, BQ, 0.0)
    q_pos = o_q + offset
    k_pos = k_positions
    if POSITIONS:
        q_pos = addresses.load_row(q_positions + wide_b * pos_q, row, num_q, BQ, 0)
        k_pos = k_positions + wide_b * pos_k
    q_id = o_q
    q_id_2 = o_q
    if IDS >= 1:
        q_id = addresses.load_row(q_ids + wide_b * ids_q, row, num_q, BQ, -1)
        k_ids += wide_b * ids_k
    if IDS >= 2:
        q_id_2 = addresses.load_row(q_ids_2 + wide_b * ids_q_2, row, num_q, BQ, -1)
        k_ids_2 += wide_b * ids_k_2
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes + i_h).to(tl.float32)
    if BIAS:
        bias += wide_b * bias_b + wide_h * bias_h
    if mask is not None:
        mask += wide_b * mask_b + wide_h * mask_h
    drop_b = i_b
    drop_h = i_h
    if dropout_offset is not None:
        drop_b += tl.load(dropout_offset).to(tl.int32)
        drop_h += tl.load(dropout_offset + 1).to(tl.int32)

    table += wide_b * table_b + i_q * 4
    first = tl.load(table)
    full = tl.load(table + 1)
    ragged = tl.load(table + 2)
    last = tl.load(table + 3)
    dq = tl.zeros([BQ, BD], tl.float32)
    if HEAD:
        for j in range(first, full):
            dq = _query_step(
                dq, b_q, b_do, b_lse, b_delta, j, key, value, bias, mask, slope, seed, drop_b,
                drop_h, o_q, q_id, q_id_2, q_pos, k_ids, k_ids_2, k_pos, stride_k, stride_v,
                bias_t, bias_s, mask_t, mask_s, left, right, num_q, num_k, D, E, BD, BE, BQ, BK,
                SCALE, NATURAL, UNITS, CAP, BIAS, SLOPES, IDS, POSITIONS, LEFT, RIGHT, THRESHOLD,
                KEPT, PRECISION, True,
            )  # fmt: skip
    for j in range(full, ragged):
        dq = _query_step(
            dq, b_q, b_do, b_lse, b_delta, j, key, value, bias, mask, slope, seed, drop_b,
            drop_h, o_q, q_id, q_id_2, q_pos, k_ids, k_ids_2, k_pos, stride_k, stride_v,
            bias_t, bias_s, mask_t, mask_s, left, right, num_q, num_k, D, E, BD, BE, BQ, BK,
            SCALE, NATURAL, UNITS, CAP, BIAS, SLOPES, IDS, POSITIONS, LEFT, RIGHT, THRESHOLD,
            KEPT, PRECISION, False,
        )  # fmt: skip
    if TAIL:
        for j in range(ragged, last):
            dq = _query_step(
                dq, b_q, b_do, b_lse, b_delta, j, key, value, bias, mask, slope, seed, drop_b,
                drop_h, o_q, q_id, q_id_2, q_pos, k_ids, k_ids_2, k_pos, stride_k, stride_v,
                bias_t, bias_s, mask_t, mask_s, left, right, num_q, num_k, D, E, BD, BE, BQ, BK,
                SCALE, NATURAL, UNITS, CAP, BIAS, SLOPES, IDS, POSITIONS, LEFT, RIGHT, THRESHOLD,
                KEPT, PRECISION, True,
            )  # fmt: skip
    p_dq = addresses.tile_pointers(
        dq_out + (wide_b * num_q * num_heads + wide_h) * D, row, num_heads * D, BQ, BD
    )
    dq *= SCALE
    tl.store(p_dq, dq.to(dq_out.dtype.element_ty), mask=addresses.tile_mask(row, num_q, BQ, D, BD))


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    (lse,) = residuals
    delta = _delta(args, outputs, cotangents)
    dout = cotangents[0].astype(args.query.dtype)
    grads = _over_keys(args, cfg, dout, lse, delta, wanted)
    if args.deterministic:
        grads["query"] = _over_queries(args, cfg, dout, lse, delta)
    if "softmax_aux" in wanted:
        grads["softmax_aux"] = _sink_gradient(args, lse, delta)
    return grads


def _delta(args: Any, outputs: Any, cotangents: Any) -> jax.Array:
    """delta = sum(out * dout) - dlse, float32 [b, h, t]."""
    out, dout = (x.astype(jnp.float32) for x in (outputs[0], cotangents[0]))
    delta = (out * dout).sum(-1).transpose(0, 2, 1)
    # a row that saw no key has output 0 whatever its cotangent is
    delta = jnp.where((outputs[0] == 0).all(axis=-1).transpose(0, 2, 1), 0.0, delta)
    return delta - cotangents[1] if args.return_lse else delta


def _over_keys(args: Any, cfg: Any, dout: Any, lse: Any, delta: Any, wanted: Any) -> dict:
    """dk and dv; dq too unless sums must be ordered; dbias if wanted."""
    batch, s, num_groups, _ = args.key.shape
    made = call.Call(args, cfg)
    table = made.query_table()
    like = lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype)
    dq = None if args.deterministic else like(args.query, jnp.float32)
    dbias, steps = None, [0] * 4
    if "bias" in wanted:
        # ordered sums need every pair apart: dbias is full-sized, and reduced afterwards
        full = (batch, args.query.shape[2], args.query.shape[1], s)
        shape = full if args.deterministic else args.bias.shape
        dbias = jax.ShapeDtypeStruct(shape, jnp.float32)
        steps = call.pair_strides(dbias)
    dk, dv, dq, dbias = triton_call(
        flash_attention_bwd_dkv_kernel,
        args.query,
        args.key,
        args.value,
        *made.inputs(),
        table,
        *made.sizes(table),
        dout,
        lse,
        delta,
        *steps,
        grid=(cdiv(s, cfg.block_k) * num_groups * batch,),
        out_shape=[like(args.key, args.key.dtype), like(args.value, args.value.dtype), dq, dbias],
        zeroed=(2, 3),
        num_warps=cfg.num_warps,
        num_stages=cfg.num_stages,
        SUM_Q=dbias is not None and steps[2] == 0 and dbias.shape[2] == 1,
        SUM_K=dbias is not None and steps[3] == 0 and dbias.shape[3] == 1,
        HEAD=made.query_head,
        TAIL=made.tail,
        **made.constants(),
    )
    grads = {"key": dk, "value": dv}
    if dq is not None:
        grads["query"] = (dq * args.softmax_scale).astype(args.query.dtype)
    if dbias is not None:
        axes = tuple(i for i in range(4) if args.bias.shape[i] != dbias.shape[i])
        grads["bias"] = dbias.sum(axes, keepdims=True).astype(args.bias.dtype)
    return grads


def _over_queries(args: Any, cfg: Any, dout: Any, lse: Any, delta: Any) -> jax.Array:
    """dq, each row summed by one program."""
    batch, t, num_heads, _ = args.query.shape
    turned = config.exchanged(cfg)
    made = call.Call(args, turned)
    table = made.key_table()
    (dq,) = triton_call(
        flash_attention_bwd_dq_kernel,
        args.query,
        args.key,
        args.value,
        *made.inputs(),
        table,
        *made.sizes(table),
        dout,
        lse,
        delta,
        grid=(cdiv(t, turned.block_q) * num_heads * batch,),
        out_shape=[jax.ShapeDtypeStruct(args.query.shape, args.query.dtype)],
        num_warps=turned.num_warps,
        num_stages=turned.num_stages,
        HEAD=made.key_head,
        TAIL=made.tail,
        BACKWARDS=args.sliding_window[1] is not None,
        **made.constants(),
    )
    return dq


def _sink_gradient(args: Any, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """d/dsink = -sum over rows of exp(sink - lse) * delta."""
    sinks = args.softmax_aux.astype(jnp.float32)
    finite = jnp.where(lse == -jnp.inf, 0.0, lse)
    weights = jnp.exp(sinks[None, :, None, :] - finite[..., None])  # [b, h, t, n]
    grad = -(weights * delta[..., None]).sum(axis=(0, 2))  # [h, n]
    grad = grad.sum(axis=0, keepdims=True) if sinks.shape[0] == 1 else grad
    return grad.astype(args.softmax_aux.dtype)
