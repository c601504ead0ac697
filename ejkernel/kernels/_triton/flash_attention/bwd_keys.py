"""Attention backward over keys: a program holds a block of keys and gives its dk and dv.

As over queries, blocks whose result is not finite, or whose weights are not exact enough, are
flagged and done again.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import addresses, block_ranges, logits, philox, softmax
from ejkernel.kernels._triton._blocks import mask as masks
from ejkernel.kernels._triton.flash_attention import call


class Block(NamedTuple):
    """The keys that a program holds."""

    row: Any
    o_k: Any
    k_pos: Any
    ids: Any
    more_ids: Any


class Head(NamedTuple):
    """One query head, and what backward knows of its rows."""

    at: Any
    lse: Any
    delta: Any
    dbias: Any
    slope: Any
    drop_b: Any
    drop_h: Any


@triton.jit
def _key_step(
    acc_k, acc_v, far, b_k, b_v, i, masked, queries, douts, rows, block, attention, dbias, BQ: tl.constexpr,
    BK: tl.constexpr, MODE,
):  # fmt: skip
    """Adds what block i of the queries gives to dk and dv; tiles are [BK, BQ].

    `far` is the largest logsumexp that was met, if weights are not EXACT.
    """
    WARY: tl.constexpr = MODE.WARY
    row = i * BQ
    o_q = row + tl.arange(0, BQ)
    b_q = addresses.load_tile(queries, row, BQ, MODE.CHECKED)
    b_do = addresses.load_tile(douts, row, BQ, MODE.CHECKED)
    q_pos = masks.load_positions(
        attention.queries, rows.at.batch, row, attention.num_q, attention.mask.window.offset, BQ
    )
    tile = masks.Tile(o_q[None, :], block.o_k[:, None], q_pos[None, :], block.k_pos[:, None])
    dots = tl.dot(b_k, tl.trans(b_q), input_precision=attention.PRECISION)  # [BK, BQ]
    OFFSETS: tl.constexpr = (attention.scores.bias is not None) or (
        attention.scores.slopes is not None
    )
    x, capped = logits.logits(
        dots,
        tile,
        rows.at,
        rows.slope,
        attention.scores,
        attention.num_q,
        attention.num_k,
        attention.queries.positions is None,
    )
    GUARDED: tl.constexpr = WARY or (rows.dbias is not None)
    if not GUARDED:  # before exp2, a branch does not cut the flow of products
        x = masks.hide(
            x, float("-inf") if attention.scores.CAP is None or OFFSETS else logits.DEEP, masked, tile,
            rows.at, row, block.ids, block.more_ids, attention.queries, attention.num_q, attention.mask,
            attention.num_q, attention.num_k, BQ,
        )  # fmt: skip
    if not OFFSETS:
        capped = x
    b_lse = addresses.load_row(rows.lse, row, attention.num_q, BQ, 0.0)
    if not MODE.EXACT:
        far = tl.maximum(far, softmax.size(b_lse))
    p = softmax.weights(
        x, b_lse[None, :], attention.scores.UNITS, attention.scores.SHIFT, MODE.EXACT
    )
    if WARY:  # a cotangent that is not finite marks the keys that its query sees
        p = tl.where(addresses.spoiled(b_do)[None, :], float("nan"), p)
    if GUARDED:
        p = masks.hide(
            p, 0.0, masked, tile, rows.at, row, block.ids, block.more_ids, attention.queries,
            attention.num_q, attention.mask, attention.num_q, attention.num_k, BQ,
        )  # fmt: skip
    dp = tl.dot(b_v, tl.trans(b_do), input_precision=attention.PRECISION)  # [BK, BQ]
    if WARY:
        b_q = addresses.finite(b_q)
        b_do = addresses.finite(b_do)
    kept = p
    if attention.dropout is not None:
        keep = tl.trans(
            philox.keep(attention.dropout, rows.drop_b, rows.drop_h, o_q, block.row, BQ, BK)
        )
        kept = tl.where(keep, p * attention.dropout.FACTOR, 0.0)
        dp = tl.where(keep, dp * attention.dropout.FACTOR, 0.0)
    acc_v = tl.dot(kept.to(b_do.dtype), b_do, acc_v, input_precision=attention.PRECISION)
    b_delta = addresses.load_row(rows.delta, row, attention.num_q, BQ, 0.0)
    ds = p * (dp - b_delta[None, :])
    if rows.dbias is not None:  # added after the cap; p may be 0, and the rest nan
        added = tl.where(p == 0.0, 0.0, ds)
        _add_bias(rows.dbias, dbias, added, o_q, block.o_k, attention.num_q, attention.num_k)
    if attention.scores.CAP is not None:
        ds *= logits.cap_slope(capped, attention.scores.CAP, attention.scores.SHIFT == 0.0)
    if GUARDED:
        ds = tl.where(p == 0.0, 0.0, ds)
    narrow = ds.to(b_q.dtype)
    acc_k = tl.dot(narrow, b_q, acc_k, input_precision=attention.PRECISION)
    return acc_k, acc_v, far


class Mode(NamedTuple):
    WARY: tl.constexpr
    EXACT: tl.constexpr
    CHECKED: tl.constexpr


class BiasGradient(NamedTuple):
    """Strides of dbias; SUM_Q and SUM_K: the bias has one row, or one column."""

    batch: Any
    head: Any
    query: Any
    key: Any
    SUM_Q: tl.constexpr
    SUM_K: tl.constexpr


@triton.jit
def _add_bias(base, dbias, ds, o_q, o_k, num_q, num_k):
    """Adds a tile [BK, BQ] to dbias, summed first over the axes that the bias does not have."""
    m_q, m_k = o_q < num_q, o_k < num_k
    wide_q, wide_k = o_q.to(tl.int64) * dbias.query, o_k.to(tl.int64) * dbias.key
    if dbias.SUM_Q and dbias.SUM_K:
        tl.atomic_add(base, tl.sum(tl.sum(ds, 1), 0), sem="relaxed")
    elif dbias.SUM_Q:
        tl.atomic_add(base + wide_k, tl.sum(ds, 1), mask=m_k, sem="relaxed")
    elif dbias.SUM_K:
        tl.atomic_add(base + wide_q, tl.sum(ds, 0), mask=m_q, sem="relaxed")
    else:
        p = base + wide_k[:, None] + wide_q[None, :]
        tl.atomic_add(p, ds, mask=m_k[:, None] & m_q[None, :], sem="relaxed")


@triton.jit(do_not_specialize=(*call.LOOSE, "num_flags", "flag_rows"))
def flash_attention_bwd_dkv_kernel(
    query, key, value, attention, schedule, dout, lse, delta, dbias, flags, num_flags, flag_rows,
    dk, dv, dk_out, dv_out, dbias_out, flags_out,
    BQ: tl.constexpr, BK: tl.constexpr, CHECKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(attention.num_k, BK)
    GROUPS: tl.constexpr = attention.HEADS // attention.GROUP
    i_p = tl.program_id(0)
    # causal: the first keys are seen by most queries, and start first
    i_k, batch_head = block_ranges.order(i_p, num_blocks, schedule.interleaved)
    i_g = batch_head % GROUPS
    i_b = batch_head // GROUPS
    row = i_k * BK
    AGAIN: tl.constexpr = flags is not None
    if AGAIN:
        if tl.load(flags + batch_head * num_flags + row // flag_rows) == 0:
            return
    o_k = row + tl.arange(0, BK)
    wide_b = i_b.to(tl.int64)

    first_row = wide_b * attention.num_k * GROUPS + i_g
    b_k = addresses.load_tile(
        addresses.Rows(
            key + first_row * attention.D,
            GROUPS * attention.D,
            attention.num_k,
            attention.D,
            attention.BD,
        ),
        row,
        BK,
        True,
    )
    b_v = addresses.load_tile(
        addresses.Rows(
            value + first_row * attention.E,
            GROUPS * attention.E,
            attention.num_k,
            attention.E,
            attention.BE,
        ),
        row,
        BK,
        True,
    )
    tokens = attention.keys
    k_pos = masks.load_positions(tokens, wide_b, row, attention.num_k, 0, BK)
    k_id = masks.load_ids(tokens.ids, tokens.ids_step, wide_b, row, attention.num_k, BK)
    k_id_2 = masks.load_ids(tokens.more_ids, tokens.more_ids_step, wide_b, row, attention.num_k, BK)
    block = Block(row, o_k, k_pos, k_id, k_id_2)

    window = attention.mask.window
    first, full, ragged, last = block_ranges.bounds(
        schedule, wide_b, i_k, attention.num_k, attention.num_q, -window.offset, window.right, window.left,
        BK, BQ,
    )  # fmt: skip
    if AGAIN:
        first, full, ragged, last = 0, 0, 0, tl.cdiv(attention.num_q, BQ)
    acc_k = tl.zeros([BK, attention.BD], tl.float32)
    acc_v = tl.zeros([BK, attention.BE], tl.float32)
    far = tl.zeros([BQ], tl.float32)
    for r in range(attention.GROUP):
        i_h = i_g * attention.GROUP + r
        wide_h = i_h.to(tl.int64)
        head = wide_b * attention.num_q * attention.HEADS + wide_h
        h_query = query + head * attention.D
        h_dout = dout + head * attention.E
        of_head = (wide_b * attention.HEADS + wide_h) * attention.num_q
        h_dbias = None
        if dbias_out is not None:
            h_dbias = dbias_out + wide_b * dbias.batch + wide_h * dbias.head
        slope = 0.0
        if attention.scores.slopes is not None:
            slope = tl.load(attention.scores.slopes + i_h).to(tl.float32)
        drop_b, drop_h = philox.indices(attention.dropout, i_b, i_h)
        at = addresses.Place(wide_b, wide_h)
        rows = Head(at, lse + of_head, delta + of_head, h_dbias, slope, drop_b, drop_h)
        for i in range(first, last):
            acc_k, acc_v, far = _key_step(
                acc_k, acc_v, far, b_k, b_v, i, (i < full) | (i >= ragged),
                addresses.Rows(h_query, attention.HEADS * attention.D, attention.num_q, attention.D, attention.BD),
                addresses.Rows(h_dout, attention.HEADS * attention.E, attention.num_q, attention.E, attention.BE),
                rows, block, attention, dbias, BQ, BK, Mode(AGAIN, EXACT or AGAIN, CHECKED),
            )  # fmt: skip
    if flags_out is not None:
        odd = addresses.any_odd(acc_k) | addresses.any_odd(acc_v)
        if not EXACT:
            odd |= tl.max(far, 0) > softmax.LARGE
        tl.store(flags_out + batch_head * num_blocks + i_k, odd.to(tl.int32))
    acc_k *= attention.scores.SCALE
    addresses.store_tile(
        addresses.Rows(
            dk_out + first_row * attention.D,
            GROUPS * attention.D,
            attention.num_k,
            attention.D,
            attention.BD,
        ),
        row,
        acc_k,
        BK,
    )
    addresses.store_tile(
        addresses.Rows(
            dv_out + first_row * attention.E,
            GROUPS * attention.E,
            attention.num_k,
            attention.E,
            attention.BE,
        ),
        row,
        acc_v,
        BK,
    )
