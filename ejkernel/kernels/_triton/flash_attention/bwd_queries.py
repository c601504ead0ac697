"""Attention backward over queries: a program holds a block of queries and gives its dq.

A hidden pair has weight 0, but 0 * nan is nan. Blocks whose result is not finite are flagged, and a
second launch does them again, wary of what nobody should see. So are, in half precision, blocks
with a logsumexp for which weights have to be exact.
"""

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import addresses, pairs, philox, softmax
from ejkernel.kernels._triton._blocks import table as blocks
from ejkernel.kernels._triton.flash_attention import call


@triton.jit
def _query_step(
    acc, b_q, b_do, b_lse, b_delta, j, masked, key, value, bias, mask, slope, seed, i_b, i_h, o_q,
    q_id, q_id_2, q_pos, k_ids, k_ids_2, k_pos, stride_k, stride_v, bias_t, bias_s, mask_t, mask_s,
    left, right, num_q, num_k,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, SCALE: tl.constexpr, NATURAL: tl.constexpr, UNITS: tl.constexpr,
    SHIFT: tl.constexpr, CAP: tl.constexpr, BIAS: tl.constexpr, SLOPES: tl.constexpr,
    IDS: tl.constexpr, POSITIONS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    THRESHOLD: tl.constexpr, KEPT: tl.constexpr, PRECISION: tl.constexpr, CHECKED: tl.constexpr,
    CUT: tl.constexpr, MASKS: tl.constexpr, WARY: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Adds what block j of the keys gives to dq in `acc`; tiles are [BQ, BK]."""
    row = j * BK
    o_k = row + tl.arange(0, BK)
    b_k = addresses.load_tile(key, row, stride_k, num_k, BK, D, BD, CHECKED)
    b_v = addresses.load_tile(value, row, stride_v, num_k, BK, E, BE, CHECKED)
    b_kp = o_k
    if POSITIONS:
        b_kp = addresses.load_row(k_pos, row, num_k, BK, 0)
    dots = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BQ, BK]
    OFFSETS: tl.constexpr = BIAS or SLOPES
    x, capped = pairs.logits(
        dots, o_q[:, None], o_k[None, :], q_pos[:, None], b_kp[None, :], bias, bias_t, bias_s,
        slope, num_q, num_k, SCALE, NATURAL, BIAS, SLOPES, CAP, SHIFT == 0.0, not POSITIONS,
    )  # fmt: skip
    if not WARY:  # before exp2, a branch does not cut the flow of products
        x = pairs.hide(
            x, float("-inf") if CAP is None or OFFSETS else pairs.DEEP, masked, row, mask, o_q[:, None],
            o_k[None, :], q_pos[:, None], b_kp[None, :], q_id, q_id_2, k_ids, k_ids_2, mask_t,
            mask_s, left, right, num_q, num_k, num_k, BK, IDS, LEFT, RIGHT, CUT, MASKS,
            not POSITIONS,
        )  # fmt: skip
    if not OFFSETS:
        capped = x
    p = softmax.weights(x, b_lse[:, None], UNITS, SHIFT, EXACT)
    if WARY:
        p = pairs.hide(
            p, 0.0, masked, row, mask, o_q[:, None], o_k[None, :], q_pos[:, None], b_kp[None, :],
            q_id, q_id_2, k_ids, k_ids_2, mask_t, mask_s, left, right, num_q, num_k, num_k, BK,
            IDS, LEFT, RIGHT, CUT, MASKS, not POSITIONS,
        )  # fmt: skip
    dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    if THRESHOLD is not None:
        keep = philox.keep(seed, i_b, i_h, o_q, row, BQ, BK, THRESHOLD)
        dp = tl.where(keep, dp * KEPT, 0.0)
    ds = p * (dp - b_delta[:, None])
    if CAP is not None:
        ds *= pairs.cap_slope(capped, CAP, SHIFT == 0.0)
    if WARY:  # p is 0, but the rest may be nan
        ds = tl.where(p == 0.0, 0.0, ds)
        b_k = addresses.finite(b_k)
    return tl.dot(ds.to(b_k.dtype), b_k, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=call.LOOSE)
def flash_attention_bwd_dq_kernel(
    query, key, value, bias, mask, sinks, slopes, seed, dropout_offset, q_ids, k_ids, q_ids_2,
    k_ids_2, q_positions, k_positions, table, num_q, num_k, offset, left, right, bias_b, bias_h,
    bias_t, bias_s, mask_b, mask_h, mask_t, mask_s, ids_q, ids_k, ids_q_2, ids_k_2, pos_q, pos_k,
    table_b, sinks_h, num_sinks, span, dout, lse, delta, flags, num_flags, flag_rows, dq,
    dq_out, flags_out,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    NATURAL: tl.constexpr, UNITS: tl.constexpr, SHIFT: tl.constexpr, CAP: tl.constexpr,
    IDS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, THRESHOLD: tl.constexpr,
    KEPT: tl.constexpr, CHECKED: tl.constexpr, CUT: tl.constexpr, MASKS: tl.constexpr,
    BACKWARDS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(num_q, BQ)
    i_p = tl.program_id(0)
    i_q, line = blocks.order(i_p, num_blocks, span)
    if BACKWARDS:
        i_q = num_blocks - 1 - i_q
    i_h = line % HEADS
    i_b = line // HEADS
    i_g = i_h // GROUP
    GROUPS: tl.constexpr = HEADS // GROUP
    row = i_q * BQ
    AGAIN: tl.constexpr = flags is not None
    if AGAIN:
        if tl.load(flags + line * num_flags + row // flag_rows) == 0:
            return
    o_q = row + tl.arange(0, BQ)
    wide_b = i_b.to(tl.int64)
    wide_h = i_h.to(tl.int64)
    BIAS: tl.constexpr = bias is not None
    SLOPES: tl.constexpr = slopes is not None
    POSITIONS: tl.constexpr = q_positions is not None

    query += (wide_b * num_q * HEADS + wide_h) * D
    dout += (wide_b * num_q * HEADS + wide_h) * E
    key += (wide_b * num_k * GROUPS + i_g) * D
    value += (wide_b * num_k * GROUPS + i_g) * E
    STRIDE_K: tl.constexpr = GROUPS * D
    STRIDE_V: tl.constexpr = GROUPS * E
    b_q = addresses.load_tile(query, row, HEADS * D, num_q, BQ, D, BD, True)
    b_do = addresses.load_tile(dout, row, HEADS * E, num_q, BQ, E, BE, True)
    rows = (wide_b * HEADS + wide_h) * num_q
    b_lse = addresses.load_row(lse + rows, row, num_q, BQ, 0.0)
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

    if table is not None:
        table += wide_b * table_b
    first, full, ragged, last = blocks.row(
        table, i_q, num_q, num_k, offset, left, right, BQ, BK, LEFT, RIGHT
    )
    if AGAIN:
        first, full, ragged, last = 0, 0, 0, tl.cdiv(num_k, BK)
    acc = tl.zeros([BQ, BD], tl.float32)
    for j in range(first, last):
        acc = _query_step(
            acc, b_q, b_do, b_lse, b_delta, j, (j < full) | (j >= ragged), key, value, bias, mask,
            slope, seed, drop_b, drop_h, o_q, q_id, q_id_2, q_pos, k_ids, k_ids_2, k_pos, STRIDE_K,
            STRIDE_V, bias_t, bias_s, mask_t, mask_s, left, right, num_q, num_k, D, E, BD, BE, BQ,
            BK, SCALE, NATURAL, UNITS, SHIFT, CAP, BIAS, SLOPES, IDS, POSITIONS, LEFT, RIGHT,
            THRESHOLD, KEPT, PRECISION, CHECKED, CUT, MASKS, AGAIN, EXACT or AGAIN,
        )  # fmt: skip
    if flags_out is not None:
        odd = addresses.any_odd(acc)
        if not EXACT:
            odd |= tl.max(softmax.size(b_lse), 0) > softmax.LARGE
        tl.store(flags_out + line * num_blocks + i_q, odd.to(tl.int32))
    p_dq = addresses.tile_pointers(
        dq_out + (wide_b * num_q * HEADS + wide_h) * D, row, HEADS * D, BQ, BD
    )
    acc *= SCALE
    tl.store(p_dq, acc.to(dq_out.dtype.element_ty), mask=addresses.tile_mask(row, num_q, BQ, D, BD))
