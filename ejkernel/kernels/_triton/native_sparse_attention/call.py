"""The arguments of the kernels, and native sparse attention's branches as flash attention calls."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.callib import cdiv, next_power_of_2
from ejkernel.kernels._specs.flash_attention import FlashAttentionArgs
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._blocks import addresses
from ejkernel.kernels._triton.native_sparse_attention import config, lists, rows, select
from ejkernel.kernels._triton.native_sparse_attention import table as tables


def without_padding(args: Any) -> Any:
    """A call whose gates are 0 at tokens of no sequence, where they may hold anything."""
    if args.cu_seqlens is None:
        return args
    inside = (jnp.asarray(tables.make(args).own) >= 0)[None, :, None]
    gates = {name: getattr(args, name) for name in ("g_cmp", "g_slc", "g_swa")}
    clean = {n: None if g is None else jnp.where(inside, g, 0) for n, g in gates.items()}
    return dataclasses.replace(args, **clean)


class Call:
    """One call with a config's tiles."""

    def __init__(self, args: Any, cfg: config.Config):
        self.args, self.cfg = args, cfg
        self.table = tables.make(args)
        batch, self.t, heads, d = args.query.shape
        _, _, groups, e = args.value.shape
        self.batch, self.groups = batch, groups
        size, scale = tables.block_size(args), float(args.softmax_scale)
        self.block_k = min(cfg.block_k, max(next_power_of_2(size), 16))
        self.parts = cdiv(size, self.block_k)
        # every block is full, and tiles divide it
        even = not self.table.packed and self.t % size == 0 and size % self.block_k == 0
        self.even = even
        self.sparse = rows.Sparse(
            num=self.t,
            HEADS=heads,
            KEY_HEADS=groups,
            GROUP=heads // groups,
            PADDED=next_power_of_2(heads // groups),
            SIZE=size,
            key_rows=rows_of(groups, d),
            value_rows=rows_of(groups, e),
            SCALE=scale,
            # the maximum of a row is found before scaling, which a factor <= 0 would turn around
            FACTOR=scale if scale > 0 else 1.0,
            PRECISION=_launch.dot_precision(args.query.dtype),
        )

    @property
    def tokens(self) -> int:
        """Tokens of a tile: as many rows as the config says, and bits of an int32."""
        least = cdiv(16, self.sparse.PADDED)
        return min(max(self.cfg.block_q // self.sparse.PADDED, least), 32)

    @functools.cached_property
    def bounds(self) -> dict[str, Any]:
        return {"start": jnp.asarray(self.table.start), "stop": jnp.asarray(self.table.stop)}

    def words(self) -> jax.Array:
        return select.words(self.args, self.table, self.sparse, self.cfg)

    def union(self, words: jax.Array) -> lists.Union:
        return lists.union(self.args, self.table, self.sparse, words, self.tokens)

    def inverse(self, words: jax.Array) -> lists.Inverse:
        return lists.inverse(self.args, self.table, self.sparse, words, self.cfg.piece)

    def inputs(self) -> dict[str, Any]:
        """What the kernels of the selected branch take."""
        args = self.args
        arrays = {"query": args.query, "key": args.key, "value": args.value}
        return arrays | {"sparse": self.sparse}

    def as_window(self) -> FlashAttentionArgs:
        """The sliding window."""
        args = self.args
        return FlashAttentionArgs(
            query=args.query,
            key=args.key,
            value=args.value,
            causal=True,
            softmax_scale=args.softmax_scale,
            sliding_window=(min(args.window_size, self.t) - 1, 0),
            cum_seqlens_q=args.cu_seqlens,
            cum_seqlens_k=args.cu_seqlens,
        )

    def as_compressed(self, repeat: int = 1) -> FlashAttentionArgs:
        """The means of blocks: a key is at its block's place, a query at its last complete one.

        Backward over keys has few programs, as there are few means: it repeats them, so that
        query heads are summed by several programs.
        """
        args, table = self.args, self.table
        key, value = (
            jnp.repeat(tables.means(args, table, x).astype(x.dtype), repeat, axis=2)
            for x in (args.key, args.value)
        )
        n = key.shape[1]
        ids: dict[str, Any] = {}
        if table.packed:  # blocks of other sequences, and what is no block, are hidden
            real = table.stop > table.start
            of_block = jnp.where(real, table.sequence[jnp.minimum(table.start, self.t - 1)], -1)
            ids = {"q_segment_ids": table.sequence[None], "kv_segment_ids": of_block[None]}
        return FlashAttentionArgs(
            query=args.query,
            key=key,
            value=value,
            causal=True,
            softmax_scale=args.softmax_scale,
            sliding_window=(None, 0),
            q_positions=jnp.asarray(table.done - 1, jnp.int32)[None],
            kv_positions=jnp.arange(n, dtype=jnp.int32)[None],
            **ids,
        )


def rows_of(heads: int, width: int) -> addresses.Rows:
    return addresses.Rows(heads * width, width, max(next_power_of_2(width), 16))


def gated(gate: jax.Array | None, branch: jax.Array) -> jax.Array:
    """A branch times its gate, in float32."""
    branch = branch.astype(jnp.float32)
    return branch if gate is None else gate.astype(jnp.float32)[..., None] * branch
