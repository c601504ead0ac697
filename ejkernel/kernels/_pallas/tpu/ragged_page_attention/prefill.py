"""Prefill on a TPU: blocks of one sequence's queries over its pages.

Queries stay packed in HBM. A program copies those of its block, with all heads, and writes its
rows of the output back, so that no array is padded to whole blocks of every sequence.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu._blocks import cached, grid, heads, keys, tiles
from ejkernel.xla_utils import search

_FIELDS = 6  # of a block in the table


def blocks(
    starts: jax.Array, counts: jax.Array, spans: tuple[Any, Any], size: int, number: int
) -> jax.Array:
    """A table [number, 6] of blocks: sequence, token, tokens, position, low, high.

    Args:
      starts: The first token of each sequence.
      counts: Its tokens; 0 for those that have no blocks.
      spans: Keys of each sequence, and how far a query looks back or None.
      size: Tokens of a block.
      number: Blocks of the table, at least as many as there are; the rest have no tokens.
    """
    context, left = spans
    ends = jnp.cumsum(-(-counts // size), dtype=jnp.int32)
    index = jnp.arange(number, dtype=jnp.int32)
    owner = search.count_before(ends, index)
    real = owner < ends.shape[0]
    owner = jnp.minimum(owner, ends.shape[0] - 1)
    before = ends[owner] - -(-counts[owner] // size)
    place = (index - before) * size
    count = jnp.where(real, jnp.clip(counts[owner] - place, 0, size), 0)
    position = (context - counts)[owner] + place
    high = jnp.clip(position + count, 0, context[owner])
    low = jnp.zeros_like(high) if left is None else jnp.maximum(position - left, 0)
    fields = (owner, starts[owner] + place, count, position, low, high)
    return jnp.stack(fields, axis=1).astype(jnp.int32)


def run(
    args: Any,
    queries: jax.Array,  # [n, h, d]
    sizes: tuple[int, int],  # key heads, value head size
    cache: keys.AbstractPages,
    table: jax.Array,
    old: dict[str, jax.Array],
    tokens: int,
    vmem_limit: int,
) -> dict[str, jax.Array]:
    """`old` outputs with the rows of all blocks of a table in their places.

    `out` is [n, h, e], `lse` [n, h, LANES] with the same number in all lanes.
    """
    (_, num_heads, d), (groups, e) = queries.shape, sizes
    of = cached.rules(args, groups, tokens, queries, e)
    layout = {
        "queries": heads.Heads(num_heads, d, queries.dtype),
        "out": heads.Heads(num_heads, e, queries.dtype),
        "lse": heads.Heads(num_heads, tiles.LANES, jnp.dtype(jnp.float32)),
    }
    operands = grid.Operands((*cached.OPTIONAL, "old_lse", "token_lse", "token_out"))
    operands.add_whole("queries", queries)
    for name, array in old.items():
        operands.add_whole(f"old_{name}", array)
    cache.add(operands, {"pages": _table_row})
    scratch = cached.add_options(args, of, operands)
    scratch |= of.state(cache.step) | cache.buffers()
    scratch["query"] = pltpu.VMEM((groups, of.rows, d), queries.dtype)
    scratch["tokens"] = pltpu.VMEM(layout["queries"].buffer(tokens), queries.dtype)
    if d != e:  # else queries make room for outputs
        scratch["token_out"] = pltpu.VMEM(layout["out"].buffer(tokens), queries.dtype)
    if "lse" in old:
        scratch["token_lse"] = pltpu.VMEM(layout["lse"].buffer(tokens), jnp.float32)
    scratch["moved"] = pltpu.SemaphoreType.DMA(())
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    made = operands.run(
        "ragged_prefill_kernel",
        functools.partial(_kernel, of, cache, layout),
        table,
        {n: (jax.ShapeDtypeStruct(x.shape, x.dtype), anywhere) for n, x in old.items()},
        scratch,
        grid=(table.shape[0],),
        sequential=0,
        vmem_limit=vmem_limit,
        aliases={name: f"old_{name}" for name in old},
    )
    return dict(zip(old, made, strict=True))


def _table_row(width: int) -> Any:
    return pl.BlockSpec(
        (None, 1, width), lambda i, table: (table[i * _FIELDS], 0, 0), memory_space=pltpu.SMEM
    )


def _kernel(
    of: cached.Rules, cache: keys.AbstractPages, layout: dict[str, heads.Heads], refs: Any
) -> None:
    row = pl.program_id(0) * _FIELDS
    sequence, token, count, position, low, high = (refs.table[row + i] for i in range(_FIELDS))

    @pl.when(count > 0)
    def _() -> None:
        move = functools.partial(_move, refs, of.tokens, token, count)
        move(layout["queries"], refs.queries, refs.tokens, inwards=True)
        _gather(of, layout["queries"], refs)
        cached.attend(of, refs, cache, keys.Span(sequence, low, high, position, refs.pages))
        outputs = refs.tokens if refs.token_out is None else refs.token_out
        _scatter(of, layout, refs, outputs)
        move(layout["out"], refs.out, outputs, inwards=False)
        if refs.lse is not None:
            move(layout["lse"], refs.lse, refs.token_lse, inwards=False)


def _move(
    refs: Any,
    size: int,
    token: Any,
    count: Any,
    of: heads.Heads,
    array: Any,
    buffer: Any,
    inwards: bool,
) -> None:
    """Copies `count` tokens between an array and a buffer: a piece for each bit of the count."""

    def each(run: Any) -> None:
        # no count has a bit beyond the tokens that there are
        for bit in range(min(size, array.shape[0]).bit_length()):
            length = 1 << bit

            @pl.when((count & length) != 0)
            def _(bit: int = bit, length: int = length) -> None:
                first = (count >> (bit + 1)) << (bit + 1)
                some = array.at[pl.ds(token + first, length)]
                for a, b in of.pieces(some, buffer, pl.ds(first, length)):
                    run(pltpu.make_async_copy(*((a, b) if inwards else (b, a)), refs.moved))

    each(lambda copy: copy.start())
    each(lambda copy: copy.wait())


def _gather(of: cached.Rules, layout: heads.Heads, refs: Any) -> None:
    """Tiles of rows from tokens; those behind the last token are anything."""
    for first in range(0, layout.num, layout.packing):
        some = range(first, min(first + layout.packing, layout.num))
        for head, x in zip(some, layout.load(refs.tokens, *some), strict=True):
            g, r = divmod(head, of.group)
            refs.query[g, pl.ds(r * of.tokens, of.tokens)] = x.astype(of.dtype)


def _scatter(of: cached.Rules, layout: dict[str, heads.Heads], refs: Any, outputs: Any) -> None:
    """Tokens from tiles of rows."""
    for g in range(of.groups):
        refs.acc[g], refs.m[g] = cached.finish(of, refs, g)
    rows = lambda ref, head: ref[head // of.group, pl.ds(head % of.group * of.tokens, of.tokens)]
    for name, buffer, ref in (("out", outputs, refs.acc), ("lse", refs.token_lse, refs.m)):
        if buffer is None:
            continue
        packing = layout[name].packing
        for first in range(0, layout[name].num, packing):
            some = range(first, min(first + packing, layout[name].num))
            layout[name].store(buffer, first, [rows(ref, head) for head in some])
