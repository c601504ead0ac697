"""Sums over a group's rows of left row times right row, on Hopper: the gradient of matrices.

Steps take `block_k` rows. They begin at a multiple of eight, as TMA needs; rows of other groups in
the first and the last step are set to zero in shared memory, in both factors: 0 * nan is nan.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.gpu._blocks import mosaic
from ejkernel.kernels._pallas.gpu.grouped_matmul import kernel, rows


class Tile(NamedTuple):
    """A tile of the result: scalars."""

    matrix: Any
    row: Any  # of the result
    column: Any
    begin: Any  # first row of the factors, a multiple of eight
    start: Any  # first row of the group
    stop: Any  # row after its last
    steps_of_part: Any
    steps: Any


@dataclasses.dataclass(frozen=True)
class Kernel(kernel.AbstractKernel):
    """Rows [parts, m, num_i] and [parts, m, num_j] of `count` groups, to [count, num_i, num_j].

    The sums of parts are multiplied; one factor has a single part.
    """

    parts: tuple[int, int]
    num_i: int
    num_j: int
    count: int

    arrays = ("lhs", "rhs", "starts", "stops")

    @property
    def _tiles_of_matrix(self) -> tuple[int, int]:
        return cdiv(self.num_i, self.cfg.block_m), cdiv(self.num_j, self.cfg.block_n)

    def num_tiles(self, refs: Any) -> Any:
        down, across = self._tiles_of_matrix
        return self.count * down * across

    def tile(self, refs: Any, index: Any, total: Any) -> Tile:
        cfg, (down, across) = self.cfg, self._tiles_of_matrix
        each = jnp.int32(down * across)
        matrix = lax.div(index, each)
        i, j = kernel.banded(lax.rem(index, each), down, across, cfg.band)
        start, stop = refs.starts[matrix], refs.stops[matrix]
        begin = lax.div(start, jnp.int32(rows.TILE_ROWS)) * rows.TILE_ROWS
        steps = lax.div(stop - begin + cfg.block_k - 1, jnp.int32(cfg.block_k))
        steps = jnp.where(stop > start, steps, 0)
        all_steps = steps * max(self.parts)
        return Tile(matrix, i * cfg.block_m, j * cfg.block_n, begin, start, stop, steps, all_steps)

    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (self.cfg.block_k, self.cfg.rows), (self.cfg.block_k, self.cfg.block_n)

    def sources(self, refs: Any, tile: Tile, step: Any) -> tuple[list[Any], Any]:
        cfg = self.cfg
        part, row = self._part_and_row(tile, step)
        of_left, of_right = (part if parts > 1 else 0 for parts in self.parts)
        at = pl.ds(row, cfg.block_k)
        columns = [pl.ds(tile.row + i * cfg.rows, cfg.rows) for i in range(cfg.warpgroups)]
        left = [refs.lhs.at[of_left, at, x] for x in columns]
        return left, refs.rhs.at[of_right, at, pl.ds(tile.column, cfg.block_n)]

    def _part_and_row(self, tile: Tile, step: Any) -> tuple[Any, Any]:
        part, step = kernel.part_and_step(step, max(self.parts), tile.steps_of_part)
        return part, tile.begin + step * self.cfg.block_k

    def factors(self, left: Any, right: Any) -> tuple[Any, Any]:
        return left.transpose((1, 0)), right

    def clear(self, refs: Any, tile: Tile, step: Any, slot: Any, warpgroup: Any) -> None:
        cfg = self.cfg
        _, row = self._part_and_row(tile, step)
        low, high = tile.start - row, tile.stop - row

        def clear() -> None:
            left, right = refs.left.at[slot, warpgroup], refs.right.at[slot]
            mosaic.clear_outside(left, low, high, range(0, cfg.rows, mosaic.PART))
            for i in range(cfg.warpgroups):  # they share the columns of the right factor
                mine = range(i * mosaic.PART, cfg.block_n, cfg.warpgroups * mosaic.PART)
                pl.when(warpgroup == i)(
                    lambda mine=mine: mosaic.clear_outside(right, low, high, mine)
                )
            plgpu.commit_smem()
            threads = cfg.warpgroups * mosaic.WARPGROUP
            mosaic.named_barrier("sync", kernel.CLEARED, threads)

        pl.when((low > 0) | (high < cfg.block_k))(clear)

    def store(self, refs: Any, tile: Tile, warpgroup: Any, made: jax.Array) -> None:
        rows_, width = self.part
        at = pl.ds(tile.row + warpgroup * rows_, rows_)
        out = lambda column: refs.out.at[tile.matrix, at, pl.ds(tile.column + column, width)]
        self.store_whole(refs, warpgroup, made, out)
