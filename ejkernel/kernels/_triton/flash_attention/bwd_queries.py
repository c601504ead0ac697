"""Attention backward over queries: a program holds a block of queries and gives its dq."""

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import addresses, pairs, philox, softmax
from ejkernel.kernels._triton.flash_attention import call


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
    WARY: tl.constexpr,
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
        if IDS >= 2:
            b_ki_2 = addresses.load_row(k_ids_2, row, num_k, BK, -1)
        seen = pairs.visible(
            o_q[:, None], o_k[None, :], q_id[:, None], b_ki[None, :], q_id_2[:, None],
            b_ki_2[None, :], q_pos[:, None], b_kp[None, :], left, right, num_q, num_k,
            IDS, LEFT, RIGHT,
        )  # fmt: skip
    if mask is not None:
        given = addresses.load_pairs(mask, o_q[:, None], o_k[None, :], mask_t, mask_s, num_q, num_k)
        seen &= given != 0
    dots = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BQ, BK]
    x = pairs.logits(
        dots, o_q[:, None], o_k[None, :], q_pos[:, None], b_kp[None, :], bias, bias_t, bias_s,
        slope, num_q, num_k, SCALE, NATURAL, BIAS, SLOPES, CAP, b_k.dtype == tl.float32,
    )  # fmt: skip
    p = softmax.weights(x, b_lse[:, None], seen, UNITS, MASKED or (mask is not None))
    dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    if THRESHOLD is not None:
        keep = philox.keep(seed, i_b, i_h, o_q, row, BQ, BK, THRESHOLD)
        dp = tl.where(keep, dp * KEPT, 0.0)
    ds = p * (dp - b_delta[:, None])
    if CAP is not None:
        y = x * (1.0 / CAP)
        ds *= 1.0 - y * y
    if MASKED or (mask is not None):  # p is 0, but the rest may be nan
        ds = tl.where(seen, ds, 0.0)
    if WARY:  # see forward
        b_k = addresses.finite(b_k)
    return tl.dot(ds.to(b_k.dtype), b_k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=call.LOOSE)
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
                KEPT, PRECISION, True, False,
            )  # fmt: skip
    for j in range(full, ragged):
        dq = _query_step(
            dq, b_q, b_do, b_lse, b_delta, j, key, value, bias, mask, slope, seed, drop_b,
            drop_h, o_q, q_id, q_id_2, q_pos, k_ids, k_ids_2, k_pos, stride_k, stride_v,
            bias_t, bias_s, mask_t, mask_s, left, right, num_q, num_k, D, E, BD, BE, BQ, BK,
            SCALE, NATURAL, UNITS, CAP, BIAS, SLOPES, IDS, POSITIONS, LEFT, RIGHT, THRESHOLD,
            KEPT, PRECISION, False, False,
        )  # fmt: skip
    if TAIL:
        for j in range(ragged, last):
            dq = _query_step(
                dq, b_q, b_do, b_lse, b_delta, j, key, value, bias, mask, slope, seed, drop_b,
                drop_h, o_q, q_id, q_id_2, q_pos, k_ids, k_ids_2, k_pos, stride_k, stride_v,
                bias_t, bias_s, mask_t, mask_s, left, right, num_q, num_k, D, E, BD, BE, BQ, BK,
                SCALE, NATURAL, UNITS, CAP, BIAS, SLOPES, IDS, POSITIONS, LEFT, RIGHT, THRESHOLD,
                KEPT, PRECISION, True, False,
            )  # fmt: skip
    if LEFT or RIGHT or (IDS >= 1) or (mask is not None):
        if addresses.any_nan(dq):
            dq = tl.zeros([BQ, BD], tl.float32)
            PART: tl.constexpr = min(BK, 32)  # see forward
            for j in tl.range(first * (BK // PART), last * (BK // PART), num_stages=1):
                dq = _query_step(
                    dq, b_q, b_do, b_lse, b_delta, j, key, value, bias, mask, slope, seed, drop_b,
                    drop_h, o_q, q_id, q_id_2, q_pos, k_ids, k_ids_2, k_pos, stride_k, stride_v,
                    bias_t, bias_s, mask_t, mask_s, left, right, num_q, num_k, D, E, BD, BE, BQ,
                    PART, SCALE, NATURAL, UNITS, CAP, BIAS, SLOPES, IDS, POSITIONS, LEFT, RIGHT,
                    THRESHOLD, KEPT, PRECISION, True, True,
                )  # fmt: skip
    p_dq = addresses.tile_pointers(
        dq_out + (wide_b * num_q * num_heads + wide_h) * D, row, num_heads * D, BQ, BD
    )
    dq *= SCALE
    tl.store(p_dq, dq.to(dq_out.dtype.element_ty), mask=addresses.tile_mask(row, num_q, BQ, D, BD))
