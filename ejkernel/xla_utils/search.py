"""Bisection of sorted arrays."""

from typing import Any

import jax
import jax.numpy as jnp


def count_before(ends: jax.Array, values: Any, *, inclusive: bool = True) -> jax.Array:
    """How many of the sorted `ends` are less than or equal to each value, or less, as int32.

    With the ends of consecutive runs and their items' indices: the run that an item is in.
    """

    def loop(ends: jax.Array, values: jax.Array) -> jax.Array:
        side = "right" if inclusive else "left"
        return jnp.searchsorted(ends, values, side=side).astype(jnp.int32)

    def written_out(ends: jax.Array, values: jax.Array) -> jax.Array:
        count, found = ends.shape[0], jnp.zeros(values.shape, jnp.int32)
        for bit in reversed(range(count.bit_length())):
            probe = found + (1 << bit)
            end = ends.at[jnp.minimum(probe, count) - 1].get(mode="promise_in_bounds")
            before = end <= values if inclusive else end < values
            found = jnp.where((probe <= count) & before, probe, found)
        return found

    # Of 1025 ends and 65536 values XLA makes 3 kernels for an H200; the loop is two launches in
    # each of its 11 steps. For a CPU it would compute the earlier steps again in each later one.
    return jax.lax.platform_dependent(ends, jnp.asarray(values), cpu=loop, default=written_out)
