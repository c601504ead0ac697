"""Where the blocks of a row of tokens lie, which of them a token may see, and their means.

Blocks are numbered along the row; packed sequences each begin a new block.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._specs import native_sparse_attention as spec
from ejkernel.xla_utils import search, segments


class Table(NamedTuple):
    """Blocks [n] and tokens [t], int32; NumPy where they are known while tracing."""

    start: Any  # the first token of a block
    stop: Any  # the token after its last one; `start` if there is no such block
    first: Any  # the first block of a token's sequence
    own: Any  # the block of a token, -1 outside all sequences
    done: Any  # after the last block that is complete at a token
    sequence: Any  # of a token, -1 outside; None: there is one

    @property
    def packed(self) -> bool:
        return self.sequence is not None


def block_size(args: Any) -> int:
    """Tokens of a block; one that is longer than the row is the row."""
    return min(args.block_size, max(args.key.shape[1], 1))


def make(args: Any) -> Table:
    """The blocks of a call."""
    t, size = args.key.shape[1], block_size(args)
    token = np.arange(t, dtype=np.int32)
    if args.cu_seqlens is None:
        start = np.arange(0, t, size, dtype=np.int32)
        own = token // size
        # by the call's own size: a row that is shorter than a block completes none
        done = own + ((token + 1) % args.block_size == 0)
        stop = np.minimum(start + size, t).astype(np.int32)
        return Table(start, stop, np.zeros(t, np.int32), own, done.astype(np.int32), None)
    cuts = jnp.clip(args.cu_seqlens, 0, t)
    lengths = jnp.maximum(cuts[1:] - cuts[:-1], 0)
    after = jnp.cumsum(-(-lengths // size), dtype=jnp.int32)  # blocks up to a sequence's last
    before = after + lengths // -size
    sequence = segments.cu_seqlens_to_segment_ids(args.cu_seqlens, t)
    position = segments.cu_seqlens_to_positions(args.cu_seqlens, t)
    inside, owner = sequence >= 0, jnp.maximum(sequence, 0)
    own = before[owner] + position // size
    done = own + ((position + 1) % args.block_size == 0).astype(own.dtype)
    block = jnp.arange(spec.num_blocks(args), dtype=jnp.int32)
    # unrolled: a loop would be as many launches as it has steps
    found = search.count_before(after, block)
    of_block = jnp.minimum(found, lengths.shape[0] - 1)
    start = cuts[of_block] + (block - before[of_block]) * size
    stop = jnp.minimum(start + size, cuts[of_block + 1])
    real = block < after[-1]
    return Table(
        *(jnp.where(real, x, 0).astype(jnp.int32) for x in (start, stop)),
        *(jnp.where(inside, x, 0).astype(jnp.int32) for x in (before[owner],)),
        jnp.where(inside, own, -1).astype(jnp.int32),
        jnp.where(inside, done, 0).astype(jnp.int32),
        sequence.astype(jnp.int32),
    )


def means(args: Any, table: Table, x: jax.Array) -> jax.Array:
    """[b, t, g, d] -> [b, n, g, d] in float32: means of blocks, each summed in the same order."""
    (batch, t, groups, width), size = x.shape, block_size(args)
    x = x.astype(jnp.float32)
    if not table.packed and t % size == 0:
        return x.reshape(batch, t // size, size, groups, width).mean(axis=2)
    inside = np.arange(size, dtype=np.int32)[None]
    token = jnp.clip(table.start[:, None] + inside, 0, t - 1)
    count = jnp.asarray(table.stop - table.start)
    real = (inside < count[:, None])[None, :, :, None, None]
    total = jnp.where(real, x[:, token], 0).sum(axis=2)
    return total / jnp.maximum(count, 1)[None, :, None, None].astype(jnp.float32)


def spread(table: Table, dmeans: jax.Array) -> jax.Array:
    """[b, n, g, d] -> [b, t, g, d] in float32: the gradient of `means`."""
    count = jnp.maximum(jnp.asarray(table.stop - table.start), 1)[None, :, None, None]
    share = dmeans.astype(jnp.float32) / count.astype(jnp.float32)
    own = jnp.asarray(table.own)
    share = share[:, jnp.maximum(own, 0)]
    return jnp.where((own >= 0)[None, :, None, None], share, 0.0) if table.packed else share
