"""Rows times their group's matrix, on Hopper.

A tile has rows of one group, and begins at a multiple of eight rows, as TMA needs: rows of the
group before it, and of the one after it in the last tile, are multiplied and not written.
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
from ejkernel.kernels._pallas.gpu.grouped_matmul import kernel
from ejkernel.kernels._shared import groups
from ejkernel.xla_utils import search

TILE_ROWS = 8  # TMA copies tiles of eight rows


class Tile(NamedTuple):
    """A tile of the result: scalars."""

    matrix: Any
    row: Any  # its first, a multiple of eight
    low: Any  # first row of the group in the tile
    high: Any  # row after its last
    column: Any
    steps: Any  # 0: the rows have no matrix


def tiles(rows: groups.Groups, m: int, size: int, every_row: bool) -> tuple[jax.Array, jax.Array]:
    """Matrix, first row, low, high and whether there is a matrix of each tile [t, 5]; their number.

    Rows without a matrix have tiles of their own with `every_row`, else none.
    """
    start, stop = rows
    count = start.shape[0]
    if every_row:
        some = stop > start
        first, last = jnp.min(jnp.where(some, start, m)), jnp.max(jnp.where(some, stop, 0))
        last = jnp.maximum(last, first)
        zero, end = jnp.zeros(1, jnp.int32), jnp.full(1, m, jnp.int32)
        start = jnp.concatenate([start, zero, last[None]])
        stop = jnp.concatenate([stop, first[None], end])
    begin = start // TILE_ROWS * TILE_ROWS
    counts = jnp.where(stop > start, (stop - begin + size - 1) // size, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    most = (m + start.shape[0] * (size + TILE_ROWS - 2)) // size
    index = jnp.arange(most, dtype=jnp.int32)
    owner = jnp.minimum(search.count_before(ends, index), start.shape[0] - 1)
    row = begin[owner] + (index - (ends - counts)[owner]) * size
    low, high = (jnp.clip(x[owner] - row, 0, size) for x in (start, stop))
    owned = (owner < count).astype(jnp.int32)
    matrix = jnp.where(owned > 0, owner, 0)
    return jnp.stack([matrix, row, low, high, owned], axis=1), ends[-1:]


@dataclasses.dataclass(frozen=True)
class Kernel(kernel.AbstractKernel):
    """Rows [parts, m, inner] times matrices [g, inner, columns], or [g, columns, inner].

    The sum of parts is multiplied.
    """

    parts: int
    inner: int
    columns: int
    transposed: bool

    arrays = ("lhs", "rhs", "table", "count")

    @property
    def _across(self) -> int:
        return cdiv(self.columns, self.cfg.block_n)

    def num_tiles(self, refs: Any) -> Any:
        return refs.count[0] * self._across

    def tile(self, refs: Any, index: Any, total: Any) -> Tile:
        down = lax.div(total, jnp.int32(self._across))
        i, j = kernel.banded(index, down, self._across, self.cfg.band)
        matrix, row, low, high, owned = (refs.table[i, field] for field in range(5))
        steps = owned * self.parts * (self.inner // self.cfg.block_k)
        return Tile(matrix, row, low, high, j * self.cfg.block_n, steps)

    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        k, n = self.cfg.block_k, self.cfg.block_n
        return (self.cfg.rows, k), (n, k) if self.transposed else (k, n)

    def sources(self, refs: Any, tile: Tile, step: Any) -> tuple[list[Any], Any]:
        cfg = self.cfg
        part, step = kernel.part_and_step(step, self.parts, self.inner // cfg.block_k)
        inner, columns = pl.ds(step * cfg.block_k, cfg.block_k), pl.ds(tile.column, cfg.block_n)
        rows = [pl.ds(tile.row + i * cfg.rows, cfg.rows) for i in range(cfg.warpgroups)]
        at = (columns, inner) if self.transposed else (inner, columns)
        return [refs.lhs.at[part, x, inner] for x in rows], refs.rhs.at[tile.matrix, *at]

    def factors(self, left: Any, right: Any) -> tuple[Any, Any]:
        return left, right.transpose((1, 0)) if self.transposed else right

    # Results

    def scratch(self) -> dict[str, Any]:
        # rows at borders are copied one by one, which tiles of eight rows do not allow
        plain = plgpu.SMEM((self.cfg.warpgroups, *self.part), self.out_dtype)
        return super().scratch() | {"plain": plain}

    def store(self, refs: Any, tile: Tile, warpgroup: Any, made: jax.Array) -> None:
        size = self.cfg.rows
        first = warpgroup * size
        low, high = (jnp.clip(x - first, 0, size) for x in (tile.low, tile.high))
        row, (_, width) = tile.row + first, self.part

        def whole() -> None:
            rows = pl.ds(row, size)
            out = lambda column: refs.out.at[rows, pl.ds(tile.column + column, width)]
            self.store_whole(refs, warpgroup, made, out)

        pl.when(high - low == size)(whole)
        pl.when((low < high) & (high - low < size))(
            lambda: self._store_rows(refs, tile, warpgroup, row, (low, high), made)
        )

    def _store_rows(
        self, refs: Any, tile: Tile, warpgroup: Any, row: Any, bounds: Any, made: jax.Array
    ) -> None:
        """Copies rows [low, high) in pieces whose sizes are powers of two."""
        (low, high), (size, width) = bounds, self.part
        plain = refs.plain.at[warpgroup]
        for column in range(0, self.cfg.block_n, width):
            columns = pl.ds(tile.column + column, width)
            mosaic.store_plain(plain, made[:, column : column + width].astype(self.out_dtype))
            plgpu.commit_smem()
            start, piece = low, size // 2
            while piece:
                is_set = (high - low) & piece
                self._copy_rows(refs, plain, start, row, piece, columns, is_set)
                start, piece = start + is_set, piece // 2
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _copy_rows(
        self, refs: Any, plain: Any, start: Any, row: Any, count: int, columns: Any, is_set: Any
    ) -> None:
        def copy() -> None:
            rows, out = pl.ds(start, count), refs.out.at[pl.ds(row + start, count), columns]
            plgpu.copy_smem_to_gmem(plain.at[rows], out)

        # A single row is contiguous, and copied without a tensor map: what is behind its last
        # column would be the next row's.
        pl.when((is_set > 0) & (columns.start < self.columns))(copy)
