"""Attention backward over keys: a program holds a block of keys and gives its dk and dv."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import (
    addresses,
    block_lists,
    block_ranges,
    logits,
    parts,
    philox,
    softmax,
)
from ejkernel.kernels._triton._blocks import attention as common
from ejkernel.kernels._triton._blocks import mask as masks


class KeyBlock(NamedTuple):
    """The block of keys that a program holds; vectors are [BK]."""

    row: Any  # of its first key
    o_k: Any
    k_pos: Any
    ids: Any
    more_ids: Any


class Head(NamedTuple):
    """One query head, and what backward knows of its rows."""

    at: Any  # `addresses.Place`
    lse: Any
    delta: Any
    large: Any  # whether exponents have to be exact; None: that is known at compile time
    dbias: Any  # None if it is not wanted
    slope: Any
    drop_batch: Any  # indices for dropout
    drop_head: Any


class BiasSums(NamedTuple):
    """Strides of dbias; OVER_QUERIES, OVER_KEYS: the bias does not have that axis."""

    batch: Any
    head: Any
    query: Any
    key: Any
    OVER_QUERIES: tl.constexpr
    OVER_KEYS: tl.constexpr


@triton.jit
def _over_queries(
    acc_k, acc_v, b_k, b_v, query, dout, head, block, bounds, attention, sums,
    BQ: tl.constexpr, CHECKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Adds what one query head gives to dk in acc_k [BK, BD] and to dv in acc_v [BK, BE]."""
    BK: tl.constexpr = b_k[0].shape[0]
    batch = head.at.batch
    ahead = block_lists.entry(bounds, bounds.first, bounds.last, BQ)
    for step in range(bounds.first, bounds.last):
        masked = (step < bounds.full) | (step >= bounds.ragged)
        i = block_lists.tile(bounds, ahead, step, BQ)
        ahead = block_lists.entry(bounds, step + 1, bounds.last, BQ)
        row = i * BQ
        o_q = row + tl.arange(0, BQ)
        b_q = masks.load_real_tile(  # [BQ, BD]
            query, attention.query_rows, row, attention.num_q, attention.queries, batch, BQ, CHECKED
        )
        b_do = masks.load_real_tile(  # [BQ, BE]
            dout, attention.out_rows, row, attention.num_q, attention.queries, batch, BQ, CHECKED
        )
        q_pos = masks.load_positions(
            attention.queries, batch, row, attention.num_q, attention.mask.window.offset, BQ
        )
        tile = masks.Tile(o_q[None, :], block.o_k[:, None], q_pos[None, :], block.k_pos[:, None])
        dots = parts.dot_transposed(b_k, b_q, attention.PRECISION)  # [BK, BQ]
        x, capped = logits.logits(
            dots, tile, head.at, head.slope, attention.scores, attention.num_q, attention.num_k
        )
        # a branch before exp2 does not cut the flow of products
        x = masks.hide(
            x, float("-inf"), masked, tile, head.at, row, block.ids, block.more_ids,
            attention.queries, attention.num_q, attention.mask, attention.num_q, attention.num_k,
            BQ,
        )  # fmt: skip
        if (attention.scores.bias is None) and (attention.scores.slopes is None):
            capped = x  # one tile less to keep
        b_lse = addresses.load_row(head.lse, row, attention.num_q, BQ, 0.0)
        exponents = softmax.exponents(x, b_lse[None, :], attention.scores.FACTOR, EXACT)
        if head.large is not None:
            if head.large:
                exponents = softmax.exponents(x, b_lse[None, :], attention.scores.FACTOR, True)
        p = tl.math.exp2(exponents)  # [BK, BQ]
        dp = parts.close_dot_transposed(b_v, b_do, attention.PRECISION)  # [BK, BQ]
        kept = p
        if attention.dropout is not None:
            keep = philox.keep(
                attention.dropout, head.drop_batch, head.drop_head, o_q, block.row, BQ, BK
            )
            kept = tl.where(tl.trans(keep), p * attention.dropout.FACTOR, 0.0)
            dp = tl.where(tl.trans(keep), dp * attention.dropout.FACTOR, 0.0)
        if head.dbias is None:
            acc_v = parts.add_dot(acc_v, kept, b_do, attention.PRECISION)
        b_delta = addresses.load_row(head.delta, row, attention.num_q, BQ, 0.0)
        ds = p * (dp - b_delta[None, :])  # [BK, BQ]
        if head.dbias is not None:  # it is added after the cap; a padded key may hold nan
            added = tl.where(p == 0.0, 0.0, ds)
            _add_bias(head.dbias, sums, added, o_q, block.o_k, attention.num_q, attention.num_k)
            # while a product runs, atomic adds would make ptxas (12.8) serialise all (C7513)
            acc_v = parts.add_dot(acc_v, kept, b_do, attention.PRECISION)
        if attention.scores.CAP is not None:
            ds *= logits.cap_slope(capped, attention.scores.CAP)
        acc_k = parts.add_dot(acc_k, ds, b_q, attention.PRECISION)
    return acc_k, acc_v


@triton.jit
def _add_bias(base, sums, ds, o_q, o_k, num_q, num_k):
    """Adds a tile [BK, BQ] to dbias, summed first over the axes that the bias does not have."""
    m_q, m_k = o_q < num_q, o_k < num_k
    wide_q, wide_k = o_q.to(tl.int64) * sums.query, o_k.to(tl.int64) * sums.key
    if sums.OVER_QUERIES and sums.OVER_KEYS:
        tl.atomic_add(base, tl.sum(tl.sum(ds, 1), 0), sem="relaxed")
    elif sums.OVER_QUERIES:
        tl.atomic_add(base + wide_k, tl.sum(ds, 1), mask=m_k, sem="relaxed")
    elif sums.OVER_KEYS:
        tl.atomic_add(base + wide_q, tl.sum(ds, 0), mask=m_q, sem="relaxed")
    else:
        p = base + wide_k[:, None] + wide_q[None, :]
        tl.atomic_add(p, ds, mask=m_k[:, None] & m_q[None, :], sem="relaxed")


@triton.jit(do_not_specialize=common.UNSPECIALISED)
def flash_attention_bwd_dkv_kernel(
    query, key, value, attention, schedule, dout, lse, delta, large, sums, dk, dv, dbias,
    BQ: tl.constexpr, BK: tl.constexpr, CHECKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """EXACT, or if the array `large` says so, weights are exact: see `softmax.exponents`."""
    num_blocks = tl.cdiv(attention.num_k, BK)
    # causal: the first keys are seen by most queries, and start first
    i_k, batch_head = block_ranges.order(tl.program_id(0), num_blocks, schedule.interleaved)
    i_g = batch_head % attention.KEY_HEADS
    i_b = batch_head // attention.KEY_HEADS
    batch = i_b.to(tl.int64)
    row = i_k * BK
    key_row = batch * attention.num_k * attention.KEY_HEADS + i_g
    D: tl.constexpr = attention.key_rows.WIDTH
    E: tl.constexpr = attention.value_rows.WIDTH
    b_k = parts.load(key + key_row * D, attention.key_rows, row, attention.num_k, None, BK, True)
    b_v = parts.load(
        value + key_row * E, attention.value_rows, row, attention.num_k, None, BK, True
    )
    tokens = attention.keys
    block = KeyBlock(
        row,
        row + tl.arange(0, BK),
        masks.load_positions(tokens, batch, row, attention.num_k, 0, BK),
        masks.load_ids(tokens.ids, tokens.ids_step, batch, row, attention.num_k, BK),
        masks.load_ids(tokens.more_ids, tokens.more_ids_step, batch, row, attention.num_k, BK),
    )
    if schedule.lists is None:
        window = attention.mask.window  # seen from the keys, it is mirrored
        first, full, ragged, last = block_ranges.bounds(
            schedule, batch, i_k, attention.num_k, attention.num_q, -window.offset, window.right,
            window.left, BK, BQ,
        )  # fmt: skip
    acc_k = parts.zeros(attention.key_rows, BK)
    acc_v = parts.zeros(attention.value_rows, BK)
    dk += key_row * D
    dv += key_row * E
    if (large is None) and (schedule.lists is None):
        if first >= last:  # as in forward: products would not overlap in a loop that may be empty
            parts.store(dk, attention.key_rows, row, attention.num_k, acc_k, BK)
            parts.store(dv, attention.value_rows, row, attention.num_k, acc_v, BK)
            return
    is_large = None
    if large is not None:
        is_large = tl.load(large) != 0
    for r in range(attention.GROUP):
        i_h = i_g * attention.GROUP + r
        at = addresses.Place(batch, i_h.to(tl.int64))
        query_row = batch * attention.num_q * attention.HEADS + at.head
        first_row = (batch * attention.HEADS + at.head) * attention.num_q  # in [b, h, t]
        h_dbias = None
        if dbias is not None:
            h_dbias = dbias + batch * sums.batch + at.head * sums.head
        slope = common.load_slope(attention.scores.slopes, i_h)
        drop_batch, drop_head = philox.indices(attention.drop_offset, i_b, i_h)
        head = Head(
            at, lse + first_row, delta + first_row, is_large, h_dbias, slope, drop_batch, drop_head
        )
        if schedule.lists is not None:  # heads may have lists of their own
            list_row = block_lists.row_of(schedule.lists, at, i_k, BK)
            zero, full_from, partial_from, end = block_lists.bounds(schedule.lists, list_row, BQ)
            listed = schedule.lists.blocks + list_row * schedule.lists.width
            visits = block_ranges.Bounds(zero, full_from, partial_from, end, schedule.lists, listed)
        else:
            visits = block_ranges.Bounds(first, full, ragged, last, None, None)
        acc_k, acc_v = _over_queries(
            acc_k, acc_v, b_k, b_v, query + query_row * D, dout + query_row * E, head, block,
            visits, attention, sums, BQ, CHECKED, EXACT,
        )  # fmt: skip
    acc_k = parts.scale(acc_k, attention.scores.SCALE)
    if attention.keys.ids is not None:  # padding may hold nan
        is_real_row = (block.ids >= 0) & (block.more_ids >= 0)
        acc_k = parts.keep_rows(acc_k, is_real_row)
    parts.store(dk, attention.key_rows, row, attention.num_k, acc_k, BK)
    parts.store(dv, attention.value_rows, row, attention.num_k, acc_v, BK)
