"""Attention of one query a row over pages: a few pages of every row in a step, online softmax.

The loop ends with the longest row, and starts at each row's own first page inside the window.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._xla._blocks import paging
from ejkernel.kernels._xla.page_attention import config


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and lse when asked for); no residuals."""
    num_pages, groups, page_size, _ = args.key_cache.shape
    room = args.block_tables.shape[1] * page_size if num_pages else 0
    last = jnp.clip(args.context_lens, 0, room)[:, None] - 1
    first = jnp.zeros_like(args.context_lens)
    left = args.sliding_window[0]
    pages = paging.walk(args.block_tables, first, last, left, cfg.block_k, max(page_size, 1))

    def take(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, value = (
            jnp.take(x, ids, axis=0, mode="clip") for x in (args.key_cache, args.value_cache)
        )
        return key, value

    out, lse = paging.attend(
        args,
        args.query[:, None],
        first,
        last,
        lambda i: pages.fetch(i, take),
        pages.steps(last) if room else (0, 0),
        (groups, args.value_cache.shape[-1]),
    )
    return ((out[:, 0], lse[..., 0]) if args.return_lse else (out[:, 0],)), ()
