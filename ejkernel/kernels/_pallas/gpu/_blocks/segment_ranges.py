"""Which keys queries see when segment ids or lengths decide, and which blocks hold them.

Each token sees a run of tokens of the other side, and of these the ones with its own id. Lengths,
packed sequences, causal masks and windows make the run; segment ids are compared. XLA computes all
of it from traced arrays before a kernel runs.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.callib import cdiv
from ejkernel.xla_utils import segments

_NONE = 1 << 30  # behind every token
_FIELDS = ("q_segment_ids", "kv_segment_ids", "cum_seqlens_q", "cum_seqlens_k")


class Side(NamedTuple):
    """Tokens of one side, int32 [b, n]."""

    first: jax.Array  # index of the first token of the other side that a token may see
    last: jax.Array  # of the last one; before `first` if it sees none
    ids: jax.Array | None  # None: the run decides alone
    is_real: jax.Array  # 0 for padding, which sees nothing and may hold nan


class Blocks(NamedTuple):
    """Blocks [first, last) of the other side are seen, those in [full, ragged) by all tokens."""

    first: jax.Array  # all are [b, groups of tokens]
    full: jax.Array
    ragged: jax.Array
    last: jax.Array


def apply_to(args: Any) -> bool:
    """Whether ids or lengths decide what an attention call sees."""
    return args.q_segment_ids is not None or args.cum_seqlens_q is not None


def sides(args: Any) -> tuple[Side, Side] | None:
    """Queries and keys of an attention call; None if it has neither ids nor lengths."""
    if not apply_to(args):
        return None
    (batch, t), s = args.query.shape[:2], args.key.shape[1]
    # nothing is farther away, and sums of indices fit into 32 bits
    left, right = (None if w is None else min(w, t + s) for w in args.sliding_window)
    cum_q, cum_k = args.cum_seqlens_q, args.cum_seqlens_k
    queries = _side(args.q_segment_ids, cum_q, cum_k, (batch, t, s), (left, right))
    return queries, _side(args.kv_segment_ids, cum_k, cum_q, (batch, s, t), (right, left))


def without(args: Any) -> Any:
    """The call without ids and lengths."""
    return dataclasses.replace(args, **dict.fromkeys(_FIELDS))


def _side(
    ids: Any, cum: Any, other_cum: Any, sizes: tuple[int, int, int], reach: tuple[Any, Any]
) -> Side:
    """Tokens that see the other side's from `reach[0]` before to `reach[1]` behind them."""
    (batch, length, other), (before, behind) = sizes, reach
    index = jnp.arange(length, dtype=jnp.int32)[None]
    is_real, start, stop, end = jnp.full((1, length), True), 0, other, length
    if cum is not None and batch > 1:  # rows with lengths
        end, stop = (jnp.diff(x)[:, None] for x in (cum, other_cum))
        is_real = index < end
    elif cum is not None:
        number = segments.cu_seqlens_to_segment_ids(cum, length)[None]
        is_real = number >= 0
        start, stop, end = other_cum[number], other_cum[number + 1], cum[number + 1]
    if ids is not None:
        is_real = is_real & (ids >= 0)
    stop = jnp.minimum(stop, other)
    at = index - end + stop  # where a token stands among the other side's: ends are aligned
    first = start if before is None else jnp.maximum(start, at - before)
    last = stop - 1 if behind is None else jnp.minimum(stop - 1, at + behind)
    shape = (batch, length)
    return Side(
        jnp.broadcast_to(jnp.where(is_real, jnp.maximum(first, 0), _NONE), shape),
        jnp.broadcast_to(jnp.where(is_real, last, -1), shape),
        ids,
        jnp.broadcast_to(is_real.astype(jnp.int32), shape),
    )


def marks(side: Side, length: int) -> jax.Array:
    """[b, length]: ids, or 0 where there are none; -1 for padding and behind the last token."""
    found = jnp.zeros_like(side.is_real) if side.ids is None else side.ids
    return _padded(jnp.where(side.is_real > 0, found, -1), length, -1)


def limits(args: Any, of_keys: bool = False) -> tuple[str, ...]:
    """What a kernel compares to know whether queries, or keys, see a token of the other side.

    Where nothing but ids decides, padding needs no limit: its ids are equal to none.
    """
    before, behind = reversed(args.sliding_window) if of_keys else args.sliding_window
    is_cut = args.cum_seqlens_q is not None
    needed = {
        "first": is_cut or before is not None,
        "last": is_cut or behind is not None,
        "ids": args.q_segment_ids is not None,
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


def rows(side: Side, length: int, names: tuple[str, ...]) -> jax.Array:
    """[b, names, length] of `limits`; tokens behind the last one see nothing."""
    made = {"first": _padded(side.first, length, _NONE), "last": _padded(side.last, length, -1)}
    if side.ids is not None:
        made["ids"] = _padded(jnp.where(side.is_real > 0, side.ids, -2), length, -2)
    return jnp.stack([made[name] for name in names], axis=1)


def has_padding(side: Side, size: int) -> jax.Array:
    """[b, blocks] int32: whether a block holds padding; behind the last token memory is clean."""
    return 1 - _grouped(side.is_real, size, 1).min(-1)


def blocks(held: Side, streamed: Side, count: int, size: int) -> Blocks:
    """What groups of `count` held tokens see of the streamed side in blocks of `size`.

    Tokens behind the last one see everything: nobody asks for them.
    """
    sees = held.first <= held.last
    low = _grouped(jnp.where(sees, held.first, _NONE), count, _NONE).min(-1)
    high = _grouped(jnp.where(sees, held.last, -1), count, -1).max(-1)
    first, last = low // size, high // size + 1
    full = (_grouped(held.first, count, 0).max(-1) + size - 1) // size
    ragged = (_grouped(held.last, count, _NONE).min(-1) + 1) // size
    if held.ids is None or streamed.ids is None:
        return _ordered(first, full, ragged, last)
    ids = [_extents(held.ids, sees, count), _extents(streamed.ids, streamed.is_real > 0, size)]
    (low, high), (low_s, high_s) = ([x[:, :, None] for x in ids[0]], [x[:, None] for x in ids[1]])
    is_whole = (_grouped(streamed.is_real, size, 0).min(-1) > 0)[:, None]
    j = jnp.arange(low_s.shape[-1], dtype=jnp.int32)[None, None]
    inside = lambda start, stop: (j >= start[:, :, None]) & (j < stop[:, :, None])
    seen = inside(first, last) & (low <= high_s) & (low_s <= high)
    all_seen = inside(full, ragged) & is_whole & (low == high) & (low_s == high_s) & (low == low_s)
    first, last = _hull(seen, j)
    full, ragged = _hull(all_seen, j)
    # blocks that all tokens see form one run, or all blocks take the mask
    is_run = all_seen.sum(-1, dtype=jnp.int32) == ragged - full
    return _ordered(first, full, jnp.where(is_run, ragged, full), last)


def sees_behind(held: Side, streamed: Side, count: int, size: int) -> jax.Array:
    """[b, groups]: every token of a group surely sees a token of this block or a later one.

    A token sees the last one of its run if ids are equal there.
    """
    is_known = held.first <= held.last
    if held.ids is not None and streamed.ids is not None:
        at = jnp.clip(held.last, 0, streamed.ids.shape[1] - 1)
        is_known &= jnp.take_along_axis(streamed.ids, at, axis=1) == held.ids
    return _grouped(jnp.where(is_known, held.last // size, -1), count, _NONE).min(-1)


def _padded(x: jax.Array, length: int, fill: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])), constant_values=fill)


def _grouped(x: jax.Array, count: int, fill: int) -> jax.Array:
    """[b, n] as [b, groups, count]."""
    groups = cdiv(x.shape[1], count)
    return _padded(x, groups * count, fill).reshape(x.shape[0], groups, count)


def _extents(ids: jax.Array, is_valid: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Least and greatest id of each group; ids of real tokens are not negative."""
    high = _grouped(jnp.where(is_valid, ids, -1), count, -1).max(-1)
    most = jnp.iinfo(jnp.int32).max
    return _grouped(jnp.where(is_valid, ids, most), count, most).min(-1), high


def _hull(seen: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First and one past the last along the last axis."""
    last = jnp.where(seen, index + 1, 0).max(-1)
    first = jnp.where(seen, index, seen.shape[-1]).min(-1)
    return jnp.minimum(first, last), last


def _ordered(first: Any, full: Any, ragged: Any, last: Any) -> Blocks:
    """With first <= full <= ragged <= last, and zeros where nothing is seen."""
    last = jnp.maximum(last, 0)
    first = jnp.where(first < last, first, last)
    is_run = (full < ragged) & (first < last)
    full = jnp.where(is_run, jnp.clip(full, first, last), first)
    ragged = jnp.where(is_run, jnp.clip(ragged, full, last), full)
    made = (jnp.where(first < last, x, 0) for x in (first, full, ragged, last))
    return Blocks(*made)
