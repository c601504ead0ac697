"""Attention of one query a row over a range of its keys, [b, s, g, d], on a TPU."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas.tpu._blocks import keys
from ejkernel.kernels._pallas.tpu.page_attention import config, decode


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and lse when asked for); no residuals."""
    _, length, groups, _ = args.key.shape
    e = args.value.shape[-1]
    made: tuple[jax.Array, ...]
    if 0 in (args.query.size, args.key.size, args.value.size):
        made = decode.empty(args, args.query, e)
    else:
        cache = keys.Rows(args.key, args.value, cfg.block_k, args.query.dtype)
        high = jnp.clip(args.sequence_end, 0, length)
        low = jnp.maximum(args.sequence_start, 0)
        if (left := args.sliding_window[0]) is not None:
            low = jnp.maximum(low, high - 1 - left)
        limit = config.vmem_limit(args, cfg)
        made = decode.run(args, args.query, cache, low, high, (groups, e), limit)
    return (made if args.return_lse else made[:1]), ()
