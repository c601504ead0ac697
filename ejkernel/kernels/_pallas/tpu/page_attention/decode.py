"""Decoding on a TPU: one query of each sequence over its cached keys.

A program serves all heads of a sequence. It copies some keys of all heads from HBM while it works
on those before them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu._blocks import cached, grid, keys


def run(
    args: Any,
    query: jax.Array,  # [b, h, d]
    cache: keys.AbstractKeys,
    low: jax.Array,  # [b] first key that a sequence sees
    high: jax.Array,  # [b] one past the last one
    sizes: tuple[int, int],  # key heads, value head size
    vmem_limit: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Output [b, h, e], and lse [b, h] when asked for; the query is at position high - 1."""
    batch, num_heads, _ = query.shape
    groups, e = sizes
    of = cached.rules(args, groups, 1, query, e)
    operands = grid.Operands(cached.OPTIONAL)
    operands.add("query", _tiles(of, query), _block(groups, of.rows, of.d))
    cache.add(operands, _table_row)
    scratch = cached.add_options(args, of, operands)
    lead = (batch, groups)
    out = {
        "out": (
            jax.ShapeDtypeStruct((*lead, of.rows, e), query.dtype),
            _block(groups, of.rows, e),
        )
    }
    if args.return_lse:
        shape = jax.ShapeDtypeStruct((*lead, 1, of.rows), jnp.float32)
        out["lse"] = (shape, _block(groups, 1, of.rows))
    made = operands.run(
        "decode_attention_kernel",
        functools.partial(_kernel, of, cache),
        jnp.stack([low, high], axis=1),
        out,
        scratch | of.state(cache.step) | cache.buffers(),
        grid=(batch,),
        sequential=0,
        vmem_limit=vmem_limit,
    )
    rows = made[0][:, :, : of.group].reshape(batch, num_heads, e)
    if not args.return_lse:
        return rows, None
    return rows, made[1][:, :, 0, : of.group].reshape(batch, num_heads)


def _tiles(of: cached.Rules, query: jax.Array) -> jax.Array:
    """Queries [b, g, rows, d], the heads of a key head padded to whole registers."""
    query = query.reshape(query.shape[0], of.groups, of.group, of.d)
    return grid.pad_to(query, 2, of.rows)


def _block(*shape: int) -> Any:
    return pl.BlockSpec((None, *shape), lambda i, table: (i, *(0,) * len(shape)))


def _table_row(width: int) -> Any:
    return pl.BlockSpec((None, 1, width), lambda i, table: (i, 0, 0), memory_space=pltpu.SMEM)


def _kernel(of: cached.Rules, cache: keys.AbstractKeys, refs: Any) -> None:
    i = pl.program_id(0)
    low, high = refs.table[2 * i], refs.table[2 * i + 1]
    cached.attend(of, refs, cache, keys.Span(i, low, high, high - 1))
    for g in range(of.groups):
        out, lse = cached.finish(of, refs, g)
        refs.out[g] = out.astype(refs.out.dtype)
        if refs.lse is not None:
            refs.lse[g] = lse.T[:1]


def empty(args: Any, query: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Output and lse without a key or a query: sinks alone make the logsumexp."""
    tokens, num_heads, _ = query.shape
    lse = jnp.full(num_heads, -jnp.inf, jnp.float32)
    if args.softmax_aux is not None:
        sinks = jax.nn.logsumexp(args.softmax_aux.astype(jnp.float32), axis=-1)
        lse = jnp.broadcast_to(sinks, (num_heads,))
    out = jnp.zeros((tokens, num_heads, width), query.dtype)
    return out, jnp.broadcast_to(lse[None], (tokens, num_heads))
