"""Attention forward with online softmax (Dao, 2023) in Triton.

One program computes a block of queries of one head; of its blocks of keys only those at the ends
take a mask. Arrays are [b, t, h, d], contiguous.

The maximum over the first block, of packed rows over the first that they see, stays the reference
of a row's weights: float32 and bfloat16 have exponents enough for weights far above one. So the sum
of values is only ever added to, and its products run beside the next block's. Rows whose weights
leave the range are done again.

Logits below about their cap are capped by a polynomial; blocks of queries with larger ones are
marked, and done by a second launch. Caps in exponentials would double what one unit has to do.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton._blocks import addresses, pairs, philox, softmax
from ejkernel.kernels._triton._blocks import table as blocks
from ejkernel.kernels._triton.flash_attention import call, config

# what the weights of a row may sum up to, in units of its reference
_LEAST, _MOST = tl.constexpr(2.0**-60), tl.constexpr(2.0**100)
# Caps under which every row may have a logit of 0 as its reference, e^50 being 2^72; what a dot may
# be multiplied by to be in units of its cap, so that float32 has the constants of the series
_SERIES_CAP, _SERIES_SLOPES = 50.0, (5e-4, 1e3)


@triton.jit
def _step(
    m, l, far, acc, b_q, j, fresh, masked, key, value, bias, mask, slope, seed, i_b, i_h, o_q,
    q_id, q_id_2, q_pos, k_ids, k_ids_2, k_pos, stride_k, stride_v, bias_t, bias_s, mask_t, mask_s,
    left, right, num_q, num_k,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, SCALE: tl.constexpr, NATURAL: tl.constexpr, UNITS: tl.constexpr,
    SHIFT: tl.constexpr, CAP: tl.constexpr, BIAS: tl.constexpr, SLOPES: tl.constexpr,
    IDS: tl.constexpr, POSITIONS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    THRESHOLD: tl.constexpr, KEPT: tl.constexpr, PRECISION: tl.constexpr, CHECKED: tl.constexpr,
    CUT: tl.constexpr, MASKS: tl.constexpr, STEADY: tl.constexpr, SERIES: tl.constexpr,
    ZERO: tl.constexpr, WARY: tl.constexpr,
):  # fmt: skip
    """Folds block j of the keys, which may be `masked`, into the state of the rows.

    A hidden key has weight 0, but 0 * nan is nan. WARY: a value that is not finite marks its key,
    and is taken as 0. STEADY: rows that saw nothing before a `fresh` block get their reference from
    it, and keep it. SERIES: logits are small beside their cap; `far` is the largest square of a
    dot. ZERO: the reference is a logit of 0.
    """
    row = j * BK
    o_k = row + tl.arange(0, BK)
    b_k = addresses.load_tile(key, row, stride_k, num_k, BK, D, BD, CHECKED)
    dots = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BQ, BK]
    if WARY:
        b_v = addresses.load_tile(value, row, stride_v, num_k, BK, E, BE, CHECKED)
        dots = tl.where(addresses.spoiled(b_v)[None, :], float("nan"), dots)
        b_v = addresses.finite(b_v)
    b_kp = o_k
    if POSITIONS:
        b_kp = addresses.load_row(k_pos, row, num_k, BK, 0)
    if SERIES:
        squares = dots * dots
        far = tl.maximum(far, tl.max(squares, 1))
        x = pairs.cap_series(dots, squares, SCALE / CAP, CAP * softmax.LOG2_E)
    else:
        x, _ = pairs.logits(
            dots, o_q[:, None], o_k[None, :], q_pos[:, None], b_kp[None, :], bias, bias_t, bias_s,
            slope, num_q, num_k, SCALE, NATURAL, BIAS, SLOPES, CAP, SHIFT == 0.0, not POSITIONS,
        )  # fmt: skip
    x = pairs.hide(
        x, float("-inf"), masked, row, mask, o_q[:, None], o_k[None, :], q_pos[:, None],
        b_kp[None, :], q_id, q_id_2, k_ids, k_ids_2, mask_t, mask_s, left, right, num_q, num_k,
        num_k, BK, IDS, LEFT, RIGHT, CUT, MASKS, not POSITIONS,
    )  # fmt: skip
    if ZERO:
        p = tl.math.exp2(x)  # [BQ, BK]
        l += tl.sum(p, 1)
    elif STEADY:
        if fresh:  # a row that sees nothing of it: a logit of 0
            top = softmax.shift(tl.max(x, 1), -SHIFT * softmax.LOG2_E / UNITS)
            m = tl.where(l == 0.0, top, m)
        p = tl.math.exp2(tl.fma(x, UNITS, -(m * UNITS)[:, None]))
        l += tl.sum(p, 1)
    else:
        m, l, p, alpha = softmax.update(m, l, x, UNITS)
        acc = acc * alpha[:, None]
    if THRESHOLD is not None:
        kept = philox.keep(seed, i_b, i_h, o_q, row, BQ, BK, THRESHOLD)
        p = tl.where(kept, p * KEPT, 0.0)
    if not WARY:
        b_v = addresses.load_tile(value, row, stride_v, num_k, BK, E, BE, CHECKED)
    acc = tl.dot(p.to(b_v.dtype), b_v, acc, input_precision=PRECISION)  # [BQ, BE]
    return m, l, far, acc


@triton.jit(do_not_specialize=call.LOOSE)
def flash_attention_fwd_kernel(
    query, key, value, bias, mask, sinks, slopes, seed, dropout_offset, q_ids, k_ids, q_ids_2,
    k_ids_2, q_positions, k_positions, table, num_q, num_k, offset, left, right, bias_b, bias_h,
    bias_t, bias_s, mask_b, mask_h, mask_t, mask_s, ids_q, ids_k, ids_q_2, ids_k_2, pos_q, pos_k,
    table_b, sinks_h, num_sinks, span, flags, old_out, old_lse, out, lse, flags_out,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr, NATURAL: tl.constexpr, UNITS: tl.constexpr, SHIFT: tl.constexpr,
    CAP: tl.constexpr, IDS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    THRESHOLD: tl.constexpr, KEPT: tl.constexpr, CHECKED: tl.constexpr, CUT: tl.constexpr,
    MASKS: tl.constexpr, LONE: tl.constexpr, BACKWARDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(num_q, BQ)
    i_p = tl.program_id(0)
    if flags is not None:
        if tl.load(flags + i_p) == 0:
            return
    i_q, line = blocks.order(i_p, num_blocks, span)
    if BACKWARDS:  # causal: the longest rows start first
        i_q = num_blocks - 1 - i_q
    i_h = line % HEADS
    i_b = line // HEADS
    i_g = i_h // GROUP
    GROUPS: tl.constexpr = HEADS // GROUP
    row = i_q * BQ
    o_q = row + tl.arange(0, BQ)
    wide_b = i_b.to(tl.int64)
    BIAS: tl.constexpr = bias is not None
    SLOPES: tl.constexpr = slopes is not None
    POSITIONS: tl.constexpr = q_positions is not None
    # exponents of float16 are too few, and with these one logit says little of the others
    STEADY: tl.constexpr = (
        (query.dtype.element_ty != tl.float16) and not BIAS and not SLOPES and (mask is None)
    )
    SERIES: tl.constexpr = flags_out is not None

    query += (wide_b * num_q * HEADS + i_h) * D
    key += (wide_b * num_k * GROUPS + i_g) * D
    value += (wide_b * num_k * GROUPS + i_g) * E
    STRIDE_K: tl.constexpr = GROUPS * D
    STRIDE_V: tl.constexpr = GROUPS * E
    b_q = addresses.load_tile(query, row, HEADS * D, num_q, BQ, D, BD, True)

    q_pos = o_q + offset
    k_pos = k_positions
    if POSITIONS:
        q_pos = addresses.load_row(q_positions + wide_b * pos_q, row, num_q, BQ, 0)
        k_pos = k_positions + wide_b * pos_k
    q_id = o_q
    q_id_2 = o_q
    looks = o_q < num_q  # rows that are no padding
    if IDS >= 1:
        q_id = addresses.load_row(q_ids + wide_b * ids_q, row, num_q, BQ, -1)
        k_ids += wide_b * ids_k
        looks &= q_id >= 0
    if IDS >= 2:
        q_id_2 = addresses.load_row(q_ids_2 + wide_b * ids_q_2, row, num_q, BQ, -1)
        k_ids_2 += wide_b * ids_k_2
        looks &= q_id_2 >= 0
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes + i_h).to(tl.float32)
    if BIAS:
        bias += wide_b * bias_b + i_h.to(tl.int64) * bias_h
    if mask is not None:
        mask += wide_b * mask_b + i_h.to(tl.int64) * mask_h
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

    # LONE: a row's only key has to be its reference, to weigh 1 to the bit. The row may see nothing
    # of earlier blocks, but all of any without a mask: whoever has a sum has a reference.
    ZERO: tl.constexpr = SERIES and not LONE
    BITS: tl.constexpr = 1.0 if SERIES else UNITS
    m = tl.full([BQ], 0.0 if ZERO else float("-inf"), tl.float32)
    l = tl.zeros([BQ], tl.float32)
    far = tl.zeros([BQ], tl.float32)
    acc = tl.zeros([BQ, BE], tl.float32)
    for j in range(first, last):
        masked = (j < full) | (j >= ragged)
        fresh = j == first
        if LONE:
            fresh = masked | (j == full)
        m, l, far, acc = _step(
            m, l, far, acc, b_q, j, fresh, masked, key, value, bias, mask, slope, seed,
            drop_b, drop_h, o_q, q_id, q_id_2, q_pos, k_ids, k_ids_2, k_pos, STRIDE_K, STRIDE_V,
            bias_t, bias_s, mask_t, mask_s, left, right, num_q, num_k, D, E, BD, BE, BQ, BK, SCALE,
            NATURAL, BITS, 0.0 if SERIES else SHIFT, CAP, BIAS, SLOPES, IDS, POSITIONS, LEFT, RIGHT,
            THRESHOLD, KEPT, PRECISION, CHECKED, CUT, MASKS, STEADY, SERIES, ZERO, False,
        )  # fmt: skip
    if SERIES:  # marks what is for the second launch
        END: tl.constexpr = pairs.SERIES_END * CAP / SCALE
        too_far = tl.max(far, 0) > END * END
        tl.store(flags_out + i_p, too_far.to(tl.int32))

    # rarely, all again: weights left their range, or nan came from what a mask hides
    factor = tl.full([BQ], 1.0, tl.float32)
    if STEADY:
        # The product m * BITS was rounded when it was subtracted, by up to 2^100 in units of
        # weights. That does not matter to a quotient of sums; here it is taken out of the sum.
        factor = tl.where(l == 0.0, 1.0, tl.math.exp2(-tl.fma(m, BITS, -(m * BITS))))
    m = m * (BITS * softmax.LN_2)
    if SERIES:
        m -= SHIFT
    if STEADY or MASKS or (mask is not None):
        bad = (addresses.odd_rows(acc) == 0.0) == 0
        if STEADY:
            bad |= looks & (((l >= _LEAST) & (l <= _MOST)) == 0)
        again = tl.max(bad.to(tl.int32), 0) > 0
        if SERIES:
            again &= too_far == 0
        if again:
            m = tl.full([BQ], float("-inf"), tl.float32)
            l = tl.zeros([BQ], tl.float32)
            factor = tl.full([BQ], 1.0, tl.float32)
            acc = tl.zeros([BQ, BE], tl.float32)
            PART: tl.constexpr = min(BK, 32)  # small, to need no more registers than the loop
            for j in tl.range(first * (BK // PART), last * (BK // PART), num_stages=1):
                m, l, far, acc = _step(
                    m, l, far, acc, b_q, j, False, True, key, value, bias, mask, slope, seed,
                    drop_b, drop_h, o_q, q_id, q_id_2, q_pos, k_ids, k_ids_2, k_pos, STRIDE_K,
                    STRIDE_V, bias_t, bias_s, mask_t, mask_s, left, right, num_q, num_k, D, E, BD,
                    BE, BQ, PART, SCALE, NATURAL, UNITS, SHIFT, CAP, BIAS, SLOPES, IDS, POSITIONS,
                    LEFT, RIGHT, THRESHOLD, KEPT, PRECISION, CHECKED, CUT, MASKS, False, False,
                    False, True,
                )  # fmt: skip
            m = m * (UNITS * softmax.LN_2)

    m = tl.where(l == 0.0, float("-inf"), m + SHIFT)
    l *= factor
    if sinks is not None:
        m, l, alpha = softmax.add_sinks(m, l, sinks + i_h * sinks_h, num_sinks, BN)
        factor *= alpha
    if IDS >= 1:  # padding sees only sinks
        acc = tl.where(looks[:, None], acc, 0.0)
    acc *= (factor / tl.where(l == 0.0, 1.0, l))[:, None]  # one quotient a row
    p_out = addresses.tile_pointers(
        out + (wide_b * num_q * HEADS + i_h) * E, row, HEADS * E, BQ, BE
    )
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=addresses.tile_mask(row, num_q, BQ, E, BE))
    p_lse = lse + (wide_b * HEADS + i_h) * num_q + o_q
    tl.store(p_lse, softmax.logsumexp(m, l), mask=o_q < num_q)


def _by_series(args: Any, cap: float) -> bool:
    """Whether logits are capped by a series as long as they are small beside their cap."""
    others = (args.bias, args.alibi_slopes, args.attention_mask)
    if args.query.dtype != jnp.bfloat16 or any(x is not None for x in others):
        return False
    in_range = _SERIES_SLOPES[0] <= args.softmax_scale / cap <= _SERIES_SLOPES[1]
    return cap <= _SERIES_CAP and in_range


def _lone_keys(args: Any, num_ids: int) -> bool:
    """Whether many rows may see a single key, whose weight has to be 1 to the bit."""
    left, right = (args.key.shape[1] if w is None else w for w in args.sliding_window)
    lone = num_ids > 0 or min(left + right + 1, args.key.shape[1]) < 2
    return lone and args.query.dtype.itemsize < 4


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Outputs (out, and lse when asked for) and residuals (lse)."""
    batch, t, num_heads, _ = args.query.shape
    made = call.Call(args, cfg)
    table = made.key_table()
    constants = made.constants()
    programs = cdiv(t, cfg.block_q) * num_heads * batch
    out_shape = [
        jax.ShapeDtypeStruct((*args.query.shape[:3], args.value.shape[-1]), args.query.dtype),
        jax.ShapeDtypeStruct((batch, num_heads, t), jnp.float32),
    ]

    def launch(flagged: Sequence[Any], flags: Any) -> list[Any]:
        inputs = [*made.operands(table, num_heads), *flagged]
        return triton_call(
            flash_attention_fwd_kernel,
            *inputs,
            grid=(programs,),
            out_shape=[*out_shape, flags],
            aliases=None if flagged[0] is None else {len(inputs) - 2: 0, len(inputs) - 1: 1},
            **cfg.launch(),
            BN=made.sink_block,
            CHECKED=made.cut_keys,
            LONE=_lone_keys(args, constants["IDS"]),
            BACKWARDS=args.sliding_window[1] is not None,
            **constants,
        )

    flags = None
    if constants["SHIFT"] and _by_series(args, constants["SHIFT"]):
        flags = jax.ShapeDtypeStruct((programs,), jnp.int32)
    out, lse, found = launch([None, None, None], flags)
    if flags is not None:
        out, lse, _ = launch([found, out, lse], None)
    return ((out, lse) if args.return_lse else (out,)), (lse,)
