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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton._blocks import addresses, block_ranges, logits, philox, softmax
from ejkernel.kernels._triton._blocks import mask as masks
from ejkernel.kernels._triton.flash_attention import call, config

# what the weights of a row may sum up to, in units of its reference
_LEAST, _MOST = tl.constexpr(2.0**-60), tl.constexpr(2.0**100)
# Caps under which every row may have a logit of 0 as its reference, e^50 being 2^72; what a dot may
# be multiplied by to be in units of its cap, so that float32 has the constants of the series
_SERIES_CAP, _SERIES_SLOPES = 50.0, (5e-4, 1e3)


@triton.jit
def _step(
    m, l, far, acc, b_q, j, fresh, masked, keys, values, block, attention, BK: tl.constexpr,
    BITS: tl.constexpr, MODE,
):  # fmt: skip
    """Folds block j of the keys, which may be `masked`, into the state of the rows.

    A hidden key has weight 0, but 0 * nan is nan. WARY: a value that is not finite marks its key,
    and is taken as 0. STEADY: rows that saw nothing before a `fresh` block get their reference from
    it, and keep it. SERIES: logits are small beside their cap; `far` is the largest square of a
    dot. ZERO: the reference is a logit of 0.
    """
    STEADY: tl.constexpr = MODE.STEADY
    SERIES: tl.constexpr = MODE.SERIES
    WARY: tl.constexpr = MODE.WARY
    SHIFT: tl.constexpr = 0.0 if SERIES else attention.scores.SHIFT
    row = j * BK
    o_k = row + tl.arange(0, BK)
    b_k = addresses.load_tile(keys, row, BK, MODE.CHECKED)
    dots = tl.dot(b_q, tl.trans(b_k), input_precision=attention.PRECISION)  # [BQ, BK]
    if WARY:
        b_v = addresses.load_tile(values, row, BK, MODE.CHECKED)
        dots = tl.where(addresses.spoiled(b_v)[None, :], float("nan"), dots)
        b_v = addresses.finite(b_v)
    k_pos = masks.load_positions(attention.keys, block.at.batch, row, attention.num_k, 0, BK)
    tile = masks.Tile(block.o_q[:, None], o_k[None, :], block.q_pos[:, None], k_pos[None, :])
    if SERIES:
        squares = dots * dots
        far = tl.maximum(far, tl.max(squares, 1))
        x = logits.cap_series(
            dots,
            squares,
            attention.scores.SCALE / attention.scores.CAP,
            attention.scores.CAP * softmax.LOG2_E,
        )
    else:
        x, _ = logits.logits(
            dots,
            tile,
            block.at,
            block.slope,
            attention.scores,
            attention.num_q,
            attention.num_k,
            attention.keys.positions is None,
        )
    x = masks.hide(
        x, float("-inf"), masked, tile, block.at, row, block.ids, block.more_ids, attention.keys,
        attention.num_k, attention.mask, attention.num_q, attention.num_k, BK,
    )  # fmt: skip
    if MODE.ZERO:
        p = tl.math.exp2(x)  # [BQ, BK]
        l += tl.sum(p, 1)
    elif STEADY:
        if fresh:  # a row that sees nothing of it: a logit of 0
            top = softmax.shift(tl.max(x, 1), -SHIFT * softmax.LOG2_E / BITS)
            m = tl.where(l == 0.0, top, m)
        p = tl.math.exp2(tl.fma(x, BITS, -(m * BITS)[:, None]))
        l += tl.sum(p, 1)
    else:
        m, l, p, alpha = softmax.update(m, l, x, BITS)
        acc = acc * alpha[:, None]
    if attention.dropout is not None:
        BQ: tl.constexpr = acc.shape[0]
        kept = philox.keep(attention.dropout, block.drop_b, block.drop_h, block.o_q, row, BQ, BK)
        p = tl.where(kept, p * attention.dropout.FACTOR, 0.0)
    if not WARY:
        b_v = addresses.load_tile(values, row, BK, MODE.CHECKED)
    acc = tl.dot(p.to(b_v.dtype), b_v, acc, input_precision=attention.PRECISION)  # [BQ, BE]
    return m, l, far, acc


class Block(NamedTuple):
    """The queries that a program holds."""

    at: Any
    o_q: Any
    q_pos: Any
    ids: Any
    more_ids: Any
    slope: Any
    drop_b: Any
    drop_h: Any


class Mode(NamedTuple):
    STEADY: tl.constexpr
    SERIES: tl.constexpr
    ZERO: tl.constexpr
    WARY: tl.constexpr
    CHECKED: tl.constexpr


@triton.jit(do_not_specialize=(*call.LOOSE, "sinks.count"))
def flash_attention_fwd_kernel(
    query, key, value, attention, sinks, schedule, flags, old_out, old_lse, out, lse, flags_out,
    BQ: tl.constexpr, BK: tl.constexpr, CHECKED: tl.constexpr, LONE: tl.constexpr,
    BACKWARDS: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(attention.num_q, BQ)
    i_p = tl.program_id(0)
    if flags is not None:
        if tl.load(flags + i_p) == 0:
            return
    i_q, batch_head = block_ranges.order(i_p, num_blocks, schedule.interleaved)
    if BACKWARDS:  # causal: the longest rows start first
        i_q = num_blocks - 1 - i_q
    i_h = batch_head % attention.HEADS
    i_b = batch_head // attention.HEADS
    i_g = i_h // attention.GROUP
    GROUPS: tl.constexpr = attention.HEADS // attention.GROUP
    row = i_q * BQ
    o_q = row + tl.arange(0, BQ)
    wide_b = i_b.to(tl.int64)
    # exponents of float16 are too few, and with these one logit says little of the others
    STEADY: tl.constexpr = (
        (query.dtype.element_ty != tl.float16)
        and (attention.scores.bias is None)
        and (attention.scores.slopes is None)
        and (attention.mask.dense is None)
    )
    SERIES: tl.constexpr = flags_out is not None

    query += (wide_b * attention.num_q * attention.HEADS + i_h) * attention.D
    key += (wide_b * attention.num_k * GROUPS + i_g) * attention.D
    value += (wide_b * attention.num_k * GROUPS + i_g) * attention.E
    b_q = addresses.load_tile(
        addresses.Rows(
            query, attention.HEADS * attention.D, attention.num_q, attention.D, attention.BD
        ),
        row,
        BQ,
        True,
    )

    tokens = attention.queries
    window = attention.mask.window
    q_pos = masks.load_positions(tokens, wide_b, row, attention.num_q, window.offset, BQ)
    q_id = masks.load_ids(tokens.ids, tokens.ids_step, wide_b, row, attention.num_q, BQ)
    q_id_2 = masks.load_ids(tokens.more_ids, tokens.more_ids_step, wide_b, row, attention.num_q, BQ)
    looks = (o_q < attention.num_q) & (q_id >= 0) & (q_id_2 >= 0)  # rows that are no padding
    slope = 0.0
    if attention.scores.slopes is not None:
        slope = tl.load(attention.scores.slopes + i_h).to(tl.float32)
    drop_b, drop_h = philox.indices(attention.dropout, i_b, i_h)
    at = addresses.Place(wide_b, i_h.to(tl.int64))
    block = Block(at, o_q, q_pos, q_id, q_id_2, slope, drop_b, drop_h)

    first, full, ragged, last = block_ranges.bounds(
        schedule, wide_b, i_q, attention.num_q, attention.num_k, window.offset, window.left, window.right,
        BQ, BK,
    )  # fmt: skip

    # LONE: a row's only key has to be its reference, to weigh 1 to the bit. The row may see nothing
    # of earlier blocks, but all of any without a mask: whoever has a sum has a reference.
    ZERO: tl.constexpr = SERIES and not LONE
    UNITS: tl.constexpr = attention.scores.UNITS
    SHIFT: tl.constexpr = attention.scores.SHIFT
    BITS: tl.constexpr = 1.0 if SERIES else UNITS
    m = tl.full([BQ], 0.0 if ZERO else float("-inf"), tl.float32)
    l = tl.zeros([BQ], tl.float32)
    far = tl.zeros([BQ], tl.float32)
    acc = tl.zeros([BQ, attention.BE], tl.float32)
    for j in range(first, last):
        masked = (j < full) | (j >= ragged)
        fresh = j == first
        if LONE:
            fresh = masked | (j == full)
        m, l, far, acc = _step(
            m, l, far, acc, b_q, j, fresh, masked,
            addresses.Rows(key, GROUPS * attention.D, attention.num_k, attention.D, attention.BD),
            addresses.Rows(value, GROUPS * attention.E, attention.num_k, attention.E, attention.BE),
            block, attention, BK, BITS, Mode(STEADY, SERIES, ZERO, False, CHECKED),
        )  # fmt: skip
    if SERIES:  # marks what is for the second launch
        END: tl.constexpr = logits.SERIES_END * attention.scores.CAP / attention.scores.SCALE
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
    if STEADY or attention.mask.BLOCKS or (attention.mask.dense is not None):
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
            acc = tl.zeros([BQ, attention.BE], tl.float32)
            PART: tl.constexpr = min(BK, 32)  # small, to need no more registers than the loop
            for j in tl.range(first * (BK // PART), last * (BK // PART), num_stages=1):
                m, l, far, acc = _step(
                    m, l, far, acc, b_q, j, False, True,
                    addresses.Rows(key, GROUPS * attention.D, attention.num_k, attention.D, attention.BD),
                    addresses.Rows(value, GROUPS * attention.E, attention.num_k, attention.E, attention.BE),
                    block, attention, PART, UNITS, Mode(False, False, False, True, CHECKED),
                )  # fmt: skip
            m = m * (UNITS * softmax.LN_2)

    m = tl.where(l == 0.0, float("-inf"), m + SHIFT)
    l *= factor
    if sinks is not None:
        m, l, alpha = softmax.add_sinks(m, l, sinks, i_h)
        factor *= alpha
    if tokens.ids is not None:  # padding sees only sinks
        acc = tl.where(looks[:, None], acc, 0.0)
    acc *= (factor / tl.where(l == 0.0, 1.0, l))[:, None]  # one quotient a row
    out += (wide_b * attention.num_q * attention.HEADS + i_h) * attention.E
    addresses.store_tile(
        addresses.Rows(
            out, attention.HEADS * attention.E, attention.num_q, attention.E, attention.BE
        ),
        row,
        acc,
        BQ,
    )
    p_lse = lse + (wide_b * attention.HEADS + i_h) * attention.num_q + o_q
    tl.store(p_lse, softmax.logsumexp(m, l), mask=o_q < attention.num_q)


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
    inputs = made.arrays() | {
        "attention": made.bundle(),
        "sinks": made.sinks(),
        "schedule": made.schedule(made.key_table(), num_heads),
    }
    programs = cdiv(t, cfg.block_q) * num_heads * batch
    outputs = {
        "out": jax.ShapeDtypeStruct(
            (*args.query.shape[:3], args.value.shape[-1]), args.query.dtype
        ),
        "lse": jax.ShapeDtypeStruct((batch, num_heads, t), jnp.float32),
    }

    def launch(old: dict[str, Any], flags: Any) -> dict[str, Any]:
        again = old["flags"] is not None
        return triton_call(
            flash_attention_fwd_kernel,
            inputs=inputs | old,
            outputs=outputs | {"flags_out": flags},
            grid=(programs,),
            aliases={"out": "old_out", "lse": "old_lse"} if again else None,
            **cfg.launch(),
            BQ=cfg.block_q,
            BK=cfg.block_k,
            CHECKED=made.cut_keys,
            LONE=_lone_keys(args, len(made.tokens.ids)),
            BACKWARDS=args.sliding_window[1] is not None,
        )

    flags, shift = None, inputs["attention"].scores.SHIFT
    if shift and _by_series(args, shift):
        flags = jax.ShapeDtypeStruct((programs,), jnp.int32)
    found = launch(dict.fromkeys(("flags", "old_out", "old_lse")), flags)
    if flags is not None:
        old = {"flags": found["flags_out"], "old_out": found["out"], "old_lse": found["lse"]}
        found = launch(old, None)
    out, lse = found["out"], found["lse"]
    return ((out, lse) if args.return_lse else (out,)), (lse,)
