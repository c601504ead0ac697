"""Attention of one query a row over a range of its keys: one block of keys in a step.

All rows walk the same blocks, from the first to the last that any of them sees.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._xla._blocks import paging
from ejkernel.kernels._xla.page_attention import config


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and lse when asked for); no residuals."""
    _, length, groups, _ = args.key.shape
    first = jnp.maximum(args.sequence_start, 0)
    end = jnp.clip(args.sequence_end, 0, length)
    size = max(min(cfg.block_k, length), 1)

    def fetch(i: Any) -> paging.Keys:
        # the last block ends with the keys, and hides those that the one before it has shown
        begin = jnp.minimum(i * size, length - size)
        key, value = (
            jax.lax.dynamic_slice_in_dim(x, begin, size, 1).transpose(0, 2, 1, 3)
            for x in (args.key, args.value)
        )
        position = begin + jnp.arange(size, dtype=jnp.int32)
        return paging.Keys(key, value, jnp.where(position >= i * size, position, -1)[None])

    out, lse = paging.attend(
        args,
        args.query[:, None],
        first,
        end[:, None] - 1,
        fetch,
        _steps(first, end, args.sliding_window[0], size, length),
        (groups, args.value.shape[-1]),
    )
    return ((out[:, 0], lse[..., 0]) if args.return_lse else (out[:, 0],)), ()


def _steps(
    first: jax.Array, end: jax.Array, left: int | None, size: int, length: int
) -> tuple[Any, Any]:
    """Blocks from and to which some row sees a key."""
    if length <= size:
        return 0, min(length, 1)
    low = first if left is None else jnp.maximum(first, end - 1 - left)
    low = jnp.where(low < end, low, length)  # an empty row asks for nothing
    return low.min(initial=length) // size, -(-end.max(initial=0) // size)
