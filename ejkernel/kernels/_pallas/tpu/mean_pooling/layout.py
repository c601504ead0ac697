"""How a call of mean pooling is cut: rows of equal length, or runs of tokens of any length.

Without packed sequences the input is [n, length, w], a pooled row each. Packed, it is [t, w], and a
table says which blocks of tokens have tokens of which pooled row. Heads stay an axis of their own
where they can: on a TPU, joining them with the features copies the whole input.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.tpu._blocks import grid
from ejkernel.kernels._pallas.tpu.mean_pooling import config
from ejkernel.kernels._shared import groups, pooled_rows


class Features:
    """The axes behind the tokens: all heads and features, or a block of them in one axis."""

    def __init__(self, args: Any, cfg: config.Config):
        self.rest = args.inputs.shape[2:]
        self.width = math.prod(self.rest)
        self.most = cfg.block_t * cfg.block_d  # elements of a block
        # a mask has tokens along lanes or rows, never along registers
        self.heads = len(self.rest) == 2 and args.mask is None and 8 * self.width <= self.most
        size = self.width if self.heads else config.cut(self.width, cfg.block_d)
        self.block = self.rest if self.heads else (size,)
        self.row = self.rest if self.heads else (1, size)  # of a pooled row
        self.padded = self.rest if self.heads else (config.whole(self.width, size),)
        self.count = 1 if self.heads else self.padded[0] // size
        self.size = size

    def flat(self, x: jax.Array, lead: int) -> jax.Array:
        """An array with `lead` axes before the heads, in whole blocks."""
        if self.heads:
            return x
        return grid.pad_to(x.reshape(*x.shape[:lead], self.width), lead, self.padded[0])

    def rows(self, x: jax.Array) -> jax.Array:
        """[n, …] as [n, heads, features] or [n, 1, features]."""
        return x.reshape(-1, *self.rest) if self.heads else self.flat(x[:, None], 2)

    def row_shape(self, count: int) -> tuple[int, ...]:
        return (count, *(self.rest if self.heads else (1, *self.padded)))

    def unpadded(self, x: jax.Array) -> jax.Array:
        return x if self.heads else x[..., : self.width]

    def at(self, j: Any) -> tuple[Any, ...]:
        """Index of a block of features."""
        return (0, 0) if self.heads else (j,)

    def row_at(self, j: Any) -> tuple[Any, ...]:
        return (0, 0) if self.heads else (0, j)

    def total(self, x: jax.Array) -> jax.Array:
        """The sum over tokens, of the shape of a pooled row."""
        return x.sum(axis=0) if self.heads else x.sum(axis=0, keepdims=True)

    def spread(self, row: jax.Array, tokens: int) -> jax.Array:
        """A pooled row in each token."""
        return jnp.broadcast_to(row[None] if self.heads else row, (tokens, *self.block))


class Rows:
    """Pooled rows of equal length; the grid is (blocks of rows, of features, of tokens)."""

    def __init__(self, args: Any, cfg: config.Config):
        self.args = args
        self.batch, self.t = args.inputs.shape[:2]
        self.features = Features(args, cfg)
        # a chunk beyond the last token would only be filled
        self.length = self.t if args.chunk_size is None else min(args.chunk_size, self.t)
        self.chunks = cdiv(self.t, self.length)
        self.count = self.batch * self.chunks
        size = self.features.size
        if self.features.heads:
            self.bt = config.cut(self.length, self.features.most // size, least=1)
        else:
            self.bt = config.cut(self.length, cfg.block_t)
        self.rows = config.rows_of(cfg, self.count, self.bt * size)
        self.padded = config.whole(self.length, self.bt)
        self.grid = (self.count // self.rows, self.features.count, self.padded // self.bt)
        self.vmem_limit = config.vmem_limit(self.rows * self.bt * size)

    def tokens(self, x: jax.Array) -> jax.Array:
        """[b, t, …] as [n, padded length, …], zeros behind."""
        x = grid.pad_to(x, 1, self.chunks * self.length)
        x = x.reshape(self.count, self.length, *x.shape[2:])
        return grid.pad_to(x, 1, self.padded)

    def inputs(self) -> jax.Array:
        return self.tokens(self.features.flat(self.args.inputs, 2))

    def counts(self) -> jax.Array:
        """[n], tokens that count in each row."""
        if self.args.mask is not None:
            return self.tokens(self.args.mask.astype(jnp.int32)).sum(axis=1)
        first = jnp.arange(self.chunks, dtype=jnp.int32) * self.length
        return jnp.tile(jnp.minimum(self.t - first, self.length), self.batch)

    def token_spec(self) -> pl.BlockSpec:
        shape = (self.rows, self.bt, *self.features.block)
        return pl.BlockSpec(shape, lambda n, j, i, table: (n, i, *self.features.at(j)))

    def row_spec(self) -> pl.BlockSpec:
        shape = (self.rows, *self.features.row)
        return pl.BlockSpec(shape, lambda n, j, i, table: (n, *self.features.row_at(j)))

    def add_mask(self, operands: grid.Operands) -> None:
        if self.args.mask is not None:
            mask = self.tokens(self.args.mask.astype(jnp.int32))[:, None]  # [n, 1, length]
            spec = pl.BlockSpec((self.rows, 1, self.bt), lambda n, j, i, table: (n, 0, i))
            operands.add("mask", mask, spec)

    def kept(self, refs: Any, row: int) -> jax.Array:
        """Tokens of a row that the mask keeps, [bt, 1]."""
        mask = jnp.broadcast_to(refs.mask[row], (8, self.bt))
        return mask.T[:, :1] != 0

    def divisor(self, table: Any, program: Any, row: int) -> Any:
        count = table[program * self.rows + row]
        return jnp.maximum(count, 1).astype(jnp.float32)

    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        lead = (self.batch,) if self.args.chunk_size is None else (self.batch, self.chunks)
        return (*lead, *self.features.rest)


# rows of the table, as `groups.Visits` has them, and the tokens of the visit's pooled row
_ROW, _BLOCK, _LOW, _HIGH, _FIRST, _LAST, _COUNT = range(7)


def _run_block(args: Any, cfg: config.Config, features: Features) -> int:
    """Tokens of a block of packed sequences."""
    most = cfg.block_t
    if args.chunk_size is not None:  # a longer block would be visited for each of its rows
        most = min(most, config.whole(args.chunk_size, 8))
    if features.heads:
        most = min(most, features.most // features.size)
    return min(most, config.whole(args.inputs.shape[1], 8))


def table_numbers(args: Any, cfg: config.Config) -> int:
    """Numbers in scalar memory."""
    if args.cu_seqlens is None:
        return Rows(args, cfg).count
    t, rows = args.inputs.shape[1], args.cu_seqlens.shape[0] - 1
    if args.chunk_size is not None:
        rows += t // args.chunk_size
    return 7 * (cdiv(t, _run_block(args, cfg, Features(args, cfg))) + rows)


class Runs:
    """Pooled rows of packed sequences; the grid is (blocks of features, visits)."""

    def __init__(self, args: Any, cfg: config.Config, by_block: bool):
        self.args = args
        self.t, self.features = args.inputs.shape[1], Features(args, cfg)
        self.bt = _run_block(args, cfg, self.features)
        self.padded = config.whole(self.t, self.bt)
        made = pooled_rows.make(args)
        self.count = made.count.shape[0]
        runs = groups.Groups(made.stop - made.count, made.stop)
        visits = (groups.by_block if by_block else groups.by_group)(runs, self.t, self.bt)
        table = [*visits, made.count[visits.group]]
        self.table = jnp.stack([row.astype(jnp.int32) for row in table])
        self.visits = self.table.shape[1]
        self.grid = (self.features.count, self.visits)
        self.vmem_limit = config.vmem_limit(self.bt * self.features.size)

    def inputs(self) -> jax.Array:
        return grid.pad_to(self.features.flat(self.args.inputs[0], 1), 0, self.padded)

    def read(self, table: Any, row: int, visit: Any) -> Any:
        return table[row * self.visits + visit]

    def token_spec(self) -> pl.BlockSpec:
        index = lambda j, v, table: (self.read(table, _BLOCK, v), *self.features.at(j))
        return pl.BlockSpec((self.bt, *self.features.block), index)

    def row_spec(self) -> pl.BlockSpec:
        index = lambda j, v, table: (self.read(table, _ROW, v), *self.features.row_at(j))
        return pl.BlockSpec((None, *self.features.row), index)

    def mine(self, table: Any) -> jax.Array:
        """Tokens of the block that belong to the visit's row, [bt, …]."""
        shape, visit = (self.bt, *self.features.block), pl.program_id(1)
        token = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        low, high = (self.read(table, row, visit) for row in (_LOW, _HIGH))
        return (token >= low) & (token < high)

    def is_first(self, table: Any) -> Any:
        return self.read(table, _FIRST, pl.program_id(1)) != 0

    def is_last(self, table: Any) -> Any:
        return self.read(table, _LAST, pl.program_id(1)) != 0

    def divisor(self, table: Any, visit: Any) -> Any:
        return jnp.maximum(self.read(table, _COUNT, visit), 1).astype(jnp.float32)

    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.features.rest)
