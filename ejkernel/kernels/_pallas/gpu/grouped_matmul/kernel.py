"""What both grouped products on Hopper have in common: a ring of tiles, and persistent programs.

A result is made in tiles of [block_m, block_n]. Program p takes the tiles p, p + programs, ..; one
warpgroup copies tiles of both factors into a ring in shared memory with TMA, for the tiles to come
too, and the others multiply, each for its own rows of the result. Sums stay in registers.
"""

import dataclasses
import types
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._pallas.gpu._blocks import launch, mosaic
from ejkernel.kernels._pallas.gpu.grouped_matmul import config

CLEARED = 5  # named barrier of the warpgroups that multiply; Mosaic uses those before
# of a thread: of two warpgroups that multiply, and of the one that loads
_REGISTERS, _LOAD_REGISTERS = 232, 40


@dataclasses.dataclass(frozen=True)
class AbstractKernel:
    """The body of a launch."""

    cfg: config.Config
    dtype: Any  # of both factors
    out_dtype: Any

    arrays: ClassVar[tuple[str, ...]]  # names of what it reads

    # What a product is of

    def num_tiles(self, refs: Any) -> Any:
        """Tiles of the result."""
        raise NotImplementedError

    def tile(self, refs: Any, index: Any, total: Any) -> Any:
        """The tile with a number of `total`; `steps` of it counts the tiles of factors it takes."""
        raise NotImplementedError

    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of tiles in the ring: the left factor of one warpgroup, and the right one."""
        raise NotImplementedError

    def sources(self, refs: Any, tile: Any, step: Any) -> tuple[Sequence[Any], Any]:
        """Device memory of the left factors of all warpgroups, and of the right one."""
        raise NotImplementedError

    def factors(self, left: Any, right: Any) -> tuple[Any, Any]:
        """Tiles of the ring as factors [rows, block_k] and [block_k, block_n]."""
        raise NotImplementedError

    def clear(self, refs: Any, tile: Any, step: Any, slot: Any, warpgroup: Any) -> None:
        """Sets to zero what a step must not add."""

    def store(self, refs: Any, tile: Any, warpgroup: Any, made: jax.Array) -> None:
        """Writes a warpgroup's rows of a tile."""
        raise NotImplementedError

    # Launches

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers of a program."""
        cfg, (left, right) = self.cfg, self.shapes()
        return {
            "left": mosaic.tile(cfg.num_stages, cfg.warpgroups, *left, dtype=self.dtype),
            "right": mosaic.tile(cfg.num_stages, *right, dtype=self.dtype),
            "staging": mosaic.tile(
                cfg.warpgroups, cfg.num_buffers, *self.part, dtype=self.out_dtype
            ),
            "loaded": plgpu.Barrier(num_arrivals=cfg.warpgroups + 1, num_barriers=cfg.num_stages),
            "read": plgpu.Barrier(num_arrivals=cfg.warpgroups, num_barriers=cfg.num_stages),
        }

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns that a warpgroup writes at a time: rows of 128 bytes."""
        return self.cfg.rows, 128 // jnp.dtype(self.out_dtype).itemsize

    def launch(
        self, arrays: Sequence[jax.Array], shape: tuple[int, ...], existing: jax.Array | None = None
    ) -> jax.Array:
        """The result, of a shape; or what `existing` becomes."""
        cfg, scratch = self.cfg, self.scratch()
        names = (*self.arrays, "out", *scratch)

        def body(*refs: Any) -> None:
            self._run(types.SimpleNamespace(**dict(zip(names, refs, strict=True))))

        (made,) = launch.launch(
            body,
            arrays,
            outputs=() if existing is not None else ((shape, self.out_dtype),),
            updated=() if existing is None else (existing,),
            scratch=list(scratch.values()),
            programs=cfg.num_programs,
            warpgroups=cfg.warpgroups + 1,
        )
        return made

    def _run(self, refs: Any) -> None:
        warpgroup, loads = lax.axis_index("warpgroup"), self.cfg.warpgroups
        pl.when(warpgroup < loads)(lambda: self._compute(refs, warpgroup))
        pl.when(warpgroup == loads)(lambda: self._load(refs))

    def _tiles(self, refs: Any, visit: Any) -> None:
        """Calls visit(tile, first) for each tile of a program; `first` counts steps before it."""
        cta, programs, total = lax.axis_index("cta"), self.cfg.num_programs, self.num_tiles(refs)

        def numbered(i: Any) -> Any:
            return self.tile(refs, jnp.clip(cta + i * programs, 0, total - 1), total)

        def one(i: Any, carry: Any) -> Any:
            first, tile = carry
            ahead = numbered(i + 1)  # read before it is needed
            visit(tile, first)
            return first + tile.steps, ahead

        rounds = lax.div(total - cta + programs - 1, jnp.int32(programs))
        lax.fori_loop(0, rounds, one, (jnp.int32(0), numbered(0)))

    def _slot(self, count: Any) -> Any:
        return lax.rem(count, jnp.int32(self.cfg.num_stages))

    # The warpgroup that loads

    def _load(self, refs: Any) -> None:
        if self.cfg.warpgroups > 1:
            plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")

        def visit(tile: Any, first: Any) -> None:
            def step(i: Any, carry: None) -> None:
                slot = self._slot(first + i)
                is_used = first + i >= self.cfg.num_stages
                pl.when(is_used)(lambda: plgpu.barrier_wait(refs.read.at[slot]))
                left, right = self.sources(refs, tile, i)
                for j, gmem in enumerate(left):
                    plgpu.copy_gmem_to_smem(gmem, refs.left.at[slot, j], refs.loaded.at[slot])
                plgpu.copy_gmem_to_smem(right, refs.right.at[slot], refs.loaded.at[slot])
                return carry

            lax.fori_loop(0, tile.steps, step, None)

        self._tiles(refs, visit)

    # The warpgroups that multiply

    def _compute(self, refs: Any, warpgroup: Any) -> None:
        if self.cfg.warpgroups > 1:  # one warpgroup has all that it can name
            plgpu.set_max_registers(_REGISTERS, action="increase")

        def visit(tile: Any, first: Any) -> None:
            made = self._multiply(refs, tile, first, warpgroup)
            self.store(refs, tile, warpgroup, made)

        self._tiles(refs, visit)
        plgpu.wait_smem_to_gmem(0)

    def _multiply(self, refs: Any, tile: Any, first: Any, warpgroup: Any) -> jax.Array:
        """Sums [rows, block_n] of a tile; a step's memory is given back when the next one runs."""

        def give_back(step: Any) -> None:
            plgpu.barrier_arrive(refs.read.at[self._slot(first + step)])

        def scope(acc: Any) -> jax.Array:
            def step(i: Any, carry: None) -> None:
                slot = self._slot(first + i)
                plgpu.barrier_wait(refs.loaded.at[slot])
                self.clear(refs, tile, i, slot, warpgroup)
                plgpu.wgmma(acc, *self.factors(refs.left.at[slot, warpgroup], refs.right.at[slot]))
                plgpu.wgmma_wait(1)
                pl.when(i > 0)(lambda: give_back(i - 1))
                return carry

            lax.fori_loop(0, tile.steps, step, None)
            made = acc[...]
            pl.when(tile.steps > 0)(lambda: give_back(tile.steps - 1))
            return made

        shape = (self.cfg.rows, self.cfg.block_n)
        acc_type = plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        return pl.run_scoped(scope, acc_type)

    def store_whole(self, refs: Any, warpgroup: Any, made: jax.Array, out: Any) -> None:
        """Copies all rows to `out(column)`, which gives device memory of a part's shape."""
        _, width = self.part
        for i, column in enumerate(range(0, self.cfg.block_n, width)):
            staging = refs.staging.at[warpgroup, i % self.cfg.num_buffers]
            plgpu.wait_smem_to_gmem(self.cfg.num_buffers - 1, wait_read_only=True)
            staging[...] = made[:, column : column + width].astype(self.out_dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, out(column))


def banded(index: Any, num_rows: Any, num_columns: int, band: int) -> tuple[Any, Any]:
    """Row and column of a tile: bands of `band` rows, each column by column.

    Programs at work at one time then share few rows and few columns, which stay in the L2 cache.
    """
    across = jnp.int32(band * num_columns)
    top = lax.div(index, across) * band
    height = jnp.clip(num_rows - top, 1, band)  # there may be no row at all
    rest = lax.rem(index, across)
    return top + lax.rem(rest, height), lax.div(rest, height)


def part_and_step(step: Any, parts: int, steps: Any) -> tuple[Any, Any]:
    """Which part of a factor a step is of, and which of the part's `steps` it is."""
    if parts == 1:
        return 0, step
    steps = jnp.int32(steps)
    return lax.div(step, steps), lax.rem(step, steps)
