"""Scores of one tile of query-key pairs: scale, cap, bias and slopes."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import addresses


class Scores(NamedTuple):
    """How a score is made of the dot product of a query and a key."""

    bias: Any  # `addresses.Pairs`, or None
    slopes: Any  # [h], or None
    SCALE: tl.constexpr
    CAP: tl.constexpr
    FINE: tl.constexpr  # the cap is exact relative to small scores, and not only to the cap
    FACTOR: tl.constexpr  # times `logits` are natural units: SCALE for bare dot products, else 1


@triton.jit
def soft_cap(x, SCALE: tl.constexpr, CAP: tl.constexpr, FINE: tl.constexpr):
    """CAP tanh(SCALE x / CAP), without overflow. It errs by 2e-7 of CAP; if FINE, of itself."""
    if FINE:
        y = x * (SCALE / CAP)
        e = tl.math.exp2(tl.abs(y) * -2.8853900817779268)  # e^(-2|y|)
        t = (1.0 - e) / (1.0 + e)
        # the quotient cancels near zero: there, the series to y^11
        s = y * y
        series = s * (62.0 / 2835.0 - s * (1382.0 / 155925.0))
        series = 1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0 - series)))
        t = tl.where(tl.abs(y) < 0.375, tl.abs(y) * series, t)
        return tl.where(y < 0, -t, t) * CAP
    else:
        # CAP - 2 CAP / w with w = 1 + e^(2y): a quotient takes eight instructions, the square of
        # rsqrt and a step of Newton's four. The bound keeps w finite: 0 * inf is nan.
        y = tl.minimum(x * (2.8853900817779268 * SCALE / CAP), 60.0, tl.PropagateNan.ALL)
        w = 1.0 + tl.math.exp2(y)
        root = tl.math.rsqrt(w)
        r = root * root
        r += r * (1.0 - w * r)
        return CAP - (2.0 * CAP) * r


@triton.jit
def cap_slope(capped, CAP: tl.constexpr):
    """Derivative of a capped score by what is capped; 0 where a hidden pair has -inf."""
    y = capped * (1.0 / CAP)
    return tl.maximum(1.0 - y * y, 0.0)


@triton.jit
def logits(dots, tile, at, slope, scores, num_q, num_k):
    """Scores in units of 1 / FACTOR; and what they are after the cap, before bias and slopes."""
    x = dots
    if scores.CAP is not None:
        x = soft_cap(x, scores.SCALE, scores.CAP, scores.FINE)
    elif scores.FACTOR == 1.0:
        x = x * scores.SCALE
    capped = x
    if scores.bias is not None:
        bias = addresses.load_pairs(scores.bias, at, tile.o_q, tile.o_k, num_q, num_k)
        x += bias.to(tl.float32)
    if scores.slopes is not None:
        x += slope * (tile.k_pos - tile.q_pos).to(tl.float32)
    return x, capped
