"""Attention backward over queries: a program holds a block of queries and gives its dq.

A hidden pair has weight 0, but 0 * nan is nan. Blocks whose result is not finite are flagged, and a
second launch does them again, wary of what nobody should see. So are, in half precision, blocks
with a logsumexp for which weights have to be exact.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import addresses, block_ranges, logits, philox, softmax
from ejkernel.kernels._triton._blocks import mask as masks
from ejkernel.kernels._triton.flash_attention import call


class Block(NamedTuple):
    """The queries that a program holds, and what backward knows of them."""

    at: Any
    b_q: Any
    b_do: Any
    b_lse: Any
    b_delta: Any
    o_q: Any
    q_pos: Any
    ids: Any
    more_ids: Any
    slope: Any
    drop_b: Any
    drop_h: Any


class Mode(NamedTuple):
    WARY: tl.constexpr
    EXACT: tl.constexpr
    CHECKED: tl.constexpr


@triton.jit
def _query_step(
    acc, j, masked, k_rows, v_rows, block, attention, BQ: tl.constexpr, BK: tl.constexpr, MODE
):  # fmt: skip
    """Adds what block j of the keys gives to dq in `acc`; tiles are [BQ, BK]."""
    WARY: tl.constexpr = MODE.WARY
    row = j * BK
    o_k = row + tl.arange(0, BK)
    b_k = addresses.load_tile(k_rows, row, BK, MODE.CHECKED)
    b_v = addresses.load_tile(v_rows, row, BK, MODE.CHECKED)
    k_pos = masks.load_positions(attention.keys, block.at.batch, row, attention.num_k, 0, BK)
    tile = masks.Tile(block.o_q[:, None], o_k[None, :], block.q_pos[:, None], k_pos[None, :])
    dots = tl.dot(block.b_q, tl.trans(b_k), input_precision=attention.PRECISION)  # [BQ, BK]
    OFFSETS: tl.constexpr = (attention.scores.bias is not None) or (
        attention.scores.slopes is not None
    )
    x, capped = logits.logits(
        dots,
        tile,
        block.at,
        block.slope,
        attention.scores,
        attention.num_q,
        attention.num_k,
        attention.keys.positions is None,
    )
    if not WARY:  # before exp2, a branch does not cut the flow of products
        x = masks.hide(
            x, float("-inf") if attention.scores.CAP is None or OFFSETS else logits.DEEP, masked, tile,
            block.at, row, block.ids, block.more_ids, attention.keys, attention.num_k, attention.mask,
            attention.num_q, attention.num_k, BK,
        )  # fmt: skip
    if not OFFSETS:
        capped = x
    p = softmax.weights(
        x, block.b_lse[:, None], attention.scores.UNITS, attention.scores.SHIFT, MODE.EXACT
    )
    if WARY:
        p = masks.hide(
            p, 0.0, masked, tile, block.at, row, block.ids, block.more_ids, attention.keys,
            attention.num_k, attention.mask, attention.num_q, attention.num_k, BK,
        )  # fmt: skip
    dp = tl.dot(block.b_do, tl.trans(b_v), input_precision=attention.PRECISION)
    if attention.dropout is not None:
        keep = philox.keep(attention.dropout, block.drop_b, block.drop_h, block.o_q, row, BQ, BK)
        dp = tl.where(keep, dp * attention.dropout.FACTOR, 0.0)
    ds = p * (dp - block.b_delta[:, None])
    if attention.scores.CAP is not None:
        ds *= logits.cap_slope(capped, attention.scores.CAP, attention.scores.SHIFT == 0.0)
    if WARY:  # p is 0, but the rest may be nan
        ds = tl.where(p == 0.0, 0.0, ds)
        b_k = addresses.finite(b_k)
    return tl.dot(ds.to(b_k.dtype), b_k, acc, input_precision=attention.PRECISION)


@triton.jit(do_not_specialize=(*call.LOOSE, "num_flags", "flag_rows"))
def flash_attention_bwd_dq_kernel(
    query, key, value, attention, schedule, dout, lse, delta, flags, num_flags, flag_rows, dq,
    dq_out, flags_out,
    BQ: tl.constexpr, BK: tl.constexpr, CHECKED: tl.constexpr, BACKWARDS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(attention.num_q, BQ)
    i_p = tl.program_id(0)
    i_q, batch_head = block_ranges.order(i_p, num_blocks, schedule.interleaved)
    if BACKWARDS:
        i_q = num_blocks - 1 - i_q
    i_h = batch_head % attention.HEADS
    i_b = batch_head // attention.HEADS
    i_g = i_h // attention.GROUP
    GROUPS: tl.constexpr = attention.HEADS // attention.GROUP
    row = i_q * BQ
    AGAIN: tl.constexpr = flags is not None
    if AGAIN:
        if tl.load(flags + batch_head * num_flags + row // flag_rows) == 0:
            return
    o_q = row + tl.arange(0, BQ)
    wide_b = i_b.to(tl.int64)
    wide_h = i_h.to(tl.int64)

    head = wide_b * attention.num_q * attention.HEADS + wide_h
    key_head = wide_b * attention.num_k * GROUPS + i_g
    b_q = addresses.load_tile(
        addresses.Rows(
            query + head * attention.D,
            attention.HEADS * attention.D,
            attention.num_q,
            attention.D,
            attention.BD,
        ),
        row,
        BQ,
        True,
    )
    b_do = addresses.load_tile(
        addresses.Rows(
            dout + head * attention.E,
            attention.HEADS * attention.E,
            attention.num_q,
            attention.E,
            attention.BE,
        ),
        row,
        BQ,
        True,
    )
    of_head = (wide_b * attention.HEADS + wide_h) * attention.num_q
    b_lse = addresses.load_row(lse + of_head, row, attention.num_q, BQ, 0.0)
    b_delta = addresses.load_row(delta + of_head, row, attention.num_q, BQ, 0.0)
    tokens = attention.queries
    window = attention.mask.window
    q_pos = masks.load_positions(tokens, wide_b, row, attention.num_q, window.offset, BQ)
    q_id = masks.load_ids(tokens.ids, tokens.ids_step, wide_b, row, attention.num_q, BQ)
    q_id_2 = masks.load_ids(tokens.more_ids, tokens.more_ids_step, wide_b, row, attention.num_q, BQ)
    slope = 0.0
    if attention.scores.slopes is not None:
        slope = tl.load(attention.scores.slopes + i_h).to(tl.float32)
    drop_b, drop_h = philox.indices(attention.dropout, i_b, i_h)
    at = addresses.Place(wide_b, wide_h)
    block = Block(at, b_q, b_do, b_lse, b_delta, o_q, q_pos, q_id, q_id_2, slope, drop_b, drop_h)

    first, full, ragged, last = block_ranges.bounds(
        schedule, wide_b, i_q, attention.num_q, attention.num_k, window.offset, window.left, window.right,
        BQ, BK,
    )  # fmt: skip
    if AGAIN:
        first, full, ragged, last = 0, 0, 0, tl.cdiv(attention.num_k, BK)
    acc = tl.zeros([BQ, attention.BD], tl.float32)
    for j in range(first, last):
        masked = (j < full) | (j >= ragged)
        acc = _query_step(
            acc,
            j,
            masked,
            addresses.Rows(
                key + key_head * attention.D,
                GROUPS * attention.D,
                attention.num_k,
                attention.D,
                attention.BD,
            ),
            addresses.Rows(
                value + key_head * attention.E,
                GROUPS * attention.E,
                attention.num_k,
                attention.E,
                attention.BE,
            ),
            block,
            attention,
            BQ,
            BK,
            Mode(AGAIN, EXACT or AGAIN, CHECKED),
        )
    if flags_out is not None:
        odd = addresses.any_odd(acc)
        if not EXACT:
            odd |= tl.max(softmax.size(b_lse), 0) > softmax.LARGE
        tl.store(flags_out + batch_head * num_blocks + i_q, odd.to(tl.int32))
    acc *= attention.scores.SCALE
    addresses.store_tile(
        addresses.Rows(
            dq_out + head * attention.D,
            attention.HEADS * attention.D,
            attention.num_q,
            attention.D,
            attention.BD,
        ),
        row,
        acc,
        BQ,
    )
