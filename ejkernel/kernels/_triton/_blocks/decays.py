"""Decays inside a chunk: products of the gates of their own steps, never quotients of longer ones.

A log gate of -20 after which gates are weak would otherwise cost the weak ones their digits, and
exp(-cum) overflows. Sums of log gates of elements are products with matrices of zeros and ones.

With a gate for each element, two tokens of a chunk meet in the middle of the smallest block of
2, 4, .. C tokens that holds both: the decay from the earlier token to the middle goes to the key,
the rest to the query. Each level of blocks is then one product of matrices (`level_weights`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import chunks

LOG2_E = tl.constexpr(1.4426950408889634)
# exp(-1000) is 0 in float32, and so is what any stronger gate leaves; 0 * -inf would be nan
_STRONGEST = tl.constexpr(-1000.0)


class Gates(NamedTuple):
    """Log gates of the state's rows: of a head and token, of an element, of a head."""

    g: Any  # `chunks.Operand` of width 1, or None
    gk: Any  # `chunks.Operand`, or None
    gamma: Any  # [h], or None
    TERMS: tl.constexpr  # bfloat16 numbers that a gate is the sum of; 0: products in float32


@triton.jit
def decay(x):
    """e^x."""
    return tl.math.exp2(x * LOG2_E)


@triton.jit
def _constant_gate(gates, i_h):
    gamma = tl.load(gates.gamma + i_h).to(tl.float32)
    return tl.maximum(gamma, _STRONGEST, tl.PropagateNan.ALL)


@triton.jit
def head_gates(gates, span, i_h, o_c):
    """Log gates of one head that all elements share, float32 [C]; 0 beyond the tokens."""
    total = tl.zeros(o_c.shape, tl.float32)
    inside = o_c < span.count
    if gates.g is not None:
        p = gates.g.base + span.token * gates.g.STRIDE + i_h + span.step * o_c * gates.g.STRIDE
        total += tl.load(p, mask=inside, other=0.0).to(tl.float32)
    if gates.gamma is not None:
        total += tl.where(inside, tl.load(gates.gamma + i_h).to(tl.float32), 0.0)
    return tl.maximum(total, _STRONGEST, tl.PropagateNan.ALL)


@triton.jit
def element_gates(gates, span, i_h, o_c, o_d):
    """Log gates of the elements o_d, float32 [C, BD]."""
    b_a = chunks.load(gates.gk, span, i_h, o_c, o_d).to(tl.float32)
    if (gates.g is not None) or (gates.gamma is not None):
        b_a += head_gates(gates, span, i_h, o_c)[:, None]
    return tl.maximum(b_a, _STRONGEST, tl.PropagateNan.ALL)


# Sums over a chunk, for gates of elements


@triton.jit
def sums(weights, x, TERMS: tl.constexpr):
    """weights [C, C] of zeros and ones times x [C, BD], in float32.

    All of a sum's terms count relative to the sum itself: 16 bits of each are enough for an
    exponent of about -10, and where it is stronger the decay is nearly 0.
    """
    if TERMS == 0:
        return tl.dot(weights.to(tl.float32), x, input_precision="ieee")
    else:
        ones = weights.to(tl.bfloat16)
        high = x.to(tl.bfloat16)
        total = tl.dot(ones, high)
        if TERMS == 2:
            total = tl.dot(ones, (x - high.to(tl.float32)).to(tl.bfloat16), total)
        return total


@triton.jit
def up_to(C: tl.constexpr):
    """[t, u]: step u is in the decay from the chunk's start to t."""
    o_c = tl.arange(0, C)
    return o_c[None, :] <= o_c[:, None]


@triton.jit
def after(C: tl.constexpr):
    """[t, u]: step u is in the decay from t to the chunk's end."""
    o_c = tl.arange(0, C)
    return o_c[None, :] > o_c[:, None]


@triton.constexpr_function
def levels(size):
    """Of blocks of 1, 2, 4, .. tokens up to a chunk; at level 0 a token meets itself."""
    return size.bit_length()


@triton.jit
def level_steps(level, C: tl.constexpr, TRANSPOSED: tl.constexpr):
    """[t, u]: step u is in the decay between t and the middle of its block of 2^level tokens.

    As a range of u for each t: what does not depend on the level would be kept in registers over
    the loop over levels, one for each element.
    """
    o_c = tl.arange(0, C)
    half = (1 << level) >> 1
    middle = (o_c & -(1 << level)) + half
    first = tl.minimum(middle, o_c + 1)
    last = tl.where(level == 0, first, tl.maximum(middle, o_c + 1))
    if TRANSPOSED:
        return (o_c[:, None] >= first[None, :]) & (o_c[:, None] < last[None, :])
    else:
        return (o_c[None, :] >= first[:, None]) & (o_c[None, :] < last[:, None])


@triton.jit
def level_pairs(level, C: tl.constexpr):
    """[t, s]: s is in the first and t in the second half of the same block of 2^level tokens."""
    o_c = tl.arange(0, C)
    half = (1 << level) >> 1
    first = o_c & -(1 << level)
    meets = ((o_c & half) != 0) | (level == 0)
    last = tl.where(meets, first + tl.maximum(half, 1), first)
    return (o_c[None, :] >= first[:, None]) & (o_c[None, :] < last[:, None])


# One gate for a head


@triton.jit
def head_pairs(gates, b_a, i_h, C: tl.constexpr):
    """Decays between tokens of a chunk, [t, s]; 0 to an earlier token. b_a: `head_gates`."""
    o_t = tl.arange(0, C)[:, None]
    o_s = tl.arange(0, C)[None, :]
    if gates.g is not None:
        between = tl.cumsum(tl.where(o_t > o_s, b_a[:, None], 0.0), 0)
        return tl.where(o_t >= o_s, decay(between), 0.0)
    elif gates.gamma is not None:
        gamma = _constant_gate(gates, i_h)
        return tl.where(o_t >= o_s, decay((o_t - o_s).to(tl.float32) * gamma), 0.0)
    else:
        return tl.where(o_t >= o_s, 1.0, 0.0)


@triton.jit
def head_sums(gates, b_a, span, i_h, C: tl.constexpr):
    """Sums of the log gates of one head from the start to each token, and to the end after it."""
    if gates.g is not None:
        o_t = tl.arange(0, C)[:, None]
        o_u = tl.arange(0, C)[None, :]
        start = tl.sum(tl.where(o_u <= o_t, b_a[None, :], 0.0), 1)
        end = tl.sum(tl.where(o_u > o_t, b_a[None, :], 0.0), 1)
        return start, end, tl.sum(b_a, 0)
    else:
        o_c = tl.arange(0, C)
        gamma = tl.full([], 0.0, tl.float32)
        if gates.gamma is not None:
            gamma = _constant_gate(gates, i_h)
        start = tl.minimum(o_c + 1, span.count).to(tl.float32) * gamma
        end = tl.maximum(span.count - 1 - o_c, 0).to(tl.float32) * gamma
        return start, end, span.count.to(tl.float32) * gamma
