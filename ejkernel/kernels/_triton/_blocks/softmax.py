"""Online softmax in base 2 (Dao, 2023): running maximum, sum and weighted values of a row."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# The largest logsumexp for which half precision needs no EXACT `weights`: those are off by 1.8e-4 of
# themselves, half of what float16 rounds away.
LARGE = tl.constexpr(1024.0)


class Sinks(NamedTuple):
    """Extra logits [1 or h, count], in natural units."""

    base: Any
    step: Any  # of a head
    count: Any
    BLOCK: tl.constexpr


@triton.jit
def shift(m, ORIGIN: tl.constexpr = 0.0):
    """The running maximum where there is one: a row that saw only masked keys has -inf."""
    return tl.where(m == float("-inf"), ORIGIN, m)


@triton.jit
def size(lse):
    """The magnitude of a logsumexp; 0 for a row without keys."""
    return tl.abs(shift(lse))


@triton.jit
def weights(x, lse, UNITS: tl.constexpr, SHIFT: tl.constexpr, EXACT: tl.constexpr):
    """Weights from logits that are less by SHIFT and from the logsumexp.

    EXACT costs three instructions more. The minimum bounds weights by one, and keeps the compiler
    from fusing product and difference, so that a maximum which is its row's logsumexp has a weight
    of one. If not EXACT, exponents have three rounding errors of the logsumexp: see LARGE.
    """
    reference = shift(lse) - SHIFT  # 0 for a row without keys
    if EXACT:
        x = tl.minimum(x * (UNITS * LN_2), reference, tl.PropagateNan.ALL) - reference
        return tl.math.exp2(x * LOG2_E)
    else:
        return tl.math.exp2(x * UNITS - reference * LOG2_E)


@triton.jit
def update(m, l, x, UNITS: tl.constexpr):
    """Folds a tile of logits x into the maximum and sum of its rows; weights and rescaling too.

    Logits and maxima are in units of 1 / UNITS bits, UNITS > 0. They are scaled after subtraction:
    the other way round, a fused multiply-add could make exponents far above 0 of large logits. A
    row may have no finite logit yet: masks hide some, and products overflow.
    """
    m_new = tl.maximum(m, tl.max(x, 1))
    reference = shift(m_new)
    p = tl.math.exp2((x - reference[:, None]) * UNITS)  # [BQ, BK]
    alpha = tl.math.exp2((m - reference) * UNITS)  # [BQ]
    return m_new, l * alpha + tl.sum(p, 1), p, alpha


@triton.jit
def add_sinks(m, l, sinks, i_h):
    """Counts extra logits in the sum, natural units; what remains of the values is alpha."""
    o_n = tl.arange(0, sinks.BLOCK)
    p = sinks.base + i_h * sinks.step + o_n
    x = tl.load(p, mask=o_n < sinks.count, other=float("-inf")).to(tl.float32)
    m_new = tl.maximum(m, tl.max(x, 0))
    reference = shift(m_new)
    alpha = tl.math.exp2((m - reference) * LOG2_E)
    extra = tl.sum(tl.math.exp2((x[None, :] - reference[:, None]) * LOG2_E), 1)
    return m_new, l * alpha + extra, alpha


@triton.jit
def logsumexp(m, l):
    """Natural logarithm of the sum, from a maximum in natural units; -inf for a row without keys."""
    return tl.where(l == 0.0, float("-inf"), m + tl.math.log2(l) * LN_2)
