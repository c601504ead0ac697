"""Mean pooling backward: each token that counts takes its share of its row's cotangent."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared import pooled_rows
from ejkernel.kernels._shared.products import wide
from ejkernel.kernels._xla.mean_pooling import fwd


def backward(
    args: Any,
    cfg: None,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[()],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """The gradient of `inputs`."""
    x, (dout,) = args.inputs, cotangents
    if x.size == 0:
        return {"inputs": jnp.zeros_like(x)}
    dout = dout.astype(wide(x.dtype))
    dx = _dense(args, dout) if args.cu_seqlens is None else _packed(args, dout)
    return {"inputs": dx.astype(x.dtype)}


def _dense(args: Any, dout: jax.Array) -> jax.Array:
    batch, t, *rest = args.inputs.shape
    counted = fwd.seen(args)
    dout = dout[:, None] if args.chunk_size is None else dout
    share = fwd.over(dout, counted.sum(axis=2))[:, :, None]  # [b, chunks, 1, …]
    dx = jnp.where(fwd.along(counted, share), share, 0)
    return dx.reshape(batch, -1, *rest)[:, :t]


def _packed(args: Any, dout: jax.Array) -> jax.Array:
    if args.cu_seqlens.shape[0] == 1:
        return jnp.zeros(args.inputs.shape, dout.dtype)
    made = pooled_rows.make(args)
    dx = fwd.over(dout, made.count)[made.of_token]
    return jnp.where(fwd.along(made.inside, dx), dx, 0)[None]
