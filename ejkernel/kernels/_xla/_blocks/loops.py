"""Loops whose bounds may be static, and slices along axes that may be broadcast."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.xla_utils import manual


def fori(
    lower: Any, upper: Any, body: Callable[[Any, Any], Any], state: Any, unroll: int = 1
) -> Any:
    """`lax.fori_loop`; a loop of one known step is no loop. To `unroll`, bounds must be known."""
    if isinstance(lower, int) and isinstance(upper, int) and upper - lower <= 1:
        return body(lower, state) if upper > lower else state
    if unroll > 1:
        return jax.lax.fori_loop(lower, upper, body, state, unroll=unroll)
    return jax.lax.fori_loop(lower, upper, body, state)


def stack(count: int, body: Callable[[Any], Any]) -> Any:
    """`body(0), …, body(count - 1)`, stacked along a new first axis."""
    if count == 1:
        return jax.tree.map(lambda x: x[None], body(0))
    return jax.lax.map(body, jnp.arange(count, dtype=jnp.int32))


def scan(count: int, body: Callable[[Any, Any], Any], state: Any) -> tuple[Any, Any]:
    """`lax.scan` over indices: `body(state, i) -> (state, y)`."""
    if count == 1:
        state, y = body(state, 0)
        return state, jax.tree.map(lambda x: x[None], y)
    return jax.lax.scan(body, state, jnp.arange(count, dtype=jnp.int32))


def vary_like(state: Any, like: jax.Array) -> Any:
    """A loop's first state with the manual mesh axes of `like`, as `shard_map` wants it."""
    axes = manual.varying_axes(like)

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - manual.varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, state) if axes else state


def take(x: jax.Array, index: Any, size: int, axis: int) -> jax.Array:
    """Block `index` of `size` elements along an axis; an axis of one element serves every block."""
    if x.shape[axis] == 1 or x.shape[axis] == size:
        return x
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)


def put(x: jax.Array, block: jax.Array, indices: tuple[Any, ...]) -> jax.Array:
    """Adds a block at block `indices` (one per axis) of an accumulator."""
    start = [
        jnp.int32(0 if size == full else index * size)  # of one type, under x64 too
        for index, size, full in zip(indices, block.shape, x.shape, strict=True)
    ]
    old = jax.lax.dynamic_slice(x, start, block.shape)
    return jax.lax.dynamic_update_slice(x, old + block, start)
