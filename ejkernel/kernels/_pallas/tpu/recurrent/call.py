"""One call of a recurrent layer as the kernels see it: steps first, whole registers, the grid.

Arrays of all steps are [t, b, p * n]: a step is then a tile of batch rows times columns. The units
of columns, the features of the state, are filled up to whole registers. The grid is (directions,
blocks of batch rows, blocks of steps); the last axis runs in order, from the last step to the first
where a direction does, or in its backward. The last blocks of rows and of steps may be shorter.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.tpu._blocks import grid, tiles
from ejkernel.kernels._pallas.tpu.recurrent import cells, config
from ejkernel.kernels._shared import cells as shared
from ejkernel.kernels._specs import recurrent as spec

_OPTIONAL = ("inner_bias", "lengths", "c", "c_start", "cells", "states")
_FLOAT = jnp.float32


class Call:
    """Sizes, arrays and block specs; `back` runs every direction the other way round."""

    def __init__(self, args: Any, cfg: config.Config, back: bool = False):
        self.args, self.cfg, self.is_back = args, config.fitting(args, cfg), back
        self.cell = cells.Cell(args)
        self.dtype = shared.product_dtype(args)
        self.batch, self.t, _ = args.inputs.shape
        self.count, rows, self.d = args.w_hh.shape
        self.gates, self.kept = rows // self.d, spec.KEPT[args.cell_type]
        self.width = config.width(args)  # columns of a unit
        self.rows, self.steps = self.cfg.block_b, self.cfg.block_t
        self.blocks = cdiv(self.t, self.steps)
        self.grid = (self.count, cdiv(self.batch, self.rows), self.blocks)
        self.operands = grid.Operands(optional=_OPTIONAL)

    # Arrays

    def by_steps(self, x: jax.Array, units: int) -> jax.Array:
        """[b, t, p * units * d] as [t, b, p * units * width]."""
        x = x.swapaxes(0, 1)
        if self.width == self.d:
            return x
        x = x.reshape(self.t, self.batch, self.count * units, self.d)
        return grid.pad_to(x, 3, self.width).reshape(self.t, self.batch, -1)

    def as_given(self, x: jax.Array) -> jax.Array:
        """The inverse of `by_steps`."""
        if self.width != self.d:
            x = x.reshape(self.t, self.batch, -1, self.width)[..., : self.d]
            x = x.reshape(self.t, self.batch, -1)
        return x.swapaxes(0, 1)

    def wide_rows(self, weight: jax.Array) -> jax.Array:
        """Weights or biases [p, m, …] with whole units of rows, [p, gates * width, …]."""
        if self.width == self.d:
            return weight
        parts = weight.reshape(self.count, self.gates, self.d, *weight.shape[2:])
        return grid.pad_to(parts, 2, self.width).reshape(self.count, -1, *weight.shape[2:])

    def projections(self, bias: jax.Array | None) -> jax.Array:
        """The inputs of all steps and directions, [t, b, p * gates * width] in float32."""
        args = self.args
        inputs = shared.seen_inputs(args, args.inputs, 0).swapaxes(0, 1)
        weight = self.wide_rows(args.w_ih).reshape(-1, args.w_ih.shape[2])
        bias = None if bias is None else self.wide_rows(bias).reshape(-1)
        return shared.project(inputs, weight, bias)

    def state(self, x: jax.Array) -> jax.Array:
        """A state like the caller's as [p, b, width] in float32."""
        x = x if self.args.bidirectional else x[None]
        return grid.pad_to(x.astype(_FLOAT), 2, self.width)

    def finals(self, h: jax.Array, c: jax.Array | None) -> list[jax.Array]:
        """States [p, b, width] as arrays like the caller's."""
        each = [x[..., : self.d] for x in (h, c) if x is not None]
        return shared.finals(self.args, [tuple(x[p] for x in each) for p in range(self.count)])

    def add_steps(self, name: str, x: jax.Array, units: int) -> None:
        self.operands.add(name, x, self.step_spec(units))

    def add_state(self, name: str, x: jax.Array | None) -> None:
        if x is not None:
            self.operands.add(name, self.state(x), self.state_spec())

    def add_weights(self, weight: jax.Array) -> None:
        """[p, n, m], in one buffer: they change with the direction alone."""
        index = lambda p, b, n, table: (p, 0, 0)
        once = pl.BlockSpec((None, *weight.shape[1:]), index, pipeline_mode=pl.Buffered(1))
        self.operands.add("weight", weight.astype(self.dtype), once)

    def add_lengths(self) -> None:
        if self.args.lengths is not None:
            column = jnp.broadcast_to(self.args.lengths[:, None], (self.batch, tiles.LANES))
            block = pl.BlockSpec((self.rows, tiles.LANES), lambda p, b, n, table: (b, 0))
            self.operands.add("lengths", column, block)

    # Block specs

    def _place(self, backwards: Any, n: Any) -> Any:
        """The block of steps that is the n-th to run."""
        return jnp.where(backwards, np.int32(self.blocks - 1) - n, n)

    def step_spec(self, units: int) -> pl.BlockSpec:
        def index(p: Any, b: Any, n: Any, table: Any) -> tuple[Any, ...]:
            return self._place(table[p] != 0, n), b, p

        return pl.BlockSpec((self.steps, self.rows, units * self.width), index)

    def state_spec(self) -> pl.BlockSpec:
        shape = (None, self.rows, self.width)
        return pl.BlockSpec(shape, lambda p, b, n, table: (p, b, 0))

    def of_steps(self, units: int, dtype: Any = _FLOAT) -> tuple[Any, Any]:
        shape = (self.t, self.batch, self.count * units * self.width)
        return jax.ShapeDtypeStruct(shape, dtype), self.step_spec(units)

    def of_state(self) -> tuple[Any, Any]:
        shape = (self.count, self.batch, self.width)
        return jax.ShapeDtypeStruct(shape, _FLOAT), self.state_spec()

    # Inside a kernel

    def parts(self) -> range:
        """First columns of the parts of a unit that are worked on at once."""
        return range(0, self.width, self.cfg.block_d)

    def part(self, start: int, unit: int = 0) -> slice:
        """The columns of a part, of a unit."""
        first = unit * self.width + start
        return slice(first, first + self.cfg.block_d)

    def seen(self, refs: Any, i: Any) -> jax.Array | None:
        """Which rows have a step i, for each column of a part; None means all."""
        if refs.lengths is None:
            return None
        return tiles.wide(refs.lengths[...], self.cfg.block_d) > i

    def for_steps(self, refs: Any, body: Callable[[Any, Any, Any], None]) -> None:
        """Runs `body(j, i, turn)`: a step in the block and in all, and 0 and 1 in turns."""
        backwards, n = refs.table[pl.program_id(0)] != 0, pl.program_id(2)
        first = self._place(backwards, n) * np.int32(self.steps)
        rest, done = self.t % self.steps, n * np.int32(self.steps)
        size: Any = np.int32(self.steps)
        if rest:  # the last block is shorter, and the first to run if steps run backwards
            size = jnp.minimum(self.t - first, size)
            done = done - jnp.where(backwards & (n > 0), np.int32(self.steps - rest), 0)

        def run(k: Any, carry: Any) -> Any:
            j = jnp.where(backwards, size - 1 - k, k)
            body(j, first + j, jax.lax.rem(done + k, np.int32(2)))
            return carry

        jax.lax.fori_loop(np.int32(0), size, run, np.int32(0))

    def run(
        self,
        name: str,
        body: Callable[[Any, Any], None],
        out: dict[str, tuple[Any, Any]],
        scratch: dict[str, Any],
        direction: str,
    ) -> dict[str, Any]:
        """Results of `body(call, refs)` by name."""
        ways = [way != self.is_back for way in spec.directions(self.args)]
        made = self.operands.run(
            name,
            functools.partial(body, self),
            jnp.asarray(ways, jnp.int32),
            out,
            scratch,
            self.grid,
            sequential=1,
            vmem_limit=config.vmem_limit(self.args, self.cfg, direction),
        )
        return dict(zip(out, made, strict=True))
