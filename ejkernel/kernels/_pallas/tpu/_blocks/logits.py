"""What happens to one tile of query-key pairs: bias, slopes, caps, masks and dropout.

A tile is [held, streamed]: its rows are tokens that a program holds, its lanes tokens that pass by.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels import _attention
from ejkernel.kernels._pallas.tpu._blocks import block_ranges, philox, tiles

_MOST = 2**31 - 1  # a position


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is known of the pairs while compiling."""

    holds_keys: bool  # rows of a tile are keys and lanes are queries
    scale: float | None  # of the dot products; None: left to the softmax
    cap: float | None
    left: int | None
    right: int | None
    offset: int  # position of the first query, when positions are not given
    num_ids: int
    positions: bool  # given, behind the ids
    num_streamed: int | None  # real tokens of the streamed side; None: every lane is one
    threshold: int | None  # of dropout
    kept: float


@dataclasses.dataclass(frozen=True)
class Tile:
    """Where a tile is: first row and lane in the blocks in VMEM and in the call, and its sizes.

    Pairs of a `masked` tile are hidden by the rules, or by its band where that is known.
    """

    row: Any
    lane: Any
    held: jax.Array
    streamed: jax.Array
    shape: tuple[int, int]
    masked: bool
    band: block_ranges.Band | None = None
    starts: tuple[Any, ...] = ()  # first tokens of the streamed blocks, where several are joined

    @property
    def rows(self) -> Any:
        return pl.ds(self.row, self.shape[0])

    @property
    def lanes(self) -> Any:
        return pl.ds(self.lane, self.shape[1])


def distance(rules: Rules, refs: Any, at: Tile) -> jax.Array:
    """Key position less query position, float32."""
    sign = -1 if rules.holds_keys else 1
    if rules.positions:
        lanes, rows = _streamed_row(refs, rules.num_ids, at), _held(refs, rules.num_ids, at)
        return _attention.distance(*((rows, lanes) if sign > 0 else (lanes, rows)), jnp.float32)
    lanes = jax.lax.broadcasted_iota(jnp.int32, at.shape, 1)
    rows = jax.lax.broadcasted_iota(jnp.int32, at.shape, 0)
    start = sign * (at.streamed - at.held) - rules.offset
    return ((lanes - rows if sign > 0 else rows - lanes) + start).astype(jnp.float32)


def visible(rules: Rules, refs: Any, at: Tile) -> jax.Array | None:
    """Which pairs are seen; None when all are. If not masked, only a dense mask hides any."""
    terms = []
    if at.band is not None:
        terms += _inside(at.band, at.shape)
    elif at.masked:
        if rules.num_streamed is not None:
            lanes = jax.lax.broadcasted_iota(jnp.int32, at.shape, 1)
            terms.append(lanes < rules.num_streamed - at.streamed)
        for i in range(rules.num_ids):
            held = _held(refs, i, at)
            terms.append((held == _streamed_row(refs, i, at)) & (held >= 0))
        terms += _near(rules, refs, at)
    if refs.mask is not None:
        terms.append(pair_block(rules, refs.mask, at, jnp.int32) != 0)
    return functools.reduce(jnp.logical_and, terms) if terms else None


def _inside(band: block_ranges.Band, shape: tuple[int, int]) -> list[jax.Array]:
    """Pairs of a band, all of it known while compiling."""
    lanes = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    gap = lanes - jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    terms = [] if band.low is None else [gap >= band.low]
    terms += [] if band.high is None else [gap <= band.high]
    return terms if band.count is None else [*terms, lanes < band.count]


def _near(rules: Rules, refs: Any, at: Tile) -> list[jax.Array]:
    """Pairs inside the window, a comparison for each limit."""
    left, right = rules.left, rules.right
    if rules.positions:
        lanes, rows = _streamed_row(refs, rules.num_ids, at), _held(refs, rules.num_ids, at)
        q, k = (lanes, rows) if rules.holds_keys else (rows, lanes)
        # a limit added to a position stops at the ends of 32 bits
        terms = [] if right is None else [k <= jnp.minimum(q, _MOST - right) + right]
        return terms if left is None else [*terms, k >= jnp.maximum(q, left - _MOST - 1) - left]
    # lane against row: one operation for a register, where a distance takes one more
    lanes = jax.lax.broadcasted_iota(jnp.int32, (1, at.shape[1]), 1)
    rows = jax.lax.broadcasted_iota(jnp.int32, (at.shape[0], tiles.LANES), 0)
    start = at.held - at.streamed
    start = start - rules.offset if rules.holds_keys else start + rules.offset
    before, after = (right, left) if rules.holds_keys else (left, right)
    low = None if before is None else tiles.wide(rows + (start - before), at.shape[1])
    high = None if after is None else tiles.wide(rows + (start + after), at.shape[1])
    terms = [] if high is None else [lanes <= high]
    return terms if low is None else [*terms, lanes >= low]


def logits(
    rules: Rules, refs: Any, at: Tile, dots: jax.Array, head: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Scores, and what they are after the cap and before bias and slopes.

    They are in natural units; without a scale they are the bare dots, left to the softmax to scale.
    """
    x = dots if rules.scale is None else dots * rules.scale
    capped = x = x if rules.cap is None else rules.cap * jnp.tanh(x * (1.0 / rules.cap))
    if refs.bias is not None:
        x = x + pair_block(rules, refs.bias, at, jnp.float32)
    if refs.slopes is not None:
        x = x + refs.slopes[head] * distance(rules, refs, at)
    return x, capped


def drop(
    rules: Rules, refs: Any, at: Tile, batch: jax.Array, head: jax.Array, *values: jax.Array
) -> tuple[jax.Array, ...]:
    """Values of the pairs that dropout leaves, scaled up; zero for the others."""
    if rules.threshold is None:
        return values
    rows = jax.lax.broadcasted_iota(jnp.int32, at.shape, 0) + at.held
    lanes = jax.lax.broadcasted_iota(jnp.int32, at.shape, 1) + at.streamed
    query, key = (lanes, rows) if rules.holds_keys else (rows, lanes)
    seed = refs.seed
    kept = philox.keep(
        (seed[0], seed[1]), batch + seed[2], head + seed[3], query, key, rules.threshold
    )
    return tuple(jnp.where(kept, x * rules.kept, 0.0) for x in values)


def pair_block(rules: Rules, ref: Any, at: Tile, dtype: Any) -> jax.Array:
    """A tile of an array over pairs, whose block in VMEM is [queries or 1, keys or 1]."""
    parts = (at.lanes, at.rows) if rules.holds_keys else (at.rows, at.lanes)
    index = tuple(
        slice(None) if size == 1 else part for size, part in zip(ref.shape, parts, strict=True)
    )
    block = ref[index].astype(dtype)
    if not rules.holds_keys:
        return jnp.broadcast_to(block, at.shape)
    return jnp.broadcast_to(block, at.shape[::-1]).T


def _held(refs: Any, i: int, at: Tile) -> jax.Array:
    return tiles.wide(refs.columns[i, at.rows], at.shape[1])


def _streamed_row(refs: Any, i: int, at: Tile) -> jax.Array:
    return refs.streamed_rows[i : i + 1, at.lanes]
