"""Mean pooling forward: sums in float32 at least, over tokens that count."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared import pooled_rows
from ejkernel.kernels._shared.products import wide
from ejkernel.kernels._xla._blocks.logits import pad


def forward(args: Any, cfg: None) -> tuple[tuple[jax.Array], tuple[()]]:
    """The means; there are no residuals."""
    return formula(args), ()


def formula(args: Any) -> tuple[jax.Array]:
    """The means; JAX can differentiate this too."""
    return (_dense(args) if args.cu_seqlens is None else _packed(args),)


def chunks(args: Any, x: jax.Array) -> jax.Array:
    """[b, t, …] as [b, chunks, tokens, …], the end filled with zeros."""
    batch, t, *rest = x.shape
    # a chunk beyond the last token would only be filled
    size = max(t, 1) if args.chunk_size is None else min(args.chunk_size, max(t, 1))
    count = 1 if args.chunk_size is None else -(-t // size)
    return pad(x, 1, count * size).reshape(batch, count, size, *rest)


def seen(args: Any) -> jax.Array:
    """Tokens that count, cut into chunks: [b, chunks, tokens]."""
    mask = args.mask
    return chunks(args, jnp.ones(args.inputs.shape[:2], bool) if mask is None else mask)


def over(x: jax.Array, counts: jax.Array) -> jax.Array:
    """`x / counts`, counts having the leading axes of `x`; where nothing counts, `x` is 0."""
    counts = jnp.maximum(counts, 1).astype(x.dtype)
    return x / counts.reshape(*counts.shape, *(1,) * (x.ndim - counts.ndim))


def along(mask: jax.Array, like: jax.Array) -> jax.Array:
    """A mask with axes added at the end."""
    return mask.reshape(*mask.shape, *(1,) * (like.ndim - mask.ndim))


def _dense(args: Any) -> jax.Array:
    x, counted = chunks(args, args.inputs), seen(args)
    # not a product with the mask: 0 * nan is nan
    sums = jnp.where(along(counted, x), x, 0).sum(axis=2, dtype=wide(x.dtype))
    means = over(sums, counted.sum(axis=2)).astype(x.dtype)
    return means[:, 0] if args.chunk_size is None else means


def _packed(args: Any) -> jax.Array:
    t, *rest = args.inputs.shape[1:]
    dtype, num_sequences = args.inputs.dtype, args.cu_seqlens.shape[0] - 1
    if t == 0 or num_sequences == 0:
        count = num_sequences + (t // args.chunk_size if args.chunk_size else 0)
        return jnp.zeros((count, *rest), dtype)
    made = pooled_rows.make(args)
    x = args.inputs[0].astype(wide(dtype))
    x = jnp.where(along(made.inside, x), x, 0)
    # a scatter is the quickest on a CPU (0.4 ms for 4096 x 1024 float32, the scan 6 ms, on 2 cores
    # of an AMD EPYC); elsewhere its sums come in any order
    sums = jax.lax.platform_dependent(x, made, cpu=_scatter, default=_scan)
    return over(sums, made.count).astype(dtype)


def _scatter(x: jax.Array, made: pooled_rows.Rows) -> jax.Array:
    return jax.ops.segment_sum(x, made.of_token, made.count.shape[0])


def _scan(x: jax.Array, made: pooled_rows.Rows) -> jax.Array:
    """Running sums that start anew at each row; the last of a row is its sum."""
    changed = made.of_token[1:] != made.of_token[:-1]
    first = jnp.concatenate([jnp.ones(1, bool), changed])

    def add(a: Any, b: Any) -> Any:
        return a[0] | b[0], jnp.where(b[0], b[1], a[1] + b[1])

    flags = jnp.broadcast_to(along(first, x), x.shape)
    _, sums = jax.lax.associative_scan(add, (flags, x))
    ends = sums[jnp.clip(made.stop - 1, 0, x.shape[0] - 1)]
    return jnp.where(along(made.count > 0, ends), ends, 0)
