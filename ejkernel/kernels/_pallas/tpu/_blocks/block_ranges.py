"""Which blocks of the streamed side a block of the held side has to visit, and which unmasked.

A table has a row [first, full, ragged, last] for each held block: blocks from `first` to `last` may
hold visible pairs, and in those from `full` to `ragged` every pair is visible. It is constant with
ordinary positions, and computed on the device from ids and given positions.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.xla_utils import positions

Window = tuple[int | None, int | None]
# Patterns of masked blocks for which kernels have code of their own.
MOST_BANDS = 4
_LOW, _HIGH = np.iinfo(np.int32).min, np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """Tokens of one side: their ids, and their positions where the index does not tell."""

    length: int
    start: int  # position of the first token, when `positions` is None
    ids: tuple[jax.Array, ...]  # each [b or 1, length]; negative: padding
    positions: jax.Array | None  # [b or 1, length]


@dataclasses.dataclass(frozen=True)
class Band:
    """What rows see of a tile: low <= lane - row <= high, and lane < count; None is no limit."""

    low: int | None
    high: int | None
    count: int | None

    def moved(self, row: int, lane: int, shape: tuple[int, int]) -> "Band":
        """The band from a part of the tile, without the limits that hide nothing there."""
        rows, lanes = shape
        low = None if self.low is None else self.low + row - lane
        high = None if self.high is None else self.high + row - lane
        count = None if self.count is None else self.count - lane
        return Band(
            None if low is None or low <= 1 - rows else low,
            None if high is None or high >= lanes - 1 else high,
            None if count is None or count >= lanes else count,
        )

    def extent(self, row: int, shape: tuple[int, int], grain: int) -> tuple[int, int]:
        """Lanes that some row of a part sees, widened to multiples of `grain`."""
        rows, lanes = shape
        start = 0 if self.low is None else max(self.low + row, 0)
        stop = lanes if self.high is None else min(self.high + row + rows, lanes)
        stop = stop if self.count is None else min(stop, self.count)
        return start // grain * grain, min(-(-stop // grain) * grain, lanes)


def sides(args: Any) -> tuple[Side, Side]:
    """Queries and keys of an attention call."""
    t, s = args.query.shape[1], args.key.shape[1]
    made = positions.of_attention(args)
    q_pos, k_pos = made.both_or_none(t, s)  # kernels take both or none
    q_ids, k_ids = tuple(q for q, _ in made.ids), tuple(k for _, k in made.ids)
    return Side(t, s - t, q_ids, q_pos), Side(s, 0, k_ids, k_pos)


def table(held: Side, streamed: Side, window: Window, blocks: tuple[int, int], whole: bool) -> Any:
    """[b or 1, held blocks, 4] int32; `window` is how far the streamed side reaches around.

    `blocks` are the sizes of held and streamed blocks. `whole`: a streamed block that is cut short
    by the length needs the mask.
    """
    if held.ids or held.positions is not None:
        return _dynamic(held, streamed, window, blocks)
    return _static(held, streamed, window, blocks, whole)


def _static(held: Side, streamed: Side, window: Window, blocks: Any, whole: bool) -> np.ndarray:
    (left, right), (size, step) = window, blocks
    num = -(-streamed.length // step)
    low = np.arange(-(-held.length // size), dtype=np.int64) * size
    high = np.minimum(low + size, held.length) - 1
    shift = held.start - streamed.start
    low, high = low + shift, high + shift
    zero = np.zeros_like(low)
    first = zero if left is None else (low - left) // step
    last = zero + num if right is None else (high + right) // step + 1
    full = zero if left is None else -((left - high) // step)
    most = streamed.length // step if whole else num
    ragged = zero + most if right is None else np.minimum(most, (low + right + 1) // step)
    return _ordered(np, *(np.clip(x, 0, num) for x in (first, full, ragged, last)))[None]


def bands(
    made: np.ndarray, held: Side, streamed: Side, window: Window, blocks: Any, whole: bool
) -> tuple[tuple[Band, ...], np.ndarray]:
    """What is seen of the masked blocks of a constant table, and where, [1, held blocks, bands].

    Under a causal mask or a window the same few patterns return along the diagonal: kernels can
    leave out what is never seen of them. An index of -1 means that a held block has no such block.
    Nothing is returned when there are more than `MOST_BANDS`.
    """
    (left, right), (size, step) = window, blocks
    found: dict[Band, dict[int, int]] = {}
    for i, (first, full, ragged, last) in enumerate(made[0].tolist()):
        for j in (*range(first, full), *range(ragged, last)):
            shift = i * size + held.start - j * step - streamed.start
            low = None if left is None or shift - left <= 1 - size else shift - left
            high = None if right is None or shift + right >= step - 1 else shift + right
            rest = streamed.length - j * step
            at = found.setdefault(Band(low, high, rest if whole and rest < step else None), {})
            if i in at or len(found) > MOST_BANDS:
                return (), np.zeros((1, len(made[0]), 0), np.int32)
            at[i] = j
    index = np.full((1, len(made[0]), len(found)), -1, np.int32)
    for column, at in enumerate(found.values()):
        index[0, list(at), column] = list(at.values())
    return tuple(found), index


def _ordered(xp: Any, first: Any, full: Any, ragged: Any, last: Any) -> Any:
    """Rows first <= full <= ragged <= last; all zero where nothing is seen."""
    some = (full < ragged) & (first < last)
    full = xp.where(some, xp.clip(full, first, last), first)
    ragged = xp.where(some, xp.clip(ragged, full, last), full)
    made = xp.stack([first, full, ragged, last], axis=-1)
    return xp.where((first < last)[..., None], made, 0).astype(np.int32)


def _dynamic(held: Side, streamed: Side, window: Window, blocks: Any) -> jax.Array:
    """Hulls of the visible and of the wholly visible blocks."""
    (valid_h, ids_h, pos_h), (valid_s, ids_s, pos_s) = (
        _blocked(side, size) for side, size in zip((held, streamed), blocks, strict=True)
    )
    full = valid_h.all(-1)[:, :, None] & valid_s.all(-1)[:, None, :]
    seen = valid_h.any(-1)[:, :, None] & valid_s.any(-1)[:, None, :]
    for h, s in zip(ids_h, ids_s, strict=True):
        (low_h, high_h), (low_s, high_s) = _extents(h, valid_h, 2), _extents(s, valid_s, 1)
        seen &= (low_h <= high_s) & (low_s <= high_h)
        full &= (low_h == high_h) & (low_s == high_s) & (low_h == low_s)
    (low_h, high_h), (low_s, high_s) = _extents(pos_h, valid_h, 2), _extents(pos_s, valid_s, 1)
    left, right = window
    # limits are added on the side where they cannot leave 32 bits
    if left is not None:
        seen &= high_s >= jnp.maximum(low_h, _LOW + left) - left
        full &= low_s >= jnp.maximum(high_h, _LOW + left) - left
    if right is not None:
        seen &= low_s <= jnp.minimum(high_h, _HIGH - right) + right
        full &= high_s <= jnp.minimum(low_h, _HIGH - right) + right
    full &= seen
    first, last = _hull(seen)
    start, stop = _hull(full)
    # blocks without a mask form one run, or all of them take the mask
    run = full.sum(-1, dtype=jnp.int32) == stop - start
    return _ordered(jnp, first, start, jnp.where(run, stop, start), last)


def _blocked(side: Side, size: int) -> tuple[jax.Array, list[jax.Array], jax.Array]:
    """Valid tokens, ids and positions, [b or 1, blocks, size]."""
    num = -(-side.length // size)
    extra = num * size - side.length

    def cut(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, extra)), constant_values=-1).reshape(-1, num, size)

    index = jnp.arange(num * size, dtype=jnp.int32)
    valid = (index < side.length).reshape(1, num, size)
    ids = [cut(x) for x in side.ids]
    for x in ids:
        valid = valid & (x >= 0)
    if side.positions is None:
        return valid, ids, (index + side.start).reshape(1, num, size)
    return valid, ids, cut(side.positions)


def _extents(x: jax.Array, valid: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Least and greatest valid value of each block, ready to compare with the other side's."""
    low = jnp.where(valid, x, _HIGH).min(-1)
    return jnp.expand_dims(low, axis), jnp.expand_dims(jnp.where(valid, x, _LOW).max(-1), axis)


def _hull(seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First and one past the last along the last axis; written as reductions."""
    index = jax.lax.broadcasted_iota(jnp.int32, seen.shape, 2)
    first = jnp.where(seen, index, seen.shape[-1]).min(-1)
    last = jnp.where(seen, index + 1, 0).max(-1)
    return jnp.minimum(first, last), last
