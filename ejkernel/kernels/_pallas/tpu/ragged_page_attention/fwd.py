"""Attention of packed queries over pages, [p, w, 2 g, d], on a TPU: prefill and decoding at once.

Sequences with one query are decoded, a program each. All others are cut into blocks of queries.
Grids depend on shapes alone; programs without work leave early.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas.tpu._blocks import keys, tiles
from ejkernel.kernels._pallas.tpu.page_attention import decode
from ejkernel.kernels._pallas.tpu.ragged_page_attention import config, prefill
from ejkernel.xla_utils import search


class _Sequences(NamedTuple):
    """The sequences of a call, an entry each; and whose a token is."""

    starts: jax.Array  # first query
    counts: jax.Array  # queries; 0 for sequences that do not count
    context: jax.Array  # keys
    owner: jax.Array  # [n]
    owned: jax.Array  # [n] whether that is so


class Source(NamedTuple):
    """Queries, and what they attend to."""

    queries: jax.Array  # [n, h, d]
    groups: int  # key heads
    e: int  # value head size
    pages: Callable[[int], keys.AbstractPages]  # with so many pages of a step


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and lse when asked for); no residuals."""
    _, _, double, d = args.kv_pages.shape
    dtype = args.queries.dtype
    make = lambda n: keys.interleaved(args.kv_pages, args.block_tables, n, dtype)
    return attend(args, cfg, Source(args.queries, double // 2, d, make)), ()


def attend(args: Any, cfg: config.Config, source: Source) -> tuple[jax.Array, ...]:
    """Outputs of a call with packed queries, of any pages."""
    queries = source.queries
    if 0 in (queries.size, args.block_tables.shape[0]):
        made = decode.empty(args, queries, source.e)
        made = (made[0], jnp.full_like(made[1], -jnp.inf))
    elif 0 in (args.kv_pages.size, args.block_tables.shape[1]):
        made = decode.empty(args, queries, source.e)
        owned = _sequences(args, queries.shape[0]).owned
        made = (made[0], jnp.where(owned[:, None], made[1], -jnp.inf))
    else:
        made = _attend(args, cfg, source)
    return made if args.return_lse else made[:1]


def _sequences(args: Any, num_tokens: int) -> _Sequences:
    """Bad starts are clamped to the tokens, and lengths to what the tables hold."""
    starts = jnp.clip(args.query_start_loc, 0, num_tokens)
    counts = jnp.maximum(jnp.diff(starts), 0)
    counts = jnp.where(jnp.arange(counts.shape[0], dtype=jnp.int32) < args.num_seqs, counts, 0)
    room = args.block_tables.shape[1] * args.kv_pages.shape[1]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = search.count_before(starts, token) - 1
    owner = jnp.clip(owner, 0, counts.shape[0] - 1)
    place = token - starts[owner]
    owned = (place >= 0) & (place < counts[owner])
    return _Sequences(starts[:-1], counts, jnp.clip(args.context_lens, 0, room), owner, owned)


def _attend(args: Any, cfg: config.Config, source: Source) -> tuple[jax.Array, ...]:
    num_tokens = source.queries.shape[0]
    of, steps = _sequences(args, num_tokens), config.pages_of_steps(args, cfg)
    pages = [source.pages(n) for n in steps]
    made = _decode(args, of, source, pages[0], config.decode_vmem_limit(args, cfg))
    if num_tokens == 1:
        return made
    out, *lse = made
    old = {"out": out}
    if lse:
        old["lse"] = jnp.broadcast_to(lse[0][:, :, None], (*lse[0].shape, tiles.LANES))
    longer = jnp.where(of.counts > 1, of.counts, 0)
    number = config.most_blocks(args, cfg)
    left = args.sliding_window[0]
    table = prefill.blocks(of.starts, longer, (of.context, left), cfg.block_q, number)
    limit = config.vmem_limit(args, cfg)
    sizes = (source.groups, source.e)
    old = prefill.run(args, source.queries, sizes, pages[1], table, old, cfg.block_q, limit)
    return (old["out"], old["lse"][:, :, 0]) if lse else (old["out"],)


def _decode(
    args: Any, of: _Sequences, source: Source, pages: keys.AbstractPages, vmem_limit: int
) -> tuple[jax.Array, ...]:
    """Output, and lse when asked for, of sequences with one query; 0 and -inf elsewhere."""
    query = source.queries[jnp.minimum(of.starts, source.queries.shape[0] - 1)]
    high = jnp.where(of.counts == 1, of.context, 0)
    low = jnp.zeros_like(high)
    if (left := args.sliding_window[0]) is not None:
        low = jnp.maximum(high - 1 - left, 0)
    sizes = (source.groups, source.e)
    out, *lse = decode.run(args, query, pages, low, high, sizes, vmem_limit)
    alone = of.owned & (of.counts[of.owner] == 1)
    out = jnp.where(alone[:, None, None], out[of.owner], 0)
    return out, *(jnp.where(alone[:, None], x[of.owner], -jnp.inf) for x in lse)
