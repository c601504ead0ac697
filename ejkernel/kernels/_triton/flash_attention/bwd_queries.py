"""Attention backward over queries: a program holds a block of queries and gives its dq."""

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


class RowSums(NamedTuple):
    """What backward knows of the rows, vectors [BQ]."""

    lse: Any
    delta: Any


@triton.jit
def _over_keys(
    acc, b_q, b_do, rows, key, value, block, bounds, attention,
    BK: tl.constexpr, CHECKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Adds what blocks of keys give to dq in acc [BQ, BD]."""
    BQ: tl.constexpr = b_q[0].shape[0]
    ahead = block_lists.entry(bounds, bounds.first, bounds.last, BK)
    for i in range(bounds.first, bounds.last):
        masked = (i < bounds.full) | (i >= bounds.ragged)
        j = block_lists.tile(bounds, ahead, i, BK)
        ahead = block_lists.entry(bounds, i + 1, bounds.last, BK)
        row = j * BK
        b_k = masks.load_real_tile(  # [BK, BD]
            key, attention.key_rows, row, attention.num_k, attention.keys, block.at.batch, BK,
            CHECKED,
        )  # fmt: skip
        b_v = masks.load_real_tile(  # [BK, BE]
            value, attention.value_rows, row, attention.num_k, attention.keys, block.at.batch, BK,
            CHECKED,
        )  # fmt: skip
        dots = parts.dot_transposed(b_q, b_k, attention.PRECISION)  # [BQ, BK]
        # a branch on `masked` before exp2 does not cut the flow of products
        x, capped = common.scores(dots, j, masked, block, attention, BK)
        if (attention.scores.bias is None) and (attention.scores.slopes is None):
            capped = x  # one tile less to keep
        p = tl.math.exp2(softmax.exponents(x, rows.lse[:, None], attention.scores.FACTOR, EXACT))
        dp = parts.close_dot_transposed(b_do, b_v, attention.PRECISION)  # [BQ, BK]
        if attention.dropout is not None:
            keep = philox.keep(
                attention.dropout, block.drop_batch, block.drop_head, block.o_q, row, BQ, BK
            )
            dp = tl.where(keep, dp * attention.dropout.FACTOR, 0.0)
        ds = p * (dp - rows.delta[:, None])
        if attention.scores.CAP is not None:
            ds *= logits.cap_slope(capped, attention.scores.CAP)
        acc = parts.add_dot(acc, ds, b_k, attention.PRECISION)
    return acc


@triton.jit
def _row_sums(b_do, block, attention, out, lse, dlse, delta, BQ: tl.constexpr):
    """logsumexp of the rows, and sum(out * dout) - dlse, which the pass over keys reads again."""
    first_row = (block.at.batch * attention.HEADS + block.at.head) * attention.num_q  # in [b, h, t]
    b_o = parts.load(  # [BQ, BE]
        out, attention.out_rows, block.row, attention.num_q, None, BQ, True
    )
    b_delta = parts.row_dots(b_o, b_do)
    if tl.max((b_delta != b_delta).to(tl.int32), 0) > 0:
        # a row that saw no key has output 0 whatever its cotangent is
        b_delta = tl.where(parts.zero_rows(b_o), 0.0, b_delta)
    if dlse is not None:
        b_delta -= addresses.load_row(dlse + first_row, block.row, attention.num_q, BQ, 0.0)
    tl.store(delta + first_row + block.o_q, b_delta, mask=block.o_q < attention.num_q)
    b_lse = addresses.load_row(lse + first_row, block.row, attention.num_q, BQ, 0.0)
    return RowSums(b_lse, b_delta)


@triton.jit(do_not_specialize=common.UNSPECIALISED)
def flash_attention_bwd_dq_kernel(
    query, key, value, attention, schedule, out, dout, lse, dlse, dq, delta, large,
    BQ: tl.constexpr, BK: tl.constexpr, CHECKED: tl.constexpr, REVERSED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """EXACT, or if rows have large scores, weights are exact: see `softmax.exponents`.

    The pass over keys comes after this one, and reads `delta`, and `large` if there is one.
    """
    block = common.query_block(tl.program_id(0), attention, schedule, BQ, REVERSED)
    query += block.query_row * attention.query_rows.WIDTH
    out += block.query_row * attention.out_rows.WIDTH
    dout += block.query_row * attention.out_rows.WIDTH
    key += block.key_row * attention.key_rows.WIDTH
    value += block.key_row * attention.value_rows.WIDTH
    b_q = parts.load(  # [BQ, BD]
        query, attention.query_rows, block.row, attention.num_q, None, BQ, True
    )
    b_do = parts.load(  # [BQ, BE]
        dout, attention.out_rows, block.row, attention.num_q, None, BQ, True
    )
    rows = _row_sums(b_do, block, attention, out, lse, dlse, delta, BQ)
    first, full, ragged, last = common.key_bounds(block, attention, schedule, BQ, BK)
    listed = None
    if schedule.lists is not None:
        listed = block_lists.entries(schedule.lists, block, BQ)
    acc = parts.zeros(attention.query_rows, BQ)
    dq += block.query_row * attention.query_rows.WIDTH
    if large is None:
        if first >= last:
            # as in forward: if the loop could be left out, products would not overlap in it
            parts.store(dq, attention.query_rows, block.row, attention.num_q, acc, BQ)
            return
    split = last
    if large is not None:
        size = tl.abs(softmax.finite(rows.lse))
        is_large = tl.max((size > softmax.LARGE).to(tl.int32), 0) > 0
        if is_large:
            tl.atomic_max(large, 1, sem="relaxed")
        # One of the two loops is empty. A branch in a single loop would be predicated, and its
        # instructions would take their time in every call.
        split = tl.where(is_large, first, last)
    acc = _over_keys(
        acc, b_q, b_do, rows, key, value, block,
        block_ranges.Bounds(first, full, ragged, split, schedule.lists, listed), attention, BK,
        CHECKED, EXACT,
    )  # fmt: skip
    if large is not None:
        acc = _over_keys(
            acc, b_q, b_do, rows, key, value, block,
            block_ranges.Bounds(split, full, ragged, last, schedule.lists, listed), attention, BK,
            CHECKED, True,
        )  # fmt: skip
    acc = parts.scale(acc, attention.scores.SCALE)
    if attention.queries.ids is not None:  # padding may hold nan
        is_real_row = (block.ids >= 0) & (block.more_ids >= 0)
        acc = parts.keep_rows(acc, is_real_row)
    parts.store(dq, attention.query_rows, block.row, attention.num_q, acc, BQ)
