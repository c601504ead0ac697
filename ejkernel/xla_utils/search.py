"""Bisection of sorted arrays."""

from typing import Any

import jax
import jax.numpy as jnp

_MOST_PAIRS = 1 << 24  # that are compared: microseconds on a GPU


def count_before(ends: jax.Array, values: Any, *, inclusive: bool = True) -> jax.Array:
    """How many of the sorted `ends` are less than or equal to each value, or less, as int32.

    With the ends of consecutive runs and their items' indices: the run that an item is in.
    """

    def loop(ends: jax.Array, values: jax.Array) -> jax.Array:
        side = "right" if inclusive else "left"
        return jnp.searchsorted(ends, values, side=side).astype(jnp.int32)

    def every(ends: jax.Array, values: jax.Array) -> jax.Array:
        ends, values = ends.reshape(*[1] * values.ndim, -1), values[..., None]
        pairs = ends <= values if inclusive else ends < values
        return pairs.sum(axis=-1, dtype=jnp.int32)

    def written_out(ends: jax.Array, values: jax.Array) -> jax.Array:
        count, found = ends.shape[0], jnp.zeros(values.shape, jnp.int32)
        for bit in reversed(range(count.bit_length())):
            probe = found + (1 << bit)
            end = ends.at[jnp.minimum(probe, count) - 1].get(mode="promise_in_bounds")
            before = end <= values if inclusive else end < values
            found = jnp.where((probe <= count) & before, probe, found)
        return found

    # For an H200 the loop is two launches in each step, 11 with 1025 ends; written out XLA makes 3
    # kernels of it, and one of comparing every pair. For a CPU XLA would compute the earlier steps
    # that are written out again in each later one.
    values = jnp.asarray(values)
    few = ends.shape[0] * values.size <= _MOST_PAIRS
    return jax.lax.platform_dependent(ends, values, cpu=loop, default=every if few else written_out)
