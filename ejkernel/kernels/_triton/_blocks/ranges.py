"""Which blocks of keys a block of queries has to visit, and which of them need no mask.

A table has a row [first, full, ragged, last] for each block: blocks from `first` to `last` may hold
visible pairs, and in those from `full` to `ragged` every pair is visible. With ordinary positions
it is a constant of the program; with ids or given positions it is computed on the device.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.xla_utils import segments

Window = tuple[int | None, int | None]
_LOW, _HIGH = np.iinfo(np.int32).min, np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """Positions and ids of queries and keys; None where they follow from the index."""

    num_q: int
    num_k: int
    offset: int  # position of the first query
    q_positions: jax.Array | None  # [b or 1, t]
    k_positions: jax.Array | None  # [b or 1, s]
    ids: Sequence[tuple[jax.Array, jax.Array]]  # at most two pairs of [b or 1, t] and [b or 1, s]

    @property
    def plain(self) -> bool:
        return not self.ids and self.q_positions is None and self.k_positions is None


def tokens(args: Any) -> Tokens:
    """The positions and ids of an attention call."""
    batch, t = args.query.shape[:2]
    s = args.key.shape[1]
    q_pos = k_pos = None
    ids = []
    if args.cum_seqlens_q is not None and batch > 1:
        len_q, len_k = jnp.diff(args.cum_seqlens_q), jnp.diff(args.cum_seqlens_k)
        q_pos = jnp.arange(t, dtype=jnp.int32)[None] + (len_k - len_q)[:, None]
        ids.append(
            (segments.lengths_to_segment_ids(len_q, t), segments.lengths_to_segment_ids(len_k, s))
        )
    elif args.cum_seqlens_q is not None:
        cum_q, cum_k = args.cum_seqlens_q, args.cum_seqlens_k
        q_pos = segments.cu_seqlens_to_query_positions(cum_q, cum_k, t)[None]
        k_pos = segments.cu_seqlens_to_positions(cum_k, s)[None]
        q_ids = segments.cu_seqlens_to_segment_ids(cum_q, t)[None]
        ids.append((q_ids, segments.cu_seqlens_to_segment_ids(cum_k, s)[None]))
    if args.q_segment_ids is not None:
        ids.append((args.q_segment_ids, args.kv_segment_ids))
    if args.q_positions is not None:
        q_pos = args.q_positions
    if args.kv_positions is not None:
        k_pos = args.kv_positions
    if q_pos is not None or k_pos is not None:  # kernels take both or none
        q_pos = jnp.arange(t, dtype=jnp.int32)[None] + s - t if q_pos is None else q_pos
        k_pos = jnp.arange(s, dtype=jnp.int32)[None] if k_pos is None else k_pos
    return Tokens(t, s, s - t, q_pos, k_pos, tuple(ids))


def key_table(of: Tokens, window: Window, block_q: int, block_k: int) -> Any:
    """For each block of queries, its blocks of keys; [b or 1, blocks, 4] int32."""
    if of.plain:
        return _static(of.num_q, of.num_k, of.offset, window, block_q, block_k)
    return _dynamic(of, window, block_q, block_k, axis=-1)


def query_table(of: Tokens, window: Window, block_q: int, block_k: int) -> Any:
    """For each block of keys, its blocks of queries; [b or 1, blocks, 4] int32."""
    if of.plain:
        left, right = window  # seen from the keys, the window is mirrored
        return _static(of.num_k, of.num_q, -of.offset, (right, left), block_k, block_q)
    return _dynamic(of, window, block_q, block_k, axis=-2)


def _static(
    rows: int, columns: int, offset: int, window: Window, block_r: int, block_c: int
) -> np.ndarray:
    """Closed form: row i is at position i + offset, column j at j."""
    left, right = window
    num_r, num_c = -(-rows // block_r), -(-columns // block_c)
    low = np.arange(num_r, dtype=np.int64) * block_r
    whole = low + block_r <= rows
    high = np.minimum(low + block_r, rows) - 1
    low, high = low + offset, high + offset

    def clip(x: Any) -> np.ndarray:
        return np.clip(np.broadcast_to(x, low.shape), 0, num_c)

    first = clip(0 if left is None else (low - left) // block_c)
    last = clip(num_c if right is None else (high + right) // block_c + 1)
    last = np.maximum(first, last)
    full = first if left is None else clip(-((left - high) // block_c))
    most = columns // block_c
    ragged = np.minimum(most, clip(most if right is None else (low + right + 1) // block_c))
    return _ordered(np, first, full, ragged, last, whole)[None]


def _ordered(xp: Any, first: Any, full: Any, ragged: Any, last: Any, some: Any) -> Any:
    """first <= full <= ragged <= last; the middle is empty where there is nothing unmasked."""
    some = some & (full < ragged)
    full = xp.where(some, xp.clip(full, first, last), first)
    ragged = xp.where(some, xp.clip(ragged, full, last), full)
    return xp.stack([first, full, ragged, last], axis=-1).astype(np.int32)


def _dynamic(of: Tokens, window: Window, block_q: int, block_k: int, axis: int) -> jax.Array:
    """Hulls of the visible and of the wholly visible blocks along an axis."""
    valid_q = jnp.arange(-(-of.num_q // block_q) * block_q)[None] < of.num_q
    valid_k = jnp.arange(-(-of.num_k // block_k) * block_k)[None] < of.num_k
    ids = [(_pad(q, valid_q), _pad(k, valid_k)) for q, k in of.ids]
    for q, k in ids:
        valid_q, valid_k = valid_q & (q >= 0), valid_k & (k >= 0)
    seen: Any = True
    full: Any = _blocks(valid_q, block_q).all(-1)[..., :, None]
    full = full & _blocks(valid_k, block_k).all(-1)[..., None, :]
    for q, k in ids:
        (q_low, q_high), (k_low, k_high) = _extents(q, k, valid_q, valid_k, block_q, block_k)
        seen = seen & (q_low <= k_high) & (k_low <= q_high)
        full = full & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    if of.q_positions is not None:
        pos = _pad(of.q_positions, valid_q), _pad(of.k_positions, valid_k)
    else:
        index = jnp.arange(valid_q.shape[-1], dtype=jnp.int32)[None] + of.offset
        pos = index, jnp.arange(valid_k.shape[-1], dtype=jnp.int32)[None]
    (q_low, q_high), (k_low, k_high) = _extents(*pos, valid_q, valid_k, block_q, block_k)
    left, right = window
    # limits are added on the side where they cannot leave 32 bits
    if left is not None:
        seen = seen & (k_high >= jnp.maximum(q_low, _LOW + left) - left)
        full = full & (k_low >= jnp.maximum(q_high, _LOW + left) - left)
    if right is not None:
        seen = seen & (k_low <= jnp.minimum(q_high, _HIGH - right) + right)
        full = full & (k_high <= jnp.minimum(q_low, _HIGH - right) + right)
    shape = (valid_q.shape[-1] // block_q, valid_k.shape[-1] // block_k)
    lead = jnp.broadcast_shapes(*(x.shape[:-2] for x in (q_low, k_low, full)))
    seen, full = (jnp.broadcast_to(x, (*lead, *shape)) for x in (seen, full))
    full = full & seen
    first, last = _hull(seen, axis)
    start, stop = _hull(full, axis)
    # blocks without a mask form one run, or all of them take the mask
    run = full.sum(axis, dtype=jnp.int32) == stop - start
    return _ordered(jnp, first, start, stop, last, run)


def _blocks(x: jax.Array, size: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, size)


def _pad(x: jax.Array, like: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, like.shape[-1] - x.shape[-1])), constant_values=-1)


def _extents(q: Any, k: Any, valid_q: Any, valid_k: Any, block_q: int, block_k: int) -> Any:
    """Least and greatest value of each block, over its valid tokens, ready to compare."""

    def of(x: Any, valid: Any, size: int) -> tuple[jax.Array, jax.Array]:
        low = _blocks(jnp.where(valid, x, _HIGH), size).min(-1)
        return low, _blocks(jnp.where(valid, x, _LOW), size).max(-1)

    q_low, q_high = of(q, valid_q, block_q)
    k_low, k_high = of(k, valid_k, block_k)
    return (q_low[..., :, None], q_high[..., :, None]), (k_low[..., None, :], k_high[..., None, :])


def _hull(seen: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """First and one past the last; written as reductions, so that no table is stored."""
    count = seen.shape[axis]
    index = jax.lax.broadcasted_iota(jnp.int32, seen.shape, seen.ndim + axis)
    first = jnp.where(seen, index, count).min(axis)
    last = jnp.where(seen, index + 1, 0).max(axis)
    return jnp.minimum(first, last), last
