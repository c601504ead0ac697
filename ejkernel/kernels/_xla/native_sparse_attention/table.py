"""Where the blocks of a row of tokens lie, and which of them a token may see.

Blocks are numbered along the row; packed sequences each begin a new block. The blocks of one
sequence are consecutive, and all but its last are full.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._shared import pooled_rows
from ejkernel.kernels._shared.products import finite
from ejkernel.kernels._specs.mean_pooling import MeanPoolingArgs
from ejkernel.kernels._xla._blocks.logits import pad
from ejkernel.xla_utils import segments


class Tokens(NamedTuple):
    """Of each token: the first block of its sequence, its own block, and what it has completed.

    A token outside all sequences has own block -1 and has completed none.
    """

    first: Any  # [t]
    own: Any  # [t]
    stop: Any  # [t], one past the last full block that ends at or before this token


class Table(NamedTuple):
    """Blocks of a row of tokens."""

    start: Any  # [n], first token
    count: Any  # [n], real length
    tokens: Tokens


def block_size(args: Any) -> int:
    """Tokens of a block; one that is longer than the row is the row."""
    return min(args.block_size, max(args.key.shape[1], 1))


def make(args: Any) -> Table:
    """The blocks of a call; NumPy when they are known while tracing."""
    t, size = args.key.shape[1], block_size(args)
    if args.cu_seqlens is None:
        start = np.arange(0, t, size, dtype=np.int32)
        count = np.minimum(size, t - start).astype(np.int32)
        token = np.arange(t, dtype=np.int32)
        own, first = token // size, np.zeros(t, np.int32)
        # by the call's own size: a row that is shorter than a block completes none
        done = (token + 1) % args.block_size == 0
        return Table(start, count, Tokens(first, own, own + done))
    pooled = MeanPoolingArgs(
        inputs=args.key, mask=None, cu_seqlens=args.cu_seqlens, chunk_size=args.block_size
    )
    made = pooled_rows.make(pooled)
    start = jnp.where(made.count > 0, made.stop - made.count, 0)
    position = segments.cu_seqlens_to_positions(args.cu_seqlens, t)
    done = (position + 1) % args.block_size == 0
    own = jnp.where(made.inside, made.of_token, -1)
    first = jnp.where(made.inside, made.of_token - position // size, 0)
    stop = jnp.where(made.inside, own + done.astype(own.dtype), 0)
    return Table(start, made.count, Tokens(first, own, stop.astype(jnp.int32)))


def padded(tokens: Tokens, size: int) -> Tokens:
    """Tokens up to `size`; those added see nothing."""
    first, own, stop = map(jnp.asarray, tokens)
    return Tokens(pad(first, 0, size), pad(own, 0, size, -1), pad(stop, 0, size))


def means(args: Any, table: Table, x: jax.Array) -> jax.Array:
    """[m, t, d] -> [m, n, d]: means of blocks, each summed in the same order."""
    size = block_size(args)
    inside = np.arange(size, dtype=np.int32)[None]
    token = jnp.clip(table.start[:, None] + inside, 0, x.shape[1] - 1)
    real = jnp.asarray(inside < table.count[:, None])[None, :, :, None]
    total = jnp.where(real, x[:, token], 0).sum(axis=2)
    return total / jnp.maximum(table.count, 1)[None, :, None].astype(x.dtype)


def spread(table: Table, dmeans: jax.Array) -> jax.Array:
    """[m, n, d] -> [m, t, d]: the gradient of `means`."""
    share = dmeans / jnp.maximum(table.count, 1)[None, :, None].astype(dmeans.dtype)
    own = jnp.asarray(table.tokens.own)
    return jnp.where((own >= 0)[None, :, None], share[:, jnp.maximum(own, 0)], 0)


def marked(key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and finite values; a value that is not finite marks its key, not a whole product."""
    spoiled = ~jnp.isfinite(value).all(axis=-1, keepdims=True)
    return jnp.where(spoiled, jnp.nan, key), finite(value)
