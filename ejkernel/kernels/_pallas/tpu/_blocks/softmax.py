"""Online softmax in base 2 (Dao, 2023): running maximum and sum of the rows of a tile."""

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas.tpu._blocks import tiles

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# Below every logit, and finite: masked logits are -inf, and -inf - -inf would be nan.
LEAST = -1.7e38


def update(
    m: jax.Array, l: jax.Array, x: jax.Array, units: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Folds a tile of logits into its rows' maximum and partial sums; weights and rescaling too.

    Logits and maxima are in units of 1 / `units` bits, units > 0, and are scaled after subtraction:
    a rounded maximum could be less than a product that is not rounded. `m` is a column, `l` has
    partial sums.
    """
    bits = (lambda y: y) if units == 1.0 else (lambda y: y * units)
    m_new = jnp.maximum(m, jnp.max(x, axis=1, keepdims=True))
    p = jnp.exp2(bits(x - tiles.wide(m_new, x.shape[1])))
    alpha = jnp.exp2(bits(m - m_new))
    return m_new, l * alpha[:, : l.shape[1]] + tiles.partial_sums(p), p, alpha


def weights(x: jax.Array, lse: jax.Array, units: float) -> jax.Array:
    """Weights from logits and their logsumexp; a row whose logsumexp is inf has none.

    The minimum bounds them by one. It is taken of rounded products, as the logsumexp was made of,
    so that a logit which is its row's logsumexp has a weight of one.
    """
    natural = x if units == LOG2_E else x * (units * LN_2)
    return jnp.exp2((jnp.minimum(natural, lse) - lse) * LOG2_E)


def finish(
    m: jax.Array, l: jax.Array, units: float, sink: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The factor that makes weighted values the output, and the rows' logsumexp; columns.

    `sink` is one more logit, in natural units, that has no value.
    """
    m = m * (units * LN_2)
    total = jnp.broadcast_to(jnp.sum(l, axis=1, keepdims=True), m.shape)
    alpha = jnp.ones_like(m)
    if sink is not None:
        m_new = jnp.maximum(m, sink)
        alpha = jnp.exp2((m - m_new) * LOG2_E)
        total = total * alpha + jnp.exp2((sink - m_new) * LOG2_E)
        m = m_new
    some = total != 0.0
    lse = jnp.where(some, m + jnp.log2(jnp.where(some, total, 1.0)) * LN_2, -jnp.inf)
    return alpha / jnp.where(some, total, 1.0), lse
