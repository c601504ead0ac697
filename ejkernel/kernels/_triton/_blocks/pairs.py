"""What happens to one tile of query-key pairs: bias, slopes, caps and masks.

Tiles are [BQ, BK], or [BK, BQ] in backward over keys: whatever is passed is already expanded, with
the axis of the other side of size one.
"""

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import addresses, mask


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
def quick_capped(x, FACTOR: tl.constexpr, CAP: tl.constexpr):
    """CAP * tanh(x * FACTOR / CAP) to 4e-6 of CAP, enough for half precision.

    The unit for exp2 and reciprocals is what softmax keeps busy: here a reciprocal is a guess from
    the bits of its argument, refined by a step of Newton's and one of third order.
    """
    # 2^40 is as good as infinity; nan stays nan
    u = tl.minimum(x * (2.8853900817779268 * FACTOR / CAP), 40.0, tl.PropagateNan.ALL)
    d = 1.0 + tl.math.exp2(u)  # tanh = 1 - 2 / d
    r = (0x7EF311C3 - d.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    r = r * (2.0 - d * r)
    e = 1.0 - d * r
    r = r * (e * e + e) + r
    return CAP - (2.0 * CAP) * r


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
):
    """Scores in natural units; if not NATURAL, the bare dots, left to the softmax to scale."""
    x = dots
    FACTOR: tl.constexpr = 1.0 if BIAS or SLOPES or EXACT else SCALE  # left to the cap
    if NATURAL and (CAP is None or FACTOR == 1.0):
        x = x * SCALE
    if BIAS:
        x += addresses.load_pairs(bias, o_q, o_k, bias_t, bias_s, num_q, num_k).to(tl.float32)
    if SLOPES:
        x += slope * (k_pos - q_pos).to(tl.float32)
    if CAP is not None:
        if EXACT:
            x = CAP * tanh(tl.div_rn(x, CAP))
        else:
            x = quick_capped(x, FACTOR, CAP)
    return x


@triton.jit
def visible(
    o_q,
    o_k,
    q_id,
    k_id,
    q_id_2,
    k_id_2,
    q_pos,
    k_pos,
    left,
    right,
    num_q,
    num_k,
    IDS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Pairs inside the lengths, of the same segments and near each other."""
    seen = (o_q < num_q) & (o_k < num_k)
    if IDS >= 1:
        seen &= mask.same(q_id, k_id)
    if IDS >= 2:
        seen &= mask.same(q_id_2, k_id_2)
    if LEFT or RIGHT:
        seen &= mask.near(q_pos, k_pos, left, right, LEFT, RIGHT)
    return seen
