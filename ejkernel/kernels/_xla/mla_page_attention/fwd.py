"""Latent attention over pages: `ragged_page_attention` with one key head, the page itself.

All query heads are rows against the same keys, and values are the first part of each key.
"""

import types
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import wide
from ejkernel.kernels._xla._blocks import loops, paging
from ejkernel.kernels._xla.ragged_page_attention import config
from ejkernel.kernels._xla.ragged_page_attention import fwd as ragged


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and lse when asked for); no residuals."""
    tokens, heads, latent = args.q_nope.shape
    num_pages, size, _ = args.kv_pages.shape
    out = jnp.zeros(args.q_nope.shape, args.q_nope.dtype)
    lse = jnp.full((tokens, heads), -jnp.inf, wide(args.q_nope.dtype))
    state = loops.vary_like((out, lse), args.q_nope)
    count, blocks = args.block_tables.shape
    if 0 not in (tokens, heads, count):
        room = blocks * size if num_pages else 0
        # the scale of a page is that of its keys and of its values
        view = types.SimpleNamespace(**vars(args), queries=args.q_nope, v_scale=args.k_scale)
        cuts = ragged.cut(view, cfg.block_q, room)

        def take(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            pages = jnp.take(args.kv_pages, ids, axis=0, mode="clip")[:, :, None]
            return pages, pages[..., :latent]  # [b, c, 1, w, l + r]

        def group(i: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            index = i * cfg.block_b + jnp.arange(cfg.block_b, dtype=jnp.int32)
            owner, token, last = cuts.rows(index, cfg.block_q, tokens)
            first = jnp.zeros_like(owner)
            table, left = args.block_tables[owner], args.sliding_window[0]
            pages = paging.walk(table, first, last, left, cfg.block_k, max(size, 1))
            parts = (jnp.take(q, token, axis=0, mode="clip") for q in (args.q_nope, args.q_pe))
            block, block_lse = paging.attend(
                view,
                jnp.concatenate(list(parts), axis=-1),
                first,
                last,
                lambda i: pages.fetch(i, take),
                pages.steps(last) if room else (0, 0),
                (1, latent),
            )
            out, lse = state
            out = out.at[token].set(block, mode="drop")
            return out, lse.at[token].set(block_lse.swapaxes(1, 2), mode="drop")

        state = loops.fori(0, -(-cuts.ends[-1] // cfg.block_b), group, state)
    out, lse = state
    return ((out, lse) if args.return_lse else (out,)), ()
