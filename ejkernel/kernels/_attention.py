"""What attention kernels share, whatever their backend: distances, and sums over rows, in XLA."""

from typing import Any

import jax
import jax.numpy as jnp


def distance(q_pos: jax.Array, k_pos: jax.Array, dtype: Any) -> jax.Array:
    """Key position less query position as floats; int32 positions may be 2^32 apart."""
    near, far = (k_pos - q_pos).astype(dtype), k_pos.astype(dtype) - q_pos.astype(dtype)
    # of unlike signs it may not fit into 32 bits, and then nothing cancels
    return jnp.where((k_pos ^ q_pos) < 0, far, near)


def row_sums(args: Any, outputs: Any, cotangents: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Of each query sum(out * dout) - dlse, [b, h, t]."""
    out, dout = (x[0].astype(dtype) for x in (outputs, cotangents))
    delta = (out * dout).sum(-1).transpose(0, 2, 1)
    # a row that saw no key has output 0 whatever its cotangent is
    delta = jnp.where((out == 0).all(axis=-1).transpose(0, 2, 1), 0.0, delta)
    return delta - cotangents[1].astype(dtype) if args.return_lse else delta


def sink_terms(args: Any, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """-exp(sink - lse) * delta, whose sum over the first axis is the gradient of the sinks."""
    sinks = args.softmax_aux.astype(lse.dtype)
    finite = jnp.where(jnp.isneginf(lse), 0.0, lse)
    finite = finite[..., None]
    weights = jnp.exp(jnp.minimum(sinks[None, :, None, :], finite) - finite)  # [b, h, t, n]
    terms = (-weights * delta[..., None]).transpose(0, 2, 1, 3)
    return terms.reshape(terms[..., 0].size // sinks.shape[0] if sinks.size else 0, *sinks.shape)


def sink_gradient(args: Any, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """The gradient of the sinks, [h or 1, n]."""
    return sink_terms(args, lse, delta).sum(axis=0).astype(args.softmax_aux.dtype)
