"""Online softmax in base 2 (Dao, 2023): running maximum, sum and weighted values of a row."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Up to a logsumexp of 1024 rounding errors change weights by 1.8e-4 of themselves, half of what
# float16 rounds away.
LARGE = tl.constexpr(1024.0)


class Sinks(NamedTuple):
    """Extra logits [1 or h, count], in natural units."""

    base: Any
    step: Any  # of a head
    count: Any
    BLOCK: tl.constexpr  # a power of two, at least count


@triton.jit
def finite(m):
    """A maximum or logsumexp to subtract: 0 for a row that has seen no key, which has -inf."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def update(m, l, x, FACTOR: tl.constexpr):
    """Folds a tile of logits x into the maximum and sum of its rows; weights and rescaling too.

    Logits and maxima are in units of 1 / FACTOR, FACTOR > 0. They are scaled after subtraction:
    the other way round, a fused multiply-add could make exponents far above 0 of large logits. A
    row may have no finite logit yet: masks hide some, and products overflow.
    """
    m_new = tl.maximum(m, tl.max(x, 1))
    reference = finite(m_new)
    p = tl.math.exp2((x - reference[:, None]) * (FACTOR * LOG2_E))  # [BQ, BK]
    alpha = tl.math.exp2((m - reference) * (FACTOR * LOG2_E))  # [BQ]
    return m_new, l * alpha + tl.sum(p, 1), p, alpha


@triton.jit
def exponents(x, lse, FACTOR: tl.constexpr, EXACT: tl.constexpr):
    """(x FACTOR - lse) in base 2, where `lse` is the logsumexp of a row: weights are their exp2.

    If not EXACT, this is one fused multiply-add, with rounding errors of the logsumexp: see LARGE.
    EXACT takes three instructions more. The minimum bounds weights by one, and keeps the compiler
    from fusing product and difference, so that a logit that is its row's logsumexp has a weight of
    one, however large it is.
    """
    lse = finite(lse)
    if EXACT:
        return (tl.minimum(x * FACTOR, lse, tl.PropagateNan.ALL) - lse) * LOG2_E
    else:
        return x * (FACTOR * LOG2_E) - lse * LOG2_E


@triton.jit
def add_sinks(m, l, sinks, i_h):
    """Counts extra logits in the sum, natural units; what remains of the values is alpha."""
    o_n = tl.arange(0, sinks.BLOCK)
    p = sinks.base + i_h * sinks.step + o_n
    x = tl.load(p, mask=o_n < sinks.count, other=float("-inf")).to(tl.float32)
    m_new = tl.maximum(m, tl.max(x, 0))
    reference = finite(m_new)
    alpha = tl.math.exp2((m - reference) * LOG2_E)
    extra = tl.sum(tl.math.exp2((x[None, :] - reference[:, None]) * LOG2_E), 1)
    return m_new, l * alpha + extra, alpha


@triton.jit
def add_sinks_of_heads(m, l, sinks, heads, valid):
    """The same for rows of several heads; rows that are not `valid` get no sinks."""
    o_n = tl.arange(0, sinks.BLOCK)
    p = sinks.base + heads[:, None] * sinks.step + o_n[None, :]
    inside = valid[:, None] & (o_n < sinks.count)[None, :]
    x = tl.load(p, mask=inside, other=float("-inf")).to(tl.float32)
    m_new = tl.maximum(m, tl.max(x, 1))
    reference = finite(m_new)
    alpha = tl.math.exp2((m - reference) * LOG2_E)
    extra = tl.sum(tl.math.exp2((x - reference[:, None]) * LOG2_E), 1)
    return m_new, l * alpha + extra, alpha


@triton.jit
def logsumexp(m, l):
    """Natural logarithm of the sum, from a maximum in natural units; -inf for a row of no keys."""
    return tl.where(l == 0.0, float("-inf"), m + tl.math.log2(l) * LN_2)
