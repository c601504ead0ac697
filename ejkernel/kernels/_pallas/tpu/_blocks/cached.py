"""Attention of some queries of a sequence over its cached keys, with online softmax (Dao, 2023).

The query heads of a key head are rows of one tile, so that a key is read once: row r is token
r % tokens of head r // tokens. Maxima, sums and weighted values of all key heads stay in VMEM.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.tpu._blocks import grid, keys, softmax, tiles

OPTIONAL = ("slopes", "slope", "sinks", "k_scale", "v_scale", "lse")
_SUBLANES = 8
_TOGETHER = 1024  # rows
_MOST_HEADS = 8


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is known of a call while compiling."""

    groups: int  # key heads
    group: int  # query heads of a key head
    tokens: int  # of a tile; a power of two
    d: int
    e: int
    dtype: Any  # of queries and of products
    scale: float | None  # of dot products; None: left to the softmax, or a part of `k_scale`
    cap: float | None
    left: int | None
    units: float  # times logits are bits

    @property
    def together(self) -> int:
        """Key heads whose work overlaps: enough to fill units, few enough for the registers."""
        # a product in float32 is several, and as much more code
        rows = self.rows if jnp.dtype(self.dtype).itemsize == 2 else 4 * self.rows
        most = min(max(_TOGETHER // rows, 1), _MOST_HEADS)
        return max(n for n in range(1, most + 1) if self.groups % n == 0)

    @property
    def rows(self) -> int:
        """Of a tile, whole registers."""
        return cdiv(self.group * self.tokens, _SUBLANES) * _SUBLANES

    def state(self, step: int) -> dict[str, Any]:
        """Scratch buffers of the rows; `slope` is used with slopes alone."""
        shape, lanes = (self.groups, self.rows), tiles.LANES
        return {
            "m": pltpu.VMEM((*shape, lanes), jnp.float32),
            "l": pltpu.VMEM((*shape, min(step, lanes)), jnp.float32),
            "acc": pltpu.VMEM((*shape, self.e), jnp.float32),
        }


def rules(args: Any, num_groups: int, tokens: int, query: jax.Array, e: int) -> Rules:
    """Of a call with the options that all ops over cached keys have."""
    _, num_heads, d = query.shape
    cap, scale = args.logits_soft_cap, float(args.softmax_scale)
    natural = cap is not None or args.alibi_slopes is not None or args.k_scale is not None
    natural = natural or scale <= 0.0  # a maximum before scaling would be a minimum after it
    return Rules(
        groups=num_groups,
        group=num_heads // num_groups,
        tokens=tokens,
        d=d,
        e=e,
        dtype=query.dtype,
        scale=scale if natural and args.k_scale is None else None,
        cap=None if cap is None else float(cap),
        left=args.sliding_window[0],
        units=softmax.LOG2_E * (1.0 if natural else scale),
    )


def add_options(args: Any, of: Rules, operands: grid.Operands) -> dict[str, Any]:
    """Adds numbers of heads, in scalar memory; further scratch buffers that they need."""
    number = lambda x: x.astype(jnp.float32)
    if args.k_scale is not None:
        operands.add_scalars("k_scale", number(args.k_scale) * jnp.float32(args.softmax_scale))
    # where keys are values too, there is one scale for both
    v_scale = getattr(args, "v_scale", args.k_scale)
    if v_scale is not None:
        operands.add_scalars("v_scale", number(v_scale))
    if args.softmax_aux is not None:
        sinks = jax.nn.logsumexp(number(args.softmax_aux), axis=-1)
        operands.add_scalars("sinks", jnp.broadcast_to(sinks, (of.groups * of.group,)))
    if args.alibi_slopes is None:
        return {}
    operands.add_scalars("slopes", number(args.alibi_slopes))
    return {"slope": pltpu.VMEM((of.groups, of.rows, tiles.LANES), jnp.float32)}


def attend(
    of: Rules,
    refs: Any,
    cache: keys.AbstractKeys,
    at: keys.Span,
    chain: grid.Chain | None = None,
) -> None:
    """Leaves maxima, sums and weighted values of the rows of `refs.query` [g, rows, d]."""
    refs.m[...] = jnp.full(refs.m.shape, softmax.LEAST, jnp.float32)
    refs.l[...] = jnp.zeros(refs.l.shape, jnp.float32)
    refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)
    if refs.slope is not None:
        for g in range(of.groups):
            refs.slope[g] = _by_row(of, refs.slopes, g)

    def visit(j: Any, slot: Any) -> None:
        first, fresh = cache.bounds(at, j)
        tile = _Tile(first, jnp.maximum(at.low, fresh), at.high, at.position, cache.step)
        whole = tile.whole(of)

        def run(masked: bool) -> None:
            made = dataclasses.replace(tile, masked=masked)

            def some(i: Any, carry: Any) -> Any:
                heads = (i * of.together + g for g in range(of.together))
                grid.overlap([_fold(of, refs, cache, slot, g, made) for g in heads])
                return carry

            if of.together == of.groups:
                some(0, None)
            else:
                count = of.groups // of.together
                jax.lax.fori_loop(np.int32(0), np.int32(count), some, np.int32(0))

        cache.part(refs, slot)

        pl.when(whole)(lambda: run(False))
        pl.when(jnp.logical_not(whole))(lambda: run(True))

    copies = functools.partial(cache.copies, refs, at)
    grid.stream(cache.count(at), copies, visit, chain)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Keys of a step, by their positions; those outside of [low, high) do not count."""

    first: Any
    low: Any
    high: Any
    position: Any  # of the first query
    size: int
    masked: bool = False

    def whole(self, of: Rules) -> Any:
        """Whether every query sees every key."""
        seen = (self.first >= self.low) & (self.first + self.size <= self.high)
        if of.tokens > 1:
            seen &= self.first + self.size - 1 <= self.position
            if of.left is not None:
                seen &= self.first >= self.position + (of.tokens - 1 - of.left)
        return seen

    def keep(self, width: int) -> jax.Array:
        """Which keys count, [size, width]."""
        at = jax.lax.broadcasted_iota(jnp.int32, (self.size, width), 0)
        return (at >= self.low - self.first) & (at < self.high - self.first)

    def visible(self, of: Rules) -> jax.Array:
        """Which pairs count, [rows, size]."""
        lanes = jax.lax.broadcasted_iota(jnp.int32, (of.rows, self.size), 1)
        seen = (lanes >= self.low - self.first) & (lanes < self.high - self.first)
        if of.tokens > 1:
            own = tiles.wide(_token(of) + (self.position - self.first), self.size)
            seen &= lanes <= own
            if of.left is not None:
                seen &= lanes >= own - of.left
        return seen

    def distance(self, of: Rules) -> jax.Array:
        """Key position less query position, [rows, size]."""
        lanes = jax.lax.broadcasted_iota(jnp.int32, (of.rows, self.size), 1)
        start = self.first - self.position
        if of.tokens > 1:
            start = start - tiles.wide(_token(of), self.size)
        return (lanes + start).astype(jnp.float32)


def _token(of: Rules) -> jax.Array:
    """The token of each row, a column."""
    rows = jax.lax.broadcasted_iota(jnp.int32, (of.rows, tiles.LANES), 0)
    return rows & (of.tokens - 1)


def _by_row(of: Rules, numbers: Any, g: int) -> jax.Array:
    """A number for each query head, in scalar memory, as a column for the rows of a key head."""
    rows = jax.lax.broadcasted_iota(jnp.int32, (of.rows, tiles.LANES), 0)
    column = jnp.zeros((of.rows, tiles.LANES), jnp.float32)
    for r in range(of.group):
        column = jnp.where(rows >= r * of.tokens, numbers[g * of.group + r], column)
    return column


def _fold(
    of: Rules, refs: Any, cache: keys.AbstractKeys, slot: Any, g: Any, tile: _Tile
) -> Iterator[None]:
    """Folds the keys of a step into the rows of one key head."""
    k, v = cache.load(refs, slot, g)
    dots = tiles.product(refs.query[g], k, transpose=True)  # [rows, step]
    yield
    x = _logits(of, refs, dots, g, tile)
    if tile.masked:
        x = jnp.where(tile.visible(of), x, -jnp.inf)
    m, l, p, alpha = softmax.update(refs.m[g], refs.l[g], x, of.units)
    refs.m[g], refs.l[g] = m, l
    yield
    if tile.masked:  # a weight of zero must not meet a nan; registers select 32 bits
        v = jnp.where(tile.keep(of.e), v.astype(jnp.float32), 0.0).astype(v.dtype)
    values = tiles.product(p.astype(v.dtype), v)  # [rows, e]
    refs.acc[g] = refs.acc[g] * tiles.wide(alpha, of.e) + values


def _logits(of: Rules, refs: Any, dots: jax.Array, g: Any, tile: _Tile) -> jax.Array:
    x = dots if of.scale is None else dots * of.scale
    if refs.k_scale is not None:
        x = x * refs.k_scale[g]
    if of.cap is not None:
        x = of.cap * jnp.tanh(x * (1.0 / of.cap))
    if refs.slope is not None:
        x = x + tiles.wide(refs.slope[g], tile.size) * tile.distance(of)
    return x


def finish(of: Rules, refs: Any, g: int) -> tuple[jax.Array, jax.Array]:
    """Output [rows, e] in float32 and logsumexp, a column, of the rows of a key head."""
    sink = None if refs.sinks is None else _by_row(of, refs.sinks, g)
    factor, lse = softmax.finish(refs.m[g], refs.l[g], of.units, sink)
    if refs.v_scale is not None:
        factor = factor * refs.v_scale[g]
    return refs.acc[g] * tiles.wide(factor, of.e), lse
