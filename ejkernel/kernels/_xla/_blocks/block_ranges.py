"""Which blocks of keys a block of queries can see, from the extent of each block.

The same formulas run on NumPy arrays, when positions are known while tracing, and on JAX arrays.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Window = tuple[int | None, int | None]


def _module(*arrays: Any) -> Any:
    return jnp if any(isinstance(a, jax.Array) for a in arrays) else np


def extent(x: Any, size: int, keep: Any = None) -> tuple[Any, Any]:
    """Least and greatest value of each block along the last axis; `keep` masks elements out."""
    xp = _module(x, keep)
    lowest, greatest = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    low = x if keep is None else xp.where(keep, x, greatest)
    high = x if keep is None else xp.where(keep, x, lowest)
    shape = (*low.shape[:-1], low.shape[-1] // size, size)
    return low.reshape(shape).min(axis=-1), high.reshape(shape).max(axis=-1)


def near(q: tuple[Any, Any], k: tuple[Any, Any], window: Window) -> Any:
    """Block pairs [..., nq, nk] with some pair of positions inside the window, or all of them."""
    left, right = window
    xp = _module(*q, *k)
    q_low, q_high = (x[..., :, None] for x in q)
    k_low, k_high = (x[..., None, :] for x in k)
    seen = xp.ones(np.broadcast_shapes(q_low.shape, k_low.shape), bool)
    # compared by difference from the query side: window limits are small, sentinels are not
    if left is not None:
        seen = seen & (k_high >= xp.maximum(q_low, np.iinfo(np.int32).min + left) - left)
    if right is not None:
        seen = seen & (k_low <= xp.minimum(q_high, np.iinfo(np.int32).max - right) + right)
    return seen


def overlap(q: tuple[Any, Any], k: tuple[Any, Any]) -> Any:
    """Block pairs whose ranges of ids meet; a block without valid ids has an empty range."""
    q_low, q_high = (x[..., :, None] for x in q)
    k_low, k_high = (x[..., None, :] for x in k)
    return (q_low <= k_high) & (k_low <= q_high)


def hull(seen: Any) -> tuple[Any, Any]:
    """First and one past the last visible block along the last axis; (0, 0) when there is none."""
    xp = _module(seen)
    count = seen.shape[-1]
    some = seen.any(axis=-1)
    first = xp.where(some, seen.argmax(axis=-1), 0)
    last = xp.where(some, count - seen[..., ::-1].argmax(axis=-1), 0)
    return first.astype(np.int32), last.astype(np.int32)


def bounds(seen: Any, index: Any) -> tuple[Any, Any]:
    """The hull of row `index` of a table [n, m]; Python ints when all rows agree statically."""
    first, last = hull(seen)
    if isinstance(first, np.ndarray):
        if (first == first[0]).all() and (last == last[0]).all():
            return int(first[0]), int(last[0])
        if isinstance(index, int):
            return int(first[index]), int(last[index])
        first, last = jnp.asarray(first), jnp.asarray(last)
    return first[index], last[index]
