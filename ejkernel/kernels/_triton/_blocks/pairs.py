"""What happens to one tile of query-key pairs: bias, slopes, caps and masks.

Tiles are [BQ, BK], or [BK, BQ] in backward over keys: offsets and positions are already expanded,
with the axis of the other side of size one.
"""

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import addresses
from ejkernel.kernels._triton._blocks import mask as masks

# A hidden logit that is its own capped value, in backward: its weight is 0, and the cap's derivative
# still finite
DEEP = tl.constexpr(-1e15)
SERIES_END = tl.constexpr(1.2)  # of `cap_series`


@triton.jit
def tanh(x):
    """Exact to float32: through exp2, without overflow."""
    e = tl.math.exp2(-2.8853900817779268 * tl.abs(x))  # e^(-2|x|)
    y = tl.div_rn(1.0 - e, 1.0 + e)
    # the quotient cancels near zero, 16 units in the last place at 0.01: there, the series to x^11
    s = x * x
    series = s * (62.0 / 2835.0 - s * (1382.0 / 155925.0))
    series = 1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0 - series)))
    y = tl.where(tl.abs(x) < 0.375, tl.abs(x) * series, y)
    return tl.where(x < 0, -y, y)


@triton.jit
def below_cap(x, FACTOR: tl.constexpr, CAP: tl.constexpr):
    """z for which CAP + 2 CAP z = CAP tanh(x * FACTOR / CAP), to 1.2e-6: enough for half precision.

    The unit for exp2 and reciprocals is what softmax keeps busy: here a reciprocal is a guess from
    the bits of its argument and two steps of Newton's, with constants that halve what is left.
    """
    # 2^40 is as good as infinity; nan stays nan
    u = tl.minimum(x * (2.8853900817779268 * FACTOR / CAP), 40.0, tl.PropagateNan.ALL)
    d = 1.0 + tl.math.exp2(u)  # z = -1 / d
    r = (0x7EF3F000 - d.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    r = r * (2.0015 - d * r)
    return r * (d * r - 2.0000011)


@triton.jit
def cap_series(x, square, SLOPE: tl.constexpr, UNITS: tl.constexpr):
    """UNITS tanh(x * SLOPE), to 1.6e-6 UNITS and rounding while |x * SLOPE| <= SERIES_END.

    A polynomial in the square of x that errs least, with all factors in its constants.
    """
    S: tl.constexpr = SLOPE * SLOPE
    U: tl.constexpr = UNITS * SLOPE
    y = square * (-0.0018749009712 * U * S * S * S * S * S) + 0.0132465189239 * U * S * S * S * S
    y = y * square - 0.0478776622570 * U * S * S * S
    y = y * square + 0.1310811998187 * U * S * S
    y = y * square - 0.3329641294273 * U * S
    return x * (y * square + 0.9999824651919 * U)


@triton.jit
def cap_slope(x, CAP: tl.constexpr, EXACT: tl.constexpr):
    """Derivative of a capped score by what is capped, from the second result of `logits`."""
    if EXACT:
        y = x * (1.0 / CAP)
        return 1.0 - y * y
    else:
        return -4.0 * x * (1.0 + x)


@triton.jit
def logits(
    dots,
    o_q,
    o_k,
    q_pos,
    k_pos,
    bias,
    bias_t,
    bias_s,
    slope,
    num_q,
    num_k,
    SCALE: tl.constexpr,
    NATURAL: tl.constexpr,
    BIAS: tl.constexpr,
    SLOPES: tl.constexpr,
    CAP: tl.constexpr,
    EXACT: tl.constexpr,
    ROOMY: tl.constexpr,
):
    """Scores, and what they are after the cap and before bias and slopes.

    They are in natural units; if not NATURAL, they are the bare dots, left to the softmax to scale.
    Under a cap and not EXACT, which needs calls without bias and slopes, they are less by the cap
    and in units of twice the cap. ROOMY: see `mask`.
    """
    x = dots
    if CAP is not None:
        if EXACT:
            x = CAP * tanh(tl.div_rn(x * SCALE, CAP))
        else:
            x = below_cap(x, SCALE, CAP)
    elif NATURAL:
        x = x * SCALE
    capped = x
    if BIAS:
        x += addresses.load_pairs(bias, o_q, o_k, bias_t, bias_s, num_q, num_k).to(tl.float32)
    if SLOPES:
        x += slope * masks.distance(q_pos, k_pos, ROOMY)
    return x, capped


@triton.jit
def hide(
    x, other, masked, row, mask, o_q, o_k, q_pos, k_pos, held, held_2, ids, ids_2, mask_t, mask_s,
    left, right, num_q, num_k, num_s,
    SIZE: tl.constexpr, IDS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    CUT: tl.constexpr, MASKS: tl.constexpr, ROOMY: tl.constexpr,
):  # fmt: skip
    """A tile [held, streamed] with something else in place of hidden pairs.

    Seen are pairs of the same segments, near each other, inside the lengths where blocks are CUT,
    and in the dense mask; all but the last matter only in blocks that are `masked`, if any is
    (MASKS). Ids of the held side are vectors; those of the streamed side, which has `num_s` tokens,
    are loaded: SIZE of them, from `row` on. ROOMY: see `mask.near`.
    """
    if MASKS:
        if masked:
            seen = tl.full((1, 1), 1, tl.int1)
            if CUT:
                seen &= (o_q < num_q) & (o_k < num_k)
            if IDS >= 1:
                b_i = addresses.load_row(ids, row, num_s, SIZE, -1)
                seen &= masks.same(held[:, None], b_i[None, :])
            if IDS >= 2:
                b_i_2 = addresses.load_row(ids_2, row, num_s, SIZE, -1)
                seen &= masks.same(held_2[:, None], b_i_2[None, :])
            if LEFT or RIGHT:
                seen &= masks.near(q_pos, k_pos, left, right, LEFT, RIGHT, ROOMY)
            x = tl.where(seen, x, other)
    if mask is not None:
        given = addresses.load_pairs(mask, o_q, o_k, mask_t, mask_s, num_q, num_k)
        x = tl.where(given != 0, x, other)
    return x
