"""Decoding on a TPU: one query of each sequence over its cached keys.

A program serves all heads of a sequence. It copies some keys of all heads from HBM while it works
on those before them. Programs run in order, each starting the copies that the next one needs first;
where a chip has two cores, each has half of the sequences.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu._blocks import cached, grid, keys

_FIELDS = 5  # of a sequence in the table


def run(
    args: Any,
    query: jax.Array,  # [b, h, d]
    cache: keys.AbstractKeys,
    low: jax.Array,  # [b] first key that a sequence sees
    high: jax.Array,  # [b] one past the last one
    sizes: tuple[int, int],  # key heads, value head size
    vmem_limit: int,
) -> tuple[jax.Array, ...]:
    """Output [b, h, e], and lse [b, h] when asked for; the query is at position high - 1."""
    batch, num_heads, _ = query.shape
    groups, e = sizes
    of = cached.rules(args, groups, 1, query, e)
    operands = grid.Operands((*cached.OPTIONAL, "pages", "next_pages"))
    cores = 1 if batch % 2 else 2
    shape = (cores, batch // cores)
    block = functools.partial(_block, shape[1])
    operands.add("query", _tiles(of, query), block(groups, of.rows, of.d))
    cache.add(
        operands,
        {
            "pages": lambda width: block(1, width, memory_space=pltpu.SMEM),
            "next_pages": functools.partial(_next_row, shape[1]),
        },
    )
    scratch = cached.add_options(args, of, operands)
    lead = (batch, groups)
    out = {
        "out": (
            jax.ShapeDtypeStruct((*lead, of.rows, e), query.dtype),
            block(groups, of.rows, e),
        )
    }
    if args.return_lse:
        lse = jax.ShapeDtypeStruct((*lead, 1, of.rows), jnp.float32)
        out["lse"] = (lse, block(groups, 1, of.rows))
    made = operands.run(
        "decode_attention_kernel",
        functools.partial(_kernel, of, cache, shape[1]),
        _table(cache, low, high, shape[1]),
        out,
        scratch | of.state(cache.step) | cache.buffers(),
        grid=shape,
        sequential=1,
        vmem_limit=vmem_limit,
    )
    rows = made[0][:, :, : of.group].reshape(batch, num_heads, e)
    if not args.return_lse:
        return (rows,)
    return rows, made[1][:, :, 0, : of.group].reshape(batch, num_heads)


def _tiles(of: cached.Rules, query: jax.Array) -> jax.Array:
    """Queries [b, g, rows, d], the heads of a key head padded to whole registers."""
    query = query.reshape(query.shape[0], of.groups, of.group, of.d)
    return grid.pad_to(query, 2, of.rows)


def _table(cache: keys.AbstractKeys, low: jax.Array, high: jax.Array, each: int) -> jax.Array:
    """[b, 5]: low, high, steps before, whether one before starts the first copies, and the next.

    The next sequence with steps on the same core, or the sequence itself if it is the last one.
    A core has `each` sequences.
    """
    batch = low.shape[0]
    count = cache.count(keys.Span(None, low, high, None)).reshape(-1, each)
    before = jnp.cumsum(count, axis=1) - count
    index = jnp.arange(batch, dtype=jnp.int32).reshape(-1, each)
    later = jnp.where(count > 0, index, batch)
    later = jax.lax.cummin(later, axis=1, reverse=True)
    later = jnp.concatenate([later[:, 1:], jnp.full_like(later[:, :1], batch)], axis=1)
    later = jnp.where(later < batch, later, index)
    fields = (before, (before > 0).astype(jnp.int32), later)
    return jnp.stack([low, high, *(x.reshape(batch) for x in fields)], axis=1).astype(jnp.int32)


def _block(each: int, *shape: int, **space: Any) -> Any:
    zeros = (0,) * len(shape)
    return pl.BlockSpec((None, *shape), lambda c, i, table: (c * each + i, *zeros), **space)


def _next_row(each: int, width: int) -> Any:
    return pl.BlockSpec(
        (None, 1, width),
        lambda c, i, table: (table[(c * each + i) * _FIELDS + 4], 0, 0),
        memory_space=pltpu.SMEM,
    )


def _kernel(of: cached.Rules, cache: keys.AbstractKeys, each: int, refs: Any) -> None:
    i = pl.program_id(0) * each + pl.program_id(1)
    low, high, before, started, later = (refs.table[i * _FIELDS + n] for n in range(_FIELDS))

    def start_next(slot: Any) -> None:
        first, last = (refs.table[later * _FIELDS + n] for n in range(2))
        at = keys.Span(later, first, last, None, refs.next_pages)

        @pl.when(later != i)
        def _() -> None:
            for copy in cache.copies(refs, at, jnp.int32(0), slot):
                copy.start()

    at = keys.Span(i, low, high, high - 1, refs.pages)
    cached.attend(of, refs, cache, at, grid.Chain(before, started, start_next))
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
