"""Attention of one query a sequence over its pages, [p, g, w, d], on a TPU."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas.tpu._blocks import keys
from ejkernel.kernels._pallas.tpu.page_attention import config, decode


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and lse when asked for); no residuals."""
    groups, size = args.key_cache.shape[1:3]
    e = args.value_cache.shape[-1]
    made: tuple[jax.Array, ...]
    blocks = args.block_tables.shape[1]
    if 0 in (args.query.size, args.key_cache.size, args.value_cache.size, blocks):
        made = decode.empty(args, args.query, e)
    else:
        per_step = keys.pages_of_step(cfg.block_k, size, blocks)
        cache = keys.HeadPages(
            args.key_cache, args.value_cache, args.block_tables, per_step, args.query.dtype
        )
        high = jnp.clip(args.context_lens, 0, blocks * size)
        low = jnp.zeros_like(high)
        if (left := args.sliding_window[0]) is not None:
            low = jnp.maximum(high - 1 - left, 0)
        limit = config.vmem_limit(args, cfg)
        made = decode.run(args, args.query, cache, low, high, (groups, e), limit)
    return (made if args.return_lse else made[:1]), ()
