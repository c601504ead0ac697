"""Scores of one tile of query-key pairs: scale, cap, bias and slopes."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import addresses
from ejkernel.kernels._triton._blocks import mask as masks


class Scores(NamedTuple):
    """How a score is made of a dot product; see `logits`."""

    bias: Any  # `addresses.Pairs`, or None
    slopes: Any  # [h]
    SCALE: tl.constexpr
    CAP: tl.constexpr
    NATURAL: tl.constexpr
    UNITS: tl.constexpr
    SHIFT: tl.constexpr


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
def logits(dots, tile, at, slope, scores, num_q, num_k, ROOMY: tl.constexpr):
    """Scores, and what they are after the cap and before bias and slopes.

    They are in natural units; if not NATURAL, they are the bare dots, left to the softmax to scale.
    Under a cap and a SHIFT, which needs calls without bias and slopes, they are less by the cap
    and in units of twice the cap. ROOMY: see `mask`.
    """
    x = dots
    if scores.CAP is not None:
        if scores.SHIFT == 0.0:
            x = scores.CAP * tanh(tl.div_rn(x * scores.SCALE, scores.CAP))
        else:
            x = below_cap(x, scores.SCALE, scores.CAP)
    elif scores.NATURAL:
        x = x * scores.SCALE
    capped = x
    if scores.bias is not None:
        added = addresses.load_pairs(scores.bias, at, tile.o_q, tile.o_k, num_q, num_k)
        x += added.to(tl.float32)
    if scores.slopes is not None:
        x += slope * masks.distance(tile.q_pos, tile.k_pos, ROOMY)
    return x, capped
