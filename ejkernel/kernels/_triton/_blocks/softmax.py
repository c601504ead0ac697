"""Online softmax in base 2 (Dao, 2023): running maximum, sum and weighted values of a row."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def shift(m, ORIGIN: tl.constexpr = 0.0):
    """The running maximum where there is one: a row that saw only masked keys has -inf."""
    return tl.where(m == float("-inf"), ORIGIN, m)


@triton.jit
def base(lse, SHIFT: tl.constexpr):
    """A logsumexp in base 2, for logits that are less by SHIFT; 0 for a row without keys."""
    return (shift(lse) - SHIFT) * LOG2_E


@triton.jit
def update(m, l, x, UNITS: tl.constexpr):
    """Folds a tile of logits x into the maximum and sum of its rows; weights and rescaling too.

    Logits are in units of 1 / UNITS bits, UNITS > 0. A row may have no finite logit yet: masks hide
    some, and products overflow.
    """
    m_new = tl.maximum(m, tl.max(x, 1) * UNITS)
    reference = shift(m_new)
    p = tl.math.exp2(x * UNITS - reference[:, None])  # [BQ, BK]
    alpha = tl.math.exp2(m - reference)  # [BQ]
    return m_new, l * alpha + tl.sum(p, 1), p, alpha


@triton.jit
def add_sinks(m, l, sinks, num_sinks, BN: tl.constexpr):
    """Counts extra logits in the sum, natural units; what remains of the values is alpha."""
    o_n = tl.arange(0, BN)
    x = tl.load(sinks + o_n, mask=o_n < num_sinks, other=float("-inf")).to(tl.float32) * LOG2_E
    m_new = tl.maximum(m, tl.max(x, 0))
    reference = shift(m_new)
    alpha = tl.math.exp2(m - reference)
    extra = tl.sum(tl.math.exp2(x[None, :] - reference[:, None]), 1)
    return m_new, l * alpha + extra, alpha


@triton.jit
def logsumexp(m, l):
    """Natural logarithm of the sum; -inf for a row without keys."""
    return tl.where(l == 0.0, float("-inf"), (m + tl.math.log2(l)) * LN_2)
