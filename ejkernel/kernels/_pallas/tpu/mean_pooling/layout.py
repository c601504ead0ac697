"""How a call of mean pooling is cut: rows of equal length, or runs of tokens of any length.

Without packed sequences the input is [n, length, w], a pooled row each. Packed, it is [t, w], and a
table says which blocks of tokens have tokens of which pooled row.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.tpu._blocks import grid
from ejkernel.kernels._pallas.tpu.mean_pooling import config
from ejkernel.kernels._shared import groups, pooled_rows


class Rows:
    """Pooled rows of equal length; the grid is (blocks of rows, of features, of tokens)."""

    def __init__(self, args: Any, cfg: config.Config):
        self.args = args
        self.batch, self.t, *self.rest = args.inputs.shape
        self.width = args.inputs.size // (self.batch * self.t)
        # a chunk beyond the last token would only be filled
        self.length = self.t if args.chunk_size is None else min(args.chunk_size, self.t)
        self.chunks = cdiv(self.t, self.length)
        self.count = self.batch * self.chunks
        self.bt = config.cut(self.length, cfg.block_t)
        self.bd = config.cut(self.width, cfg.block_d)
        self.rows = config.rows_of(cfg, self.count, self.bt * self.bd)
        self.padded = config.whole(self.length, self.bt), config.whole(self.width, self.bd)
        blocks = (self.padded[1] // self.bd, self.padded[0] // self.bt)
        self.grid = (self.count // self.rows, *blocks)
        self.vmem_limit = config.vmem_limit(self.rows * self.bt * self.bd)

    def tokens(self, x: jax.Array) -> jax.Array:
        """[b, t, …] as [n, padded length, …], zeros behind."""
        x = grid.pad_to(x, 1, self.chunks * self.length)
        x = x.reshape(self.count, self.length, *x.shape[2:])
        return grid.pad_to(x, 1, self.padded[0])

    def inputs(self) -> jax.Array:
        x = self.args.inputs.reshape(self.batch, self.t, self.width)
        return grid.pad_to(self.tokens(x), 2, self.padded[1])

    def counts(self) -> jax.Array:
        """[n], tokens that count in each row."""
        if self.args.mask is not None:
            return self.tokens(self.args.mask.astype(jnp.int32)).sum(axis=1)
        first = jnp.arange(self.chunks, dtype=jnp.int32) * self.length
        return jnp.tile(jnp.minimum(self.t - first, self.length), self.batch)

    def token_spec(self) -> pl.BlockSpec:
        shape = (self.rows, self.bt, self.bd)
        return pl.BlockSpec(shape, lambda n, j, i, table: (n, i, j))

    def row_spec(self) -> pl.BlockSpec:
        """Of [n, 1, w]."""
        return pl.BlockSpec((self.rows, 1, self.bd), lambda n, j, i, table: (n, 0, j))

    def add_mask(self, operands: grid.Operands) -> None:
        if self.args.mask is not None:
            mask = self.tokens(self.args.mask.astype(jnp.int32))[:, None]  # [n, 1, length]
            spec = pl.BlockSpec((self.rows, 1, self.bt), lambda n, j, i, table: (n, 0, i))
            operands.add("mask", mask, spec)

    def kept(self, refs: Any, row: int) -> jax.Array:
        """Tokens of a row that the mask keeps, [bt, 1]."""
        mask = jnp.broadcast_to(refs.mask[row], (8, self.bt))
        return mask.T[:, :1] != 0

    def divisor(self, table: Any, row: int) -> Any:
        count = table[pl.program_id(0) * self.rows + row]
        return jnp.maximum(count, 1).astype(jnp.float32)

    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        lead = (self.batch,) if self.args.chunk_size is None else (self.batch, self.chunks)
        return (*lead, *self.rest)


# rows of the table, as `groups.Visits` has them, and the tokens of the visit's pooled row
_ROW, _BLOCK, _LOW, _HIGH, _FIRST, _LAST, _COUNT = range(7)


class Runs:
    """Pooled rows of packed sequences; the grid is (blocks of features, visits)."""

    def __init__(self, args: Any, cfg: config.Config, by_block: bool):
        self.args = args
        _, self.t, *self.rest = args.inputs.shape
        self.width = args.inputs.size // self.t
        most = cfg.block_t
        if args.chunk_size is not None:  # a longer block would be visited for each of its rows
            most = min(most, config.whole(args.chunk_size, 8))
        self.bt = min(most, config.whole(self.t, 8))
        self.bd = config.cut(self.width, cfg.block_d)
        self.padded = config.whole(self.t, self.bt), config.whole(self.width, self.bd)
        made = pooled_rows.make(args)
        self.count = made.count.shape[0]
        runs = groups.Groups(made.stop - made.count, made.stop)
        visits = (groups.by_block if by_block else groups.by_group)(runs, self.t, self.bt)
        table = [*visits, made.count[visits.group]]
        self.table = jnp.stack([row.astype(jnp.int32) for row in table])
        self.visits = self.table.shape[1]
        self.grid = (self.padded[1] // self.bd, self.visits)
        self.vmem_limit = config.vmem_limit(self.bt * self.bd)

    def inputs(self) -> jax.Array:
        x = self.args.inputs.reshape(self.t, self.width)
        return grid.pad_to(grid.pad_to(x, 0, self.padded[0]), 1, self.padded[1])

    def read(self, table: Any, row: int, visit: Any) -> Any:
        return table[row * self.visits + visit]

    def token_spec(self) -> pl.BlockSpec:
        index = lambda j, v, table: (self.read(table, _BLOCK, v), j)
        return pl.BlockSpec((self.bt, self.bd), index)

    def row_spec(self) -> pl.BlockSpec:
        """Of [rows, 1, w]."""
        index = lambda j, v, table: (self.read(table, _ROW, v), 0, j)
        return pl.BlockSpec((None, 1, self.bd), index)

    def mine(self, table: Any) -> jax.Array:
        """Tokens of the block that belong to the visit's row, [bt, 1]."""
        token, visit = jax.lax.broadcasted_iota(jnp.int32, (self.bt, 1), 0), pl.program_id(1)
        low, high = (self.read(table, row, visit) for row in (_LOW, _HIGH))
        return (token >= low) & (token < high)

    def is_first(self, table: Any) -> Any:
        return self.read(table, _FIRST, pl.program_id(1)) != 0

    def is_last(self, table: Any) -> Any:
        return self.read(table, _LAST, pl.program_id(1)) != 0

    def divisor(self, table: Any) -> Any:
        return jnp.maximum(self.read(table, _COUNT, pl.program_id(1)), 1).astype(jnp.float32)

    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.rest)
