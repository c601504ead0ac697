"""The oracle of mean pooling: one plain mean a row of the output."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np


def mean_pooling(args) -> tuple[jax.Array]:
    """Means over tokens, chunk by chunk, sequence by sequence."""
    x, mask = args.inputs, args.mask
    batch, t, *rest = x.shape
    wide = jnp.promote_types(x.dtype, jnp.float32)
    keep = np.ones((batch, t), bool) if mask is None else np.asarray(mask)

    def mean(row, start, stop):
        tokens = [x[row, i].astype(wide) for i in range(start, stop) if keep[row, i]]
        return sum(tokens) / len(tokens) if tokens else jnp.zeros(rest, wide)

    def chunks(row, start, stop):
        size = args.chunk_size
        return [mean(row, i, min(i + size, stop)) for i in range(start, stop, size)]

    if args.cu_seqlens is not None:
        cuts = np.asarray(args.cu_seqlens)
        pairs = list(itertools.pairwise(cuts))
        if args.chunk_size is None:
            rows = [mean(0, *pair) for pair in pairs]
        else:
            rows = [row for pair in pairs for row in chunks(0, *pair)]
            count = t // args.chunk_size + len(pairs)
            rows += [jnp.zeros(rest, wide)] * (count - len(rows))
        out = jnp.stack(rows) if rows else jnp.zeros((0, *rest), wide)
    elif args.chunk_size is None:
        means = [mean(b, 0, t) for b in range(batch)]
        out = jnp.stack(means) if means else jnp.zeros((0, *rest), wide)
    else:
        rows = [row for b in range(batch) for row in chunks(b, 0, t)]
        count = -(-t // args.chunk_size)
        out = jnp.stack(rows) if rows else jnp.zeros(0, wide)
        out = out.reshape(batch, count, *rest)
    return (out.astype(x.dtype),)
