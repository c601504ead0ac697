"""Attention backward over keys: a program holds a block of keys and gives its dk and dv.

As over queries, blocks whose result is not finite, or whose weights are not exact enough, are
flagged and done again.
"""

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import addresses, pairs, philox, softmax
from ejkernel.kernels._triton._blocks import table as blocks
from ejkernel.kernels._triton.flash_attention import call


@triton.jit
def _key_step(
    acc_k, acc_v, far, b_k, b_v, i, masked, query, dout, lse, delta, dbias, bias, mask, slope, seed, i_b,
    i_h, k_row, o_k, k_id, k_id_2, k_pos, q_ids, q_ids_2, q_pos, offset, stride_q, stride_o, bias_t,
    bias_s, mask_t, mask_s, dbias_t, dbias_s, left, right, num_q, num_k,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, SCALE: tl.constexpr, NATURAL: tl.constexpr, UNITS: tl.constexpr,
    SHIFT: tl.constexpr, CAP: tl.constexpr, BIAS: tl.constexpr, SLOPES: tl.constexpr,
    IDS: tl.constexpr, POSITIONS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    THRESHOLD: tl.constexpr, KEPT: tl.constexpr, PRECISION: tl.constexpr, SUM_Q: tl.constexpr,
    SUM_K: tl.constexpr, CHECKED: tl.constexpr, CUT: tl.constexpr, MASKS: tl.constexpr,
    WARY: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Adds what block i of the queries gives to dk and dv; tiles are [BK, BQ].

    `far` is the largest logsumexp that was met, if weights are not EXACT.
    """
    row = i * BQ
    o_q = row + tl.arange(0, BQ)
    b_q = addresses.load_tile(query, row, stride_q, num_q, BQ, D, BD, CHECKED)
    b_do = addresses.load_tile(dout, row, stride_o, num_q, BQ, E, BE, CHECKED)
    b_qp = o_q + offset
    if POSITIONS:
        b_qp = addresses.load_row(q_pos, row, num_q, BQ, 0)
    dots = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BK, BQ]
    OFFSETS: tl.constexpr = BIAS or SLOPES
    x, capped = pairs.logits(
        dots, o_q[None, :], o_k[:, None], b_qp[None, :], k_pos[:, None], bias, bias_t, bias_s,
        slope, num_q, num_k, SCALE, NATURAL, BIAS, SLOPES, CAP, SHIFT == 0.0, not POSITIONS,
    )  # fmt: skip
    GUARDED: tl.constexpr = WARY or (dbias is not None)
    if not GUARDED:  # before exp2, a branch does not cut the flow of products
        x = pairs.hide(
            x, float("-inf") if CAP is None or OFFSETS else pairs.DEEP, masked, row, mask, o_q[None, :],
            o_k[:, None], b_qp[None, :], k_pos[:, None], k_id, k_id_2, q_ids, q_ids_2, mask_t,
            mask_s, left, right, num_q, num_k, num_q, BQ, IDS, LEFT, RIGHT, CUT, MASKS,
            not POSITIONS,
        )  # fmt: skip
    if not OFFSETS:
        capped = x
    b_lse = addresses.load_row(lse, row, num_q, BQ, 0.0)
    if not EXACT:
        far = tl.maximum(far, softmax.size(b_lse))
    p = softmax.weights(x, b_lse[None, :], UNITS, SHIFT, EXACT)
    if WARY:  # a cotangent that is not finite marks the keys that its query sees
        p = tl.where(addresses.spoiled(b_do)[None, :], float("nan"), p)
    if GUARDED:
        p = pairs.hide(
            p, 0.0, masked, row, mask, o_q[None, :], o_k[:, None], b_qp[None, :], k_pos[:, None],
            k_id, k_id_2, q_ids, q_ids_2, mask_t, mask_s, left, right, num_q, num_k, num_q, BQ,
            IDS, LEFT, RIGHT, CUT, MASKS, not POSITIONS,
        )  # fmt: skip
    dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)  # [BK, BQ]
    if WARY:
        b_q = addresses.finite(b_q)
        b_do = addresses.finite(b_do)
    kept = p
    if THRESHOLD is not None:
        keep = tl.trans(philox.keep(seed, i_b, i_h, o_q, k_row, BQ, BK, THRESHOLD))
        kept = tl.where(keep, p * KEPT, 0.0)
        dp = tl.where(keep, dp * KEPT, 0.0)
    acc_v = tl.dot(kept.to(b_do.dtype), b_do, acc_v, input_precision=PRECISION)
    b_delta = addresses.load_row(delta, row, num_q, BQ, 0.0)
    ds = p * (dp - b_delta[None, :])
    if dbias is not None:  # added after the cap; p may be 0, and the rest nan
        added = tl.where(p == 0.0, 0.0, ds)
        _add_bias(dbias, added, o_q, o_k, dbias_t, dbias_s, num_q, num_k, SUM_Q, SUM_K)
    if CAP is not None:
        ds *= pairs.cap_slope(capped, CAP, SHIFT == 0.0)
    if GUARDED:
        ds = tl.where(p == 0.0, 0.0, ds)
    narrow = ds.to(b_q.dtype)
    acc_k = tl.dot(narrow, b_q, acc_k, input_precision=PRECISION)
    return acc_k, acc_v, far


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


@triton.jit(do_not_specialize=call.LOOSE)
def flash_attention_bwd_dkv_kernel(
    query, key, value, bias, mask, sinks, slopes, seed, dropout_offset, q_ids, k_ids, q_ids_2,
    k_ids_2, q_positions, k_positions, table, num_q, num_k, offset, left, right, bias_b, bias_h,
    bias_t, bias_s, mask_b, mask_h, mask_t, mask_s, ids_q, ids_k, ids_q_2, ids_k_2, pos_q, pos_k,
    table_b, sinks_h, num_sinks, span, dout, lse, delta, dbias_b, dbias_h, dbias_t, dbias_s, flags,
    num_flags, flag_rows, dk, dv, dk_out, dv_out, dbias_out, flags_out,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    NATURAL: tl.constexpr, UNITS: tl.constexpr, SHIFT: tl.constexpr, CAP: tl.constexpr,
    IDS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, THRESHOLD: tl.constexpr,
    KEPT: tl.constexpr, CHECKED: tl.constexpr, CUT: tl.constexpr, MASKS: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr, SUM_Q: tl.constexpr, SUM_K: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(num_k, BK)
    GROUPS: tl.constexpr = HEADS // GROUP
    i_p = tl.program_id(0)
    # causal: the first keys are seen by most queries, and start first
    i_k, line = blocks.order(i_p, num_blocks, span)
    i_g = line % GROUPS
    i_b = line // GROUPS
    row = i_k * BK
    AGAIN: tl.constexpr = flags is not None
    if AGAIN:
        if tl.load(flags + line * num_flags + row // flag_rows) == 0:
            return
    o_k = row + tl.arange(0, BK)
    wide_b = i_b.to(tl.int64)
    BIAS: tl.constexpr = bias is not None
    SLOPES: tl.constexpr = slopes is not None
    POSITIONS: tl.constexpr = q_positions is not None

    key += (wide_b * num_k * GROUPS + i_g) * D
    value += (wide_b * num_k * GROUPS + i_g) * E
    b_k = addresses.load_tile(key, row, GROUPS * D, num_k, BK, D, BD, True)
    b_v = addresses.load_tile(value, row, GROUPS * E, num_k, BK, E, BE, True)
    k_pos = o_k
    q_pos = q_positions
    if POSITIONS:
        k_pos = addresses.load_row(k_positions + wide_b * pos_k, row, num_k, BK, 0)
        q_pos = q_positions + wide_b * pos_q
    k_id = o_k
    k_id_2 = o_k
    if IDS >= 1:
        k_id = addresses.load_row(k_ids + wide_b * ids_k, row, num_k, BK, -1)
        q_ids += wide_b * ids_q
    if IDS >= 2:
        k_id_2 = addresses.load_row(k_ids_2 + wide_b * ids_k_2, row, num_k, BK, -1)
        q_ids_2 += wide_b * ids_q_2
    drop_b = i_b
    shift_h = 0
    if dropout_offset is not None:
        drop_b += tl.load(dropout_offset).to(tl.int32)
        shift_h = tl.load(dropout_offset + 1).to(tl.int32)

    if table is not None:
        table += wide_b * table_b
    first, full, ragged, last = blocks.row(
        table, i_k, num_k, num_q, -offset, right, left, BK, BQ, RIGHT, LEFT
    )
    if AGAIN:
        first, full, ragged, last = 0, 0, 0, tl.cdiv(num_q, BQ)
    STRIDE_Q: tl.constexpr = HEADS * D
    STRIDE_O: tl.constexpr = HEADS * E
    acc_k = tl.zeros([BK, BD], tl.float32)
    acc_v = tl.zeros([BK, BE], tl.float32)
    far = tl.zeros([BQ], tl.float32)
    for r in range(GROUP):
        i_h = i_g * GROUP + r
        wide_h = i_h.to(tl.int64)
        h_query = query + (wide_b * num_q * HEADS + wide_h) * D
        h_dout = dout + (wide_b * num_q * HEADS + wide_h) * E
        h_lse = lse + (wide_b * HEADS + wide_h) * num_q
        h_delta = delta + (wide_b * HEADS + wide_h) * num_q
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
        for i in range(first, last):
            acc_k, acc_v, far = _key_step(
                acc_k, acc_v, far, b_k, b_v, i, (i < full) | (i >= ragged), h_query, h_dout, h_lse,
                h_delta, h_dbias, h_bias, h_mask, slope, seed, drop_b, drop_h, row, o_k, k_id,
                k_id_2, k_pos, q_ids, q_ids_2, q_pos, offset, STRIDE_Q, STRIDE_O, bias_t, bias_s,
                mask_t, mask_s, dbias_t, dbias_s, left, right, num_q, num_k, D, E, BD, BE, BQ, BK,
                SCALE, NATURAL, UNITS, SHIFT, CAP, BIAS, SLOPES, IDS, POSITIONS, LEFT, RIGHT,
                THRESHOLD, KEPT, PRECISION, SUM_Q, SUM_K, CHECKED, CUT, MASKS, AGAIN,
                EXACT or AGAIN,
            )  # fmt: skip
    if flags_out is not None:
        odd = addresses.any_odd(acc_k) | addresses.any_odd(acc_v)
        if not EXACT:
            odd |= tl.max(far, 0) > softmax.LARGE
        tl.store(flags_out + line * num_blocks + i_k, odd.to(tl.int32))
    p_dk = addresses.tile_pointers(
        dk_out + (wide_b * num_k * GROUPS + i_g) * D, row, GROUPS * D, BK, BD
    )
    acc_k *= SCALE
    tl.store(
        p_dk, acc_k.to(dk_out.dtype.element_ty), mask=addresses.tile_mask(row, num_k, BK, D, BD)
    )
    p_dv = addresses.tile_pointers(
        dv_out + (wide_b * num_k * GROUPS + i_g) * E, row, GROUPS * E, BK, BE
    )
    tl.store(
        p_dv, acc_v.to(dv_out.dtype.element_ty), mask=addresses.tile_mask(row, num_k, BK, E, BE)
    )
