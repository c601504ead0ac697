"""Online softmax: a running maximum, sum and weighted sum of values over blocks of keys."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class State(NamedTuple):
    """Running statistics of rows; `m` is -inf until a visible key is met."""

    m: jax.Array  # [..., t] maximum
    l: jax.Array  # [..., t] sum of exp(x - m)
    acc: jax.Array  # [..., t, e] sum of exp(x - m) * v


def init(rows: tuple[int, ...], width: int, dtype: jnp.dtype) -> State:
    """The state before any key."""
    return State(
        jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, width), dtype)
    )


def shift(m: jax.Array) -> jax.Array:
    """A finite shift for exp: a row that has seen only masked keys must not give inf - inf."""
    return jnp.where(jnp.isneginf(m), 0.0, m)


@jax.custom_jvp
def below(x: jax.Array, reference: jax.Array) -> jax.Array:
    """`x - reference`, where the reference is the maximum or the logsumexp of x: never above 0.

    A compiler may fuse the product that made x with the subtraction. Unrounded, it can exceed the
    rounded maximum by half a unit in the last place: 2^15 for a score of 1e12. The minimum between
    the two keeps them apart.
    """
    return jnp.minimum(x, reference) - reference


@below.defjvp
def _(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[Any, Any]:
    # that of the difference: the derivative of `minimum` is a half where x is the maximum
    return below(*primals), tangents[0] - tangents[1]


def weigh(m: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """New maximum, unnormalized weights exp(logits - m_new), and the factor for older sums."""
    m_new = jnp.maximum(m, logits.max(axis=-1, initial=-jnp.inf))
    safe = shift(m_new)
    return m_new, jnp.exp(below(logits, safe[..., None])), jnp.exp(below(m, safe))


def add_sinks(state: State, sinks: jax.Array | None) -> State:
    """Counts extra logits [..., n] in the denominator; they carry no value."""
    if sinks is None:
        return state
    rows = jnp.broadcast_to(sinks[..., None, :], (*state.m.shape, sinks.shape[-1]))
    m, weights, alpha = weigh(state.m, rows)
    return State(m, state.l * alpha + weights.sum(axis=-1), state.acc * alpha[..., None])


def finish(state: State) -> tuple[jax.Array, jax.Array]:
    """Output [..., t, e] and log-sum-exp [..., t]; rows without a key give 0 and -inf."""
    empty = state.l == 0.0
    denominator = jnp.where(empty, 1.0, state.l)
    out = state.acc / denominator[..., None]
    lse = jnp.where(empty, -jnp.inf, shift(state.m) + jnp.log(denominator))
    return out, lse


def merge(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of two sets of keys; lse [..., t], out [..., t, e]."""
    m = shift(jax.lax.stop_gradient(jnp.maximum(lse_a, lse_b)))
    weight_a, weight_b = jnp.exp(below(lse_a, m)), jnp.exp(below(lse_b, m))
    # a part that saw nothing may hold anything
    out_a = jnp.where(jnp.isneginf(lse_a)[..., None], 0.0, out_a)
    out_b = jnp.where(jnp.isneginf(lse_b)[..., None], 0.0, out_b)
    total = weight_a + weight_b
    empty = total == 0.0
    denominator = jnp.where(empty, 1.0, total)
    out = (out_a * weight_a[..., None] + out_b * weight_b[..., None]) / denominator[..., None]
    return out, jnp.where(empty, -jnp.inf, m + jnp.log(denominator))
