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
    y = (1.0 - e) / (1.0 + e)
    # the quotient cancels near zero, 16 units in the last place at 0.01: there, the series to x^11
    s = x * x
    series = s * (62.0 / 2835.0 - s * (1382.0 / 155925.0))
    series = 1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0 - series)))
    y = tl.where(tl.abs(x) < 0.375, tl.abs(x) * series, y)
    return tl.where(x < 0, -y, y)


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
):
    """Scores in natural units; if not NATURAL, the bare dots, left to the softmax to scale."""
    x = dots
    if NATURAL:
        x = x * SCALE
    if BIAS:
        x += addresses.load_pairs(bias, o_q, o_k, bias_t, bias_s, num_q, num_k).to(tl.float32)
    if SLOPES:
        x += slope * (k_pos - q_pos).to(tl.float32)
    if CAP is not None:
        x = CAP * tanh(x / CAP)
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
