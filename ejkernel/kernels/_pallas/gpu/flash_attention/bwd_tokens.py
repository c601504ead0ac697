"""The attention backward where ids or lengths decide which queries meet the keys of a program."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._pallas.gpu._blocks import mosaic, segment_ranges
from ejkernel.kernels._pallas.gpu.flash_attention import bwd_plan, masks


class Tokens(NamedTuple):
    """Device memory that is read, int32; tiles have 128 keys."""

    bounds: Any  # [b, tiles of keys, 4] of `bwd_plan.Bounds`
    rows: Any  # [b, limits, s] of keys
    keys: Any  # [b, s] ids; padding is negative
    queries: Any  # [b, t]
    key_padding: Any  # [b, tiles of keys]: whether there is any
    query_padding: Any  # [b, blocks of queries]


def of_sides(plan: bwd_plan.Plan, sides: Any) -> Tokens:
    """What the kernel of a plan reads, from `segment_ranges.sides`."""
    queries, keys = sides
    size = bwd_plan.TILE_KEYS
    found = segment_ranges.blocks(keys, queries, size, plan.block_q)
    full, ragged = found.full, found.ragged
    if plan.cuts_keys:  # weights of rows behind the last key may overflow unless they are masked
        is_cut = jnp.arange(plan.k_tiles)[None] == plan.k_tiles - 1
        full, ragged = (jnp.where(is_cut, found.first, x) for x in (full, ragged))
    # keys that nobody sees visit one block, masked
    bounds = (found.first, full, ragged, jnp.maximum(found.last, 1))
    length = plan.k_tiles * size
    return Tokens(
        bounds=jnp.stack(bounds, axis=-1),
        rows=segment_ranges.rows(keys, length, plan.limits),
        keys=segment_ranges.marks(keys, length),
        queries=segment_ranges.marks(queries, plan.padded_q),
        key_padding=segment_ranges.has_padding(keys, size),
        query_padding=segment_ranges.has_padding(queries, plan.block_q),
    )


def bounds(tokens: Tokens, batch: Any, tile: Any) -> bwd_plan.Bounds:
    """Of a tile of keys."""
    return bwd_plan.Bounds(*(tokens.bounds[batch, tile, i] for i in range(4)))


def limits(plan: bwd_plan.Plan, tokens: Tokens, batch: Any, key: Any, query: Any) -> Any:
    """What 64 keys from `key` on compare with a block of queries from `query` on."""
    rows = tokens.rows.at[batch, :, pl.ds(key, mosaic.ROWS)]
    ids = tokens.queries.at[batch, pl.ds(query, plan.block_q)]
    return masks.read_limits(plan.limits, rows, ids)


def load_tiles(
    tiles: Sequence[tuple[Any, Any]], ids: Any, is_padded: Any, raw: Any, loaded: Any
) -> None:
    """Copies tiles, with zeros for padding, and arrives at `loaded` once for each.

    0 * nan is nan: the weights of padding are 0, and products multiply them by what padding holds.
    """

    def copy() -> None:
        for source, target in tiles:
            plgpu.copy_gmem_to_smem(source, target, loaded)

    def copy_and_clear() -> None:
        for source, target in tiles:
            plgpu.copy_gmem_to_smem(source, target, raw)
        plgpu.barrier_wait(raw)
        for _, target in tiles:
            mosaic.clear_rows(target, ids)
        plgpu.commit_smem()
        for _ in tiles:
            plgpu.barrier_arrive(loaded)

    pl.when(is_padded)(copy_and_clear)
    pl.when(~is_padded)(copy)
