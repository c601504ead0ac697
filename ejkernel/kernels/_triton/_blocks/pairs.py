"""What happens to one tile of query-key pairs: bias, slopes, caps and masks.

Tiles are [BQ, BK], or [BK, BQ] in backward over keys: whatever is passed is already expanded, with
the axis of the other side of size one.
"""

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import addresses, mask

# A hidden logit under a cap, in backward: its weight is 0, and the cap's derivative still finite
DEEP = tl.constexpr(-1e15)


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
def cap_slope(x, CAP: tl.constexpr, EXACT: tl.constexpr):
    """Derivative of a capped logit, as `logits` gives it, after what is capped."""
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
):
    """Scores in natural units; if not NATURAL, the bare dots, left to the softmax to scale.

    Under a cap and not EXACT, scores less the cap, in units of twice the cap.
    """
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
            x = below_cap(x, FACTOR, CAP)
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
    CUT: tl.constexpr,
    ROOMY: tl.constexpr,
):
    """Pairs of the same segments, near each other and, where blocks are CUT, inside the lengths."""
    seen = tl.full((1, 1), 1, tl.int1)
    if CUT:
        seen &= (o_q < num_q) & (o_k < num_k)
    if IDS >= 1:
        seen &= mask.same(q_id, k_id)
    if IDS >= 2:
        seen &= mask.same(q_id_2, k_id_2)
    if LEFT or RIGHT:
        seen &= mask.near(q_pos, k_pos, left, right, LEFT, RIGHT, ROOMY)
    return seen
