"""A serving step: one scatter of the new tokens, in place when pages are donated; then attention.

The scatter comes first, so attention reads tokens as the cache holds them, rounded to its dtype.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._specs.ragged_page_attention import RaggedPageAttentionArgs
from ejkernel.kernels._xla._blocks import paging
from ejkernel.kernels._xla.ragged_page_attention import config
from ejkernel.kernels._xla.ragged_page_attention import fwd as attention

_SHARED = [f.name for f in dataclasses.fields(RaggedPageAttentionArgs)]


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, pages, and lse when asked for); no residuals."""
    pages = _write(args)
    shared = {name: getattr(args, name) for name in _SHARED if hasattr(args, name)}
    view = RaggedPageAttentionArgs(
        **shared | {"kv_pages": pages},
        context_lens=args.kv_lens,
        num_seqs=args.distribution[2:],
    )
    (out, *lse), _ = attention.forward(view, cfg)
    return (out, pages, *lse), ()


def _write(args: Any) -> jax.Array:
    """The pages with this step's tokens; what has no place in them is dropped."""
    num_pages, size = args.kv_pages.shape[:2]
    tokens, (count, blocks) = args.keys.shape[0], args.block_tables.shape
    if 0 in (args.kv_pages.size, tokens, count, blocks):
        return args.kv_pages
    lens = jnp.clip(args.kv_lens, 0, blocks * size)
    owner, position = paging.places(args.query_start_loc, lens, args.distribution[2], tokens)
    row = args.block_tables[owner, jnp.maximum(position, 0) // size]
    # a scatter drops what lies past the end; a negative page would count from it
    page = jnp.where((position < 0) | (row < 0), num_pages, row)
    dtype = args.kv_pages.dtype
    new = paging.interleave(
        paging.narrow(args.keys, args.k_scale, dtype),
        paging.narrow(args.values, args.v_scale, dtype),
    )
    return args.kv_pages.at[page, position % size].set(new, mode="drop")
