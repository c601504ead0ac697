"""One call of the linear recurrence as the kernels see it: chunks of tokens, gates and the grid.

The grid is (batch, heads, steps): the steps of a row, or of all packed sequences, run in order. No
step has tokens of two sequences. Token arrays are [steps, b, h, tokens, width].
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ejkernel.kernels._pallas.tpu._blocks import grid, tiles
from ejkernel.kernels._pallas.tpu.linear_recurrence import chunk, config, levels, scalar
from ejkernel.kernels._shared import token_chunks
from ejkernel.kernels._specs.linear_recurrence import num_heads

# rows of the table, with a number for each step
_SLOT, _FIRST, _LAST, _COUNT = range(4)
_OPTIONAL = ("query", "gk", "gv", "token", "gamma", "initial", "last")


class Call:
    """Sizes, arrays and block specs; `backward` runs the steps from the last to the first."""

    def __init__(self, args: Any, cfg: config.Config, direction: str, backward: bool = False):
        self.args, self.cfg, self.backward = args, config.fitting(args, cfg), backward
        self.direction = direction
        self.batch, self.t, _, self.d = args.query.shape
        self.e, self.heads = args.value.shape[-1], num_heads(args)
        self.dtype = args.query.dtype
        if any(x.dtype == jnp.float32 for x in (args.query, args.key, args.value)):
            self.dtype = jnp.dtype(jnp.float32)
        self.cut = token_chunks.Chunks(self.t, self.cfg.block_t, 1, args.cu_seqlens, args.reverse)
        self.steps = self.cut.count
        self.packed = args.cu_seqlens is not None
        self.scale = np.float32(args.softmax_scale)
        self.states = args.cu_seqlens.shape[0] - 1 if self.packed else self.batch
        self.grid = (self.batch, self.heads, self.steps)
        self.table = self._table()
        self.operands = grid.Operands(optional=_OPTIONAL)

    def _table(self) -> jax.Array:
        """[4, steps]: the state of a step, whether it is its first or last, and real tokens."""
        size, steps = self.cfg.block_t, self.steps
        if not self.packed:
            step = np.arange(steps)
            count = np.minimum(self.t - step * size, size)
            rows = [0 * step, step == 0, step == steps - 1, count]
            return jnp.asarray(np.stack(rows).astype(np.int32))
        cut = self.cut
        count = (cut.token < self.t).reshape(steps, size).sum(axis=1)
        used = count > 0
        # steps after the last sequence stay at its state, which they do not touch
        sequence: Any = cut.sequence
        slot = jnp.where(used, sequence, jnp.max(jnp.where(used, sequence, 0)))
        rows = [slot, cut.first & used, cut.last & used, count]
        return jnp.stack([jnp.asarray(row, jnp.int32) for row in rows])

    def empty(self) -> jax.Array:
        """Packed sequences without a token, [n, 1, 1, 1]: no step comes to their states."""
        starts, ends = (
            jnp.clip(x, 0, self.t) for x in (self.args.cu_seqlens[:-1], self.args.cu_seqlens[1:])
        )
        return (ends <= starts).reshape(-1, 1, 1, 1)

    # The place of a program

    def _step(self, i: Any) -> Any:
        return self.steps - 1 - i if self.backward else i

    def read(self, table: Any, row: int) -> Any:
        return self._of_step(table, row, pl.program_id(2))

    def _of_step(self, table: Any, row: int, i: Any) -> Any:
        return table[row * self.steps + self._step(i)]

    def at_first(self, refs: Any) -> Callable:
        return pl.when(self.read(refs.table, _FIRST) != 0)

    def at_last(self, refs: Any) -> Callable:
        return pl.when(self.read(refs.table, _LAST) != 0)

    def if_used(self, refs: Any) -> Callable:
        return pl.when(self.read(refs.table, _COUNT) > 0)

    # Block specs

    def token_spec(self, heads: int, rows: int, width: int) -> pl.BlockSpec:
        shared = np.int32(self.heads // heads)
        shape = (None, None, None, rows, width)
        index = lambda b, h, i, table: (self._step(i), b, jax.lax.div(h, shared), 0, 0)
        return pl.BlockSpec(shape, index)

    def state_spec(self) -> pl.BlockSpec:
        """Of a row's or a sequence's state, [n, h, e, d]."""

        def index(b: Any, h: Any, i: Any, table: Any) -> tuple[Any, ...]:
            slot = table[_SLOT * self.steps + self._step(i)] if self.packed else b
            return slot, h, 0, 0

        return pl.BlockSpec((None, None, self.e, self.d), index)

    def step_state(self) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        """A state of each step."""
        shape = (self.steps, self.batch, self.heads, self.e, self.d)
        spec = self.token_spec(self.heads, self.e, self.d)
        return jax.ShapeDtypeStruct(shape, jnp.float32), spec

    def last_state(self) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        shape = (self.states, self.heads, self.e, self.d)
        return jax.ShapeDtypeStruct(shape, jnp.float32), self.state_spec()

    def per_token(self, width: int, dtype: Any) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        return self._per_step(self.cfg.block_t, width, dtype)

    def token_row(self, dtype: Any) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        """One number a token, along the lanes."""
        return self._per_step(1, self.cfg.block_t, dtype)

    def _per_step(
        self, rows: int, width: int, dtype: Any
    ) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        shape = (self.steps, self.batch, self.heads, rows, width)
        return jax.ShapeDtypeStruct(shape, dtype), self.token_spec(self.heads, rows, width)

    # Arrays

    def add_tokens(self, name: str, x: jax.Array) -> None:
        heads, width = x.shape[2:]
        self.operands.add(name, self.cut.cut(x), self.token_spec(heads, self.cfg.block_t, width))

    def add_state(self, name: str, state: jax.Array | None) -> None:
        """[n, h, d, e], transposed."""
        if state is not None:
            state = state.astype(jnp.float32).swapaxes(2, 3)
            self.operands.add(name, state, self.state_spec())

    def add_gates(self) -> None:
        args = self.args
        for name in ("gk", "gv"):
            if getattr(args, name) is not None:
                self.add_tokens(name, getattr(args, name))
        constant = args.g is None and not config.by_element(args)
        if constant and args.g_gamma is not None:
            self.operands.add_scalars("gamma", args.g_gamma.astype(jnp.float32))
        elif args.g is not None or args.g_gamma is not None:
            gate = jnp.zeros((self.batch, self.t, self.heads), jnp.float32)
            gate = gate if args.g is None else gate + args.g.astype(jnp.float32)
            if args.g_gamma is not None:
                gate = gate + args.g_gamma.astype(jnp.float32)[None, None]
            gate = self.cut.cut(gate[..., None])[..., 0]  # [steps, b, h, tokens]
            if config.by_element(args):
                rows = gate[..., None, :]
            else:
                rows = jnp.moveaxis(scalar.token_rows(gate, self.cfg.chunk), 0, 3)
            spec = self.token_spec(self.heads, rows.shape[3], self.cfg.block_t)
            self.operands.add("token", rows, spec)

    # Chunks

    def chunks(self, refs: Any) -> list[tuple[Any, Callable[[], chunk.AbstractChunk]]]:
        """Rows of a step's chunks, and what makes each.

        Not inside `pl.when`, where JAX's plain interpreter does not know the number of a program.
        """
        place = (pl.program_id(1), pl.program_id(2))
        size = self.cfg.chunk
        parts = [slice(i, i + size) for i in range(0, self.cfg.block_t, size)]
        return [(part, functools.partial(self._chunk, refs, part, *place)) for part in parts]

    def _chunk(self, refs: Any, part: slice, h: Any, i: Any) -> chunk.AbstractChunk:
        load = lambda ref: None if ref is None else ref[part].astype(jnp.float32)
        q, rows, columns = load(refs.query), load(refs.gk), load(refs.gv)
        q = None if q is None else q * self.scale
        token = None if refs.token is None else refs.token[:, part]
        if config.by_element(self.args) and token is not None:
            gate = tiles.wide(tiles.to_column(token), self.d)
            rows, token = gate if rows is None else rows + gate, None
        x = chunk.Operands(
            q=q,
            k=load(refs.key),
            v=load(refs.value),
            rows=rows,
            columns=columns,
            token=token,
            gamma=None if refs.gamma is None else refs.gamma[h],
            count=jnp.clip(self._of_step(refs.table, _COUNT, i) - part.start, 0, self.cfg.chunk),
        )
        kind = levels.Chunk if config.by_element(self.args) else scalar.Chunk
        return kind(x, self.dtype)

    def run(
        self,
        name: str,
        body: Callable[..., None],
        out: dict[str, tuple[Any, Any]],
        scratch: dict[str, Any],
    ) -> dict[str, jax.Array]:
        """Results of `body(call, refs)` by name; `out` has shapes and specs."""
        made = self.operands.run(
            name,
            functools.partial(body, self),
            self.table,
            out,
            scratch,
            self.grid,
            sequential=1,
            vmem_limit=config.vmem_limit(self.args, self.cfg, self.direction),
        )
        return dict(zip(out, made, strict=True))
