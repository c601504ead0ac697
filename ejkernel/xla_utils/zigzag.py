"""The zigzag order of tokens, which shares causal attention evenly among devices.

A sequence is cut into 2n chunks, and device i of n holds chunks i and 2n - 1 - i.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np


@functools.cache
def _chunks(num_devices: int) -> np.ndarray:
    """Chunks in the order in which they are stored."""
    first = np.arange(num_devices)
    return np.stack([first, 2 * num_devices - 1 - first], axis=1).reshape(-1)


def _reorder(op: str, x: jax.Array, num_devices: int, axis: int, inverse: bool) -> jax.Array:
    if not isinstance(num_devices, int | np.integer) or num_devices < 1:
        raise ValueError(f"`{op}`: `num_devices` must be an int >= 1; got {num_devices!r}.")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"`{op}`: `axis` must be one of the {x.ndim} axes of `x`; got {axis}.")
    order = _chunks(int(num_devices))
    order = np.argsort(order) if inverse else order
    axis = axis % x.ndim
    size = x.shape[axis]
    if size % (2 * num_devices):
        raise ValueError(
            f"`{op}`: axis {axis} must be a multiple of 2 * {num_devices} devices; got {size}. "
            "Pad it first."
        )
    cut = (*x.shape[:axis], 2 * num_devices, size // (2 * num_devices), *x.shape[axis + 1 :])
    return jnp.take(x.reshape(cut), order, axis=axis).reshape(x.shape)


def to_zigzag(x: jax.Array, num_devices: int, axis: int = 1) -> jax.Array:
    """Tokens in the order in which `num_devices` devices store them, from their own order."""
    return _reorder("to_zigzag", x, num_devices, axis, inverse=False)


def from_zigzag(x: jax.Array, num_devices: int, axis: int = 1) -> jax.Array:
    """Tokens in their own order, from that of `to_zigzag`."""
    return _reorder("from_zigzag", x, num_devices, axis, inverse=True)
