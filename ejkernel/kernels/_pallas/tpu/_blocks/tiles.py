"""Values in the shapes that TPU registers like: 8 sublanes of 128 lanes.

A column has a number for each row of a tile, the same in every lane: [n, LANES].
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.precision import dot_precision

LANES = 128


def wide(column: jax.Array, size: int) -> jax.Array:
    """A column against a tile of `size` lanes, [n, size]; whole registers are repeated."""
    if size <= LANES:
        return column[:, :size]
    whole = jnp.concatenate([column] * -(-size // LANES), axis=1)
    return whole if size % LANES == 0 else whole[:, :size]


def to_column(row: jax.Array) -> jax.Array:
    """[1, n] as a column."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def to_row(column: jax.Array) -> jax.Array:
    """A column as [1, n]."""
    return column.T[:1]


def partial_sums(x: jax.Array) -> jax.Array:
    """Sums of each row over registers, lane by lane, [n, at most LANES]: no lanes are crossed."""
    width = min(x.shape[1], LANES)
    parts = [x[:, i : i + width] for i in range(0, x.shape[1], width)]
    return sum(parts[1:], parts[0])


def precision(dtype: Any) -> jax.lax.Precision:
    """What a product asks Mosaic for, which has nothing between its fastest and float32."""
    lowest = dot_precision(dtype) == jax.lax.Precision.DEFAULT
    return jax.lax.Precision.DEFAULT if lowest else jax.lax.Precision.HIGHEST


def product(a: jax.Array, b: jax.Array, transpose: bool = False) -> jax.Array:
    """The product of `a` with `b`, or with its transpose, in float32."""
    axes = ((1,), (1 if transpose else 0,))
    return jax.lax.dot_general(
        a,
        b,
        (axes, ((), ())),
        precision=precision(a.dtype),
        preferred_element_type=jnp.float32,
    )
