"""Which blocks of keys a tile of queries visits, and which keys its rows see there.

Indices decide, known when the kernel is compiled; or tokens do, by ids and lengths that a kernel
reads. Both have the same attributes and methods.
"""

import functools
import operator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._pallas.gpu._blocks import mosaic, ranges, segment_ranges
from ejkernel.kernels._pallas.gpu.flash_attention import config

_ROWS = mosaic.ROWS
_COMPARE = {"first": operator.ge, "last": operator.le, "ids": operator.eq}


class ByIndex:
    """Causal masks, windows and lengths."""

    arrays: ClassVar[dict[str, jax.Array]] = {}  # indices decide: nothing is read
    has_padding = False

    def __init__(self, reach: ranges.Reach, cfg: config.Config, tiles: int):
        self.reach, self.block_q, self.block_k = reach, cfg.block_q, cfg.block_k
        rows = np.arange(tiles * cfg.block_q).reshape(tiles, -1)
        tile = reach.blocks(rows[:, 0], rows[:, -1])
        parts = rows.reshape(tiles, cfg.warpgroups, -1)
        whole = ranges.Blocks(*(x[:, None] for x in tile))
        mine = _within(reach.blocks(parts[..., 0], parts[..., -1]), whole)
        differs = (mine.top != whole.top) | (mine.bottom != whole.bottom)
        self.is_uneven = bool(differs.any())
        self.has_edges = bool((mine.top - mine.edge > 1).any())
        self.has_left = bool((mine.inner > mine.bottom).any())
        near = reach.left is not None or reach.right is not None
        self.masks_first = near or reach.is_ragged
        self.work = tuple((tile.top - tile.bottom).tolist())

    def of_tile(self, refs: Any, batch: Any, row: Any) -> ranges.Blocks:
        """The blocks of a tile that begins with a row."""
        del refs, batch
        return self.reach.blocks(row, row + (self.block_q - 1))

    def of_warpgroup(self, refs: Any, tile: Any, row: Any) -> ranges.Blocks:
        """Of those of a tile, the blocks of a warpgroup that begins with a row."""
        del refs
        return _within(self.reach.blocks(row, row + (_ROWS - 1)), tile.blocks)

    def seen(self, refs: Any, tile: Any, row: Any, j: Any, mask: str) -> jax.Array:
        """Which keys of block j the 64 rows see, [64, bk]; `mask` names its part of the blocks."""
        del refs, tile
        shape = (_ROWS, self.block_k)
        rows = lax.broadcast_in_dim(_iota(_ROWS, mosaic.ROW) + row, shape, (0,))
        keys = _iota(self.block_k, mosaic.COLUMN) + j * self.block_k
        keys = lax.broadcast_in_dim(keys, shape, (1,))
        if mask == "edge":
            return self.reach.sees_at_edges(rows, keys, _ROWS)
        return self.reach.sees_left(rows, keys)


class ByTokens:
    """Segment ids and lengths, with causal masks and windows.

    The fixed reference of a row comes from the blocks from `edge` on: these hold a key that the row
    surely sees, or the last of the blocks that all rows see is one of them.
    """

    is_uneven = has_edges = has_left = masks_first = has_padding = True

    def __init__(self, sides: Any, limits: tuple[str, ...], cfg: config.Config, tiles: int):
        queries, keys = sides
        self.block_q, self.block_k, self.warpgroups = cfg.block_q, cfg.block_k, cfg.warpgroups
        self.limits = limits
        mine = self._blocks(queries, keys, tiles)
        is_empty = mine.top == mine.bottom
        none = -(-keys.first.shape[1] // self.block_k)
        bottom = jnp.where(is_empty, none, mine.bottom).min(-1, keepdims=True)
        top = mine.top.max(-1, keepdims=True)
        bottom = jnp.where(top == 0, 0, bottom)
        top = jnp.maximum(top, 1)
        # rows that see nothing visit the first block of the others, masked
        mine = [jnp.where(is_empty, bottom + int(i == 0), x) for i, x in enumerate(mine)]
        whole = (top, bottom, bottom, bottom)
        columns = [jnp.concatenate(pair, axis=-1) for pair in zip(whole, mine, strict=True)]
        self.work = (top - bottom)[..., 0]
        length = none * self.block_k
        self.arrays = {
            "blocks": jnp.stack(columns, axis=-1),  # [b, tiles, 1 + warpgroups, 4]
            "rows": segment_ranges.rows(queries, tiles * self.block_q, limits),
            "keys": segment_ranges.marks(keys, length),
            "padding": segment_ranges.has_padding(keys, self.block_k),
        }

    def _blocks(self, queries: Any, keys: Any, tiles: int) -> ranges.Blocks:
        """[b, tiles, warpgroups]; all zero for rows that see nothing."""
        found = segment_ranges.blocks(queries, keys, _ROWS, self.block_k)
        known = segment_ranges.sees_behind(queries, keys, _ROWS, self.block_k)
        edge = jnp.where(known >= found.ragged, found.ragged, found.ragged - 1)
        edge = jnp.clip(jnp.minimum(edge, found.last - 1), found.first, None)
        made = (found.last, edge, jnp.minimum(found.full, edge), found.first)
        behind = ((0, 0), (0, tiles * self.warpgroups - edge.shape[1]))
        shape = (-1, tiles, self.warpgroups)
        return ranges.Blocks(*(jnp.pad(x, behind).reshape(shape) for x in made))

    def of_tile(self, refs: Any, batch: Any, row: Any) -> ranges.Blocks:
        return self._read(refs, batch, lax.div(row, jnp.int32(self.block_q)), 0)

    def of_warpgroup(self, refs: Any, tile: Any, row: Any) -> ranges.Blocks:
        index = lax.div(tile.row, jnp.int32(self.block_q))
        return self._read(refs, tile.batch, index, 1 + lax.div(row - tile.row, jnp.int32(_ROWS)))

    def _read(self, refs: Any, batch: Any, index: Any, part: Any) -> ranges.Blocks:
        return ranges.Blocks(*(refs.blocks[batch, index, part, i] for i in range(4)))

    def seen(self, refs: Any, tile: Any, row: Any, j: Any, mask: str) -> jax.Array:
        del mask
        start, size = j * self.block_k, self.block_k
        # limits that are read before the products are compared before them: ptxas then packs the
        # results, which takes 240 instructions more
        rows = refs.rows.at[tile.batch, :, pl.ds(row, _ROWS)]
        limits = read_limits(self.limits, rows, refs.keys.at[tile.batch, pl.ds(start, size)])
        return within_limits(limits, start, size)


def read_limits(names: tuple[str, ...], rows: Any, ids: Any) -> dict[str, tuple[jax.Array, ...]]:
    """What 64 held tokens are compared by, and the ids of the others; by the names of limits.

    `rows` are 64 of `segment_ranges.rows`, `ids` marks of the other side, in device memory. Few
    blocks need them, so that they go past shared memory.
    """
    made: dict[str, tuple[jax.Array, ...]] = {
        name: (mosaic.load_global(rows.at[i], mosaic.ROW),) for i, name in enumerate(names)
    }
    if "ids" in made:
        made["ids"] += (mosaic.load_global(ids, mosaic.COLUMN),)
    return made


def within_limits(limits: dict[str, tuple[jax.Array, ...]], start: Any, size: int) -> jax.Array:
    """Which of `size` tokens from `start` on the 64 held tokens see, [64, size]."""
    shape, found = (_ROWS, size), []
    for name, (limit, *ids) in limits.items():
        (other,) = ids or [_iota(size, mosaic.COLUMN) + start]
        other = lax.broadcast_in_dim(other, shape, (1,))
        found.append(_COMPARE[name](other, lax.broadcast_in_dim(limit, shape, (0,))))
    return functools.reduce(operator.and_, found)


def _iota(size: int, layout: Any) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (size,), dimension=0, layout=layout)


def _within(mine: ranges.Blocks, whole: ranges.Blocks) -> ranges.Blocks:
    """A warpgroup's blocks among those of its tile: rows that see nothing visit any one."""
    xp = np if isinstance(mine.top, np.ndarray) else jnp
    bottom = xp.minimum(mine.bottom, whole.top - 1)
    top = xp.clip(mine.top, bottom + 1, whole.top)
    edge = xp.clip(mine.edge, bottom, top - 1)
    return ranges.Blocks(top, edge, xp.clip(mine.inner, bottom, edge), bottom)
