"""Attention forward with online softmax (Dao, 2023) in Triton.

One program computes a block of queries of one head. Of its blocks of keys only those at the ends
take a mask. Arrays are [b, t, h, d], contiguous.

There are two kernels. The careful one keeps a running maximum, and is right for every call. The
other one is faster (20 % on an H200): weights are exp(x - m), where m is the row maximum of the
first block of keys and is never updated, so that the weighted values need no rescaling. It flags
blocks of queries whose weights leave the range of float32, or whose result is not finite; the
careful kernel is launched after it, and computes these blocks again.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import cdiv, next_power_of_2, triton_call
from ejkernel.kernels._triton._blocks import attention as common
from ejkernel.kernels._triton._blocks import (
    block_lists,
    block_ranges,
    parts,
    philox,
    softmax,
)
from ejkernel.kernels._triton._blocks import mask as masks
from ejkernel.kernels._triton.flash_attention import call, config

# what the weights of a row may sum up to, if their reference is not the row's maximum
_LEAST, _MOST = tl.constexpr(2.0**-60), tl.constexpr(2.0**100)
# Programs that read flags, about four to a multiprocessor. One for each of 4096 flags took 7 to
# 11 us on an H200, 4 % of a forward in rows of 1024.
_FLAG_PROGRAMS = 512


@triton.jit
def _add_values(
    acc, p, j, value, block, attention, BK: tl.constexpr, CHECKED: tl.constexpr,
    CLEAN: tl.constexpr,
):  # fmt: skip
    """Adds the values of block j, with weights p [BQ, BK], to acc [BQ, BE].

    CLEAN: padding, whose weight is 0, may hold nan.
    """
    row = j * BK
    if attention.dropout is not None:
        kept = philox.keep(
            attention.dropout, block.drop_batch, block.drop_head, block.o_q, row, p.shape[0], BK
        )
        p = tl.where(kept, p * attention.dropout.FACTOR, 0.0)
    if CLEAN:
        b_v = masks.load_real_tile(
            value, attention.value_rows, row, attention.num_k, attention.keys, block.at.batch, BK,
            CHECKED,
        )  # fmt: skip
    else:
        b_v = parts.load(
            value, attention.value_rows, row, attention.num_k, None, BK, CHECKED
        )  # [BK, BE]
    return parts.add_dot(acc, p, b_v, attention.PRECISION)


@triton.jit
def _store(acc, m, l, factor, sinks, block, attention, out, lse, BQ: tl.constexpr):
    """Stores output and logsumexp of rows with maximum m, in natural units, and sum l.

    Sums and values are first multiplied by `factor`.
    """
    m = tl.where(l == 0.0, float("-inf"), m)
    l *= factor
    if sinks is not None:
        m, l, alpha = softmax.add_sinks(m, l, sinks, block.at.head)
        factor *= alpha
    if attention.queries.ids is not None:  # padding sees only sinks
        is_real_row = (block.ids >= 0) & (block.more_ids >= 0)
        acc = parts.keep_rows(acc, is_real_row)
    acc = parts.scale(acc, (factor / tl.where(l == 0.0, 1.0, l))[:, None])  # one quotient a row
    out += block.query_row * attention.out_rows.WIDTH
    parts.store(out, attention.out_rows, block.row, attention.num_q, acc, BQ)
    p_lse = lse + (block.at.batch * attention.HEADS + block.at.head) * attention.num_q + block.o_q
    tl.store(p_lse, softmax.logsumexp(m, l), mask=block.o_q < attention.num_q)


@triton.jit
def _careful_block(
    i_p, query, key, value, attention, sinks, schedule, out, lse,
    BQ: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, CHECKED: tl.constexpr,
    REVERSED: tl.constexpr,
):  # fmt: skip
    """Computes block `i_p` of queries with a running maximum.

    The schedule is for blocks of SPLIT times BK keys.
    """
    block = common.query_block(i_p, attention, schedule, BQ, REVERSED)
    query += block.query_row * attention.query_rows.WIDTH
    key += block.key_row * attention.key_rows.WIDTH
    value += block.key_row * attention.value_rows.WIDTH
    b_q = parts.load(  # [BQ, BD]
        query, attention.query_rows, block.row, attention.num_q, None, BQ, True
    )
    first, full, ragged, last = common.key_bounds(block, attention, schedule, BQ, BK * SPLIT)
    listed = None
    if schedule.lists is not None:
        listed = block_lists.entries(schedule.lists, block, BQ)
    visits = block_ranges.Bounds(first, full, ragged, last, schedule.lists, listed)
    m = tl.full([BQ], float("-inf"), tl.float32)  # running maximum
    l = tl.zeros([BQ], tl.float32)  # sum of weights exp(x - m)
    acc = parts.zeros(attention.value_rows, BQ)  # weighted values
    one = tl.full([BQ], 1.0, tl.float32)
    if first >= last:
        # If the loop could be left out, the sums of products in flight at its end would meet zeros
        # there, and ptxas (12.8) would let each product wait for the one before (C7515).
        _store(acc, m, l, one, sinks, block, attention, out, lse, BQ)
    else:
        ahead = block_lists.entry(visits, first * SPLIT, last * SPLIT, BK)
        for i in range(first * SPLIT, last * SPLIT):
            masked = (i < full * SPLIT) | (i >= ragged * SPLIT)
            j = block_lists.tile(visits, ahead, i, BK)
            ahead = block_lists.entry(visits, i + 1, last * SPLIT, BK)
            row = j * BK
            b_k = parts.load(  # [BK, BD]
                key, attention.key_rows, row, attention.num_k, None, BK, CHECKED
            )
            dots = parts.dot_transposed(b_q, b_k, attention.PRECISION)  # [BQ, BK]
            x, _ = common.scores(dots, j, masked, block, attention, BK)
            m, l, p, alpha = softmax.update(m, l, x, attention.scores.FACTOR)
            acc = parts.scale(acc, alpha[:, None])
            acc = _add_values(acc, p, j, value, block, attention, BK, CHECKED, True)
        m *= attention.scores.FACTOR
        _store(acc, m, l, one, sinks, block, attention, out, lse, BQ)


class Flags(NamedTuple):
    """Which blocks of queries have to be computed again."""

    base: Any
    count: Any
    AT_ONCE: tl.constexpr  # that a program reads


@triton.jit(do_not_specialize=(*common.UNSPECIALISED, "sinks.count", "flags.count"))
def flash_attention_fwd_careful_kernel(
    query, key, value, attention, sinks, schedule, flags, old_out, old_lse, out, lse,
    BQ: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, CHECKED: tl.constexpr,
    REVERSED: tl.constexpr,
):  # fmt: skip
    """Computes all blocks of queries, one in a program, or those that are flagged.

    Mostly none is: so a program reads many flags at once. `old_out` and `old_lse` share their
    memory with the outputs, so that what is not flagged stays.
    """
    if flags is None:
        _careful_block(
            tl.program_id(0), query, key, value, attention, sinks, schedule, out, lse, BQ, BK,
            SPLIT, CHECKED, REVERSED,
        )  # fmt: skip
    else:
        # Neighbours visit about as many keys, and often all are flagged: programs share them.
        first, step = tl.program_id(0), tl.num_programs(0)
        o_p = first + step * tl.arange(0, flags.AT_ONCE)
        if tl.max(tl.load(flags.base + o_p, mask=o_p < flags.count, other=0), 0) > 0:
            for i_p in range(first, flags.count, step):
                if tl.load(flags.base + i_p) > 0:
                    _careful_block(
                        i_p, query, key, value, attention, sinks, schedule, out, lse, BQ, BK,
                        SPLIT, CHECKED, REVERSED,
                    )  # fmt: skip


@triton.jit(do_not_specialize=(*common.UNSPECIALISED, "sinks.count"))
def flash_attention_fwd_kernel(
    query, key, value, attention, sinks, schedule, out, lse, flags,
    BQ: tl.constexpr, BK: tl.constexpr, CHECKED: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """Computes all blocks of queries with a fixed reference, and flags those that it cannot."""
    block = common.query_block(tl.program_id(0), attention, schedule, BQ, REVERSED)
    query += block.query_row * attention.query_rows.WIDTH
    key += block.key_row * attention.key_rows.WIDTH
    value += block.key_row * attention.value_rows.WIDTH
    b_q = parts.load(  # [BQ, BD]
        query, attention.query_rows, block.row, attention.num_q, None, BQ, True
    )
    first, full, ragged, last = common.key_bounds(block, attention, schedule, BQ, BK)
    listed = None
    if schedule.lists is not None:
        listed = block_lists.entries(schedule.lists, block, BQ)
    visits = block_ranges.Bounds(first, full, ragged, last, schedule.lists, listed)
    if attention.value_rows.rest is not None:
        if first >= last:  # with two sums, ptxas would serialise products here too: see above
            tl.store(flags + tl.program_id(0), 1)
            return
    UNITS: tl.constexpr = attention.scores.FACTOR * softmax.LOG2_E  # of logits, in base 2
    m = tl.zeros([BQ], tl.float32)  # the reference of a row
    l = tl.zeros([BQ], tl.float32)
    acc = parts.zeros(attention.value_rows, BQ)
    ahead = block_lists.entry(visits, first, last, BK)
    for i in range(first, last):
        masked = (i < full) | (i >= ragged)
        j = block_lists.tile(visits, ahead, i, BK)
        ahead = block_lists.entry(visits, i + 1, last, BK)
        row = j * BK
        b_k = parts.load(  # [BK, BD]
            key, attention.key_rows, row, attention.num_k, None, BK, CHECKED
        )
        dots = parts.dot_transposed(b_q, b_k, attention.PRECISION)  # [BQ, BK]
        x, _ = common.scores(dots, j, masked, block, attention, BK)
        if i == first:
            m = softmax.finite(tl.max(x, 1))
        p = tl.math.exp2(tl.fma(x, UNITS, -(m * UNITS)[:, None]))  # [BQ, BK]
        l += tl.sum(p, 1)
        acc = _add_values(acc, p, j, value, block, attention, BK, CHECKED, False)
    is_real_row = (block.o_q < attention.num_q) & (block.ids >= 0) & (block.more_ids >= 0)
    in_range = (l >= _LEAST) & (l <= _MOST) & parts.finite_rows(acc)
    flagged = tl.max((is_real_row & (in_range == 0)).to(tl.int32), 0)
    tl.store(flags + tl.program_id(0), flagged)
    # The product m * UNITS was rounded when it was subtracted. That does not matter to a quotient
    # of sums; here it is taken out of them, for the logsumexp.
    factor = tl.math.exp2(-tl.fma(m, UNITS, -(m * UNITS)))
    m *= attention.scores.FACTOR
    _store(acc, m, l, factor, sinks, block, attention, out, lse, BQ)


def _has_fixed_reference(args: Any) -> bool:
    """Whether the first block of keys says enough of a row's other logits.

    It does not with bias, slopes or a dense mask; and float16 has too few exponents.
    """
    others = (args.bias, args.alibi_slopes, args.attention_mask)
    return args.query.dtype != jnp.float16 and all(x is None for x in others)


def forward(
    args: Any, cfg: config.Config, prepare: type[call.Call] = call.Call
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Outputs (out, and lse when asked for) and residuals (lse)."""
    batch, t, num_heads, _ = args.query.shape
    prepared = prepare(args, cfg)
    inputs = prepared.inputs(prepared.key_schedule()) | {"sinks": prepared.sinks()}
    programs = cdiv(t, cfg.block_q) * num_heads * batch
    out_shape = (*args.query.shape[:3], args.value.shape[-1])
    outputs = {
        "out": jax.ShapeDtypeStruct(out_shape, args.query.dtype),
        "lse": jax.ShapeDtypeStruct((batch, num_heads, t), jnp.float32),
    }
    shared = {
        "BQ": cfg.block_q,
        "CHECKED": prepared.cut_keys,
        "REVERSED": prepared.causal,
    }
    old: dict[str, Any] = dict.fromkeys(("flags", "old_out", "old_lse"))
    split, careful, careful_programs = 1, cfg, programs
    if _has_fixed_reference(args):
        found = triton_call(
            flash_attention_fwd_kernel,
            inputs=inputs,
            outputs=outputs | {"flags": jax.ShapeDtypeStruct((programs,), jnp.int32)},
            grid=(programs,),
            cost=prepared.cost(products=1),
            **cfg.launch(),
            **shared,
            BK=cfg.block_k,
        )
        at_once = next_power_of_2(cdiv(programs, _FLAG_PROGRAMS))
        careful_programs = cdiv(programs, at_once)
        flags = Flags(found["flags"], programs, at_once)
        old = {"flags": flags, "old_out": found["out"], "old_lse": found["lse"]}
        careful = config.careful(cfg)
        split = cfg.block_k // careful.block_k
    found = triton_call(
        flash_attention_fwd_careful_kernel,
        inputs=inputs | old,
        outputs=outputs,
        aliases={"out": "old_out", "lse": "old_lse"} if old["flags"] is not None else None,
        grid=(careful_programs,),
        cost=prepared.cost(products=1) if old["flags"] is None else None,
        **careful.launch(),
        **shared,
        BK=careful.block_k,
        SPLIT=split,
    )
    out, lse = found["out"], found["lse"]
    return ((out, lse) if args.return_lse else (out,)), (lse,)
