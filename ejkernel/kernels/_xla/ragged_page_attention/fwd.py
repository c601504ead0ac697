"""Attention of packed queries over pages: blocks of one sequence's queries, online softmax.

Each sequence's queries are cut into blocks of `block_q`; `block_b` blocks, of any sequences, are
rows of one pass over pages. Only blocks that hold a query are visited.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import wide
from ejkernel.kernels._xla._blocks import loops, paging
from ejkernel.kernels._xla.ragged_page_attention import config
from ejkernel.xla_utils import search


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and lse when asked for); no residuals."""
    tokens, heads, _ = args.queries.shape
    num_pages, size, double, width = args.kv_pages.shape
    out = jnp.zeros(args.queries.shape, args.queries.dtype)
    lse = jnp.full((tokens, heads), -jnp.inf, wide(args.queries.dtype))
    state = loops.vary_like((out, lse), args.queries)
    count, blocks = args.block_tables.shape
    if 0 not in (tokens, heads, count):
        room = blocks * size if num_pages else 0
        cuts = cut(args, cfg.block_q, room)

        def take(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            pages = jnp.take(args.kv_pages, ids, axis=0, mode="clip").swapaxes(2, 3)
            pages = pages.reshape(*pages.shape[:2], double // 2, 2, size, width)
            return pages[:, :, :, 0], pages[:, :, :, 1]  # [b, c, g, w, d]

        def group(i: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            index = i * cfg.block_b + jnp.arange(cfg.block_b, dtype=jnp.int32)
            owner, token, last = cuts.rows(index, cfg.block_q, tokens)
            first = jnp.zeros_like(owner)
            table, left = args.block_tables[owner], args.sliding_window[0]
            pages = paging.walk(table, first, last, left, cfg.block_k, max(size, 1))
            block, block_lse = paging.attend(
                args,
                jnp.take(args.queries, token, axis=0, mode="clip"),
                first,
                last,
                lambda i: pages.fetch(i, take),
                pages.steps(last) if room else (0, 0),
                (double // 2, width),
            )
            out, lse = state
            out = out.at[token].set(block, mode="drop")
            return out, lse.at[token].set(block_lse.swapaxes(1, 2), mode="drop")

        state = loops.fori(0, -(-cuts.ends[-1] // cfg.block_b), group, state)
    out, lse = state
    return ((out, lse) if args.return_lse else (out,)), ()


class _Cuts(NamedTuple):
    """Sequences cut into blocks of queries; all arrays have one entry a sequence."""

    starts: jax.Array  # first query
    counts: jax.Array  # queries
    context: jax.Array  # keys
    ends: jax.Array  # blocks up to and with this sequence

    def rows(
        self, index: jax.Array, size: int, tokens: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sequence [b], token [b, t] (`tokens` for none) and position [b, t] of blocks."""
        owner = search.count_before(self.ends, index)
        real = owner < self.ends.shape[0]
        owner = jnp.minimum(owner, self.ends.shape[0] - 1)
        before = self.ends[owner] - -(-self.counts[owner] // size)
        place = ((index - before) * size)[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        real = real[:, None] & (place < self.counts[owner][:, None])
        token = jnp.where(real, self.starts[owner][:, None] + place, tokens)
        position = (self.context - self.counts)[owner][:, None] + place
        return owner, token, jnp.where(real, position, -1)


def cut(args: Any, size: int, room: int) -> _Cuts:
    """Sequences that do not count have no queries; bad starts are clamped to the tokens."""
    starts = jnp.clip(args.query_start_loc, 0, args.queries.shape[0])
    counts = jnp.maximum(jnp.diff(starts), 0)
    counts = jnp.where(jnp.arange(counts.shape[0], dtype=jnp.int32) < args.num_seqs, counts, 0)
    ends = jnp.cumsum(-(-counts // size), dtype=jnp.int32)
    return _Cuts(starts[:-1], counts, jnp.clip(args.context_lens, 0, room), ends)
