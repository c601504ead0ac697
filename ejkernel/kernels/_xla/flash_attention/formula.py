"""Attention as a formula that JAX can differentiate any number of times.

Forward mode and second order use it. A block of query rows is computed against all keys and
recomputed when differentiated, so memory stays at a few rows of logits.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.precision import xla_precision
from ejkernel.kernels._shared.products import finite, wide
from ejkernel.kernels._xla._blocks import loops, softmax
from ejkernel.kernels._xla._blocks.logits import Blocks, Pairs, Tile

_ROWS = 256


def flash_attention(args: Any) -> tuple[jax.Array, ...]:
    """Outputs of `flash_attention`."""
    rows = min(_ROWS, max(args.query.shape[1], 1))
    out, lse, _ = attend(args, rows, with_weights=False)
    return (out, lse) if args.return_lse else (out,)


def attend(
    args: Any, rows: int, with_weights: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Output [b, t, h, e], lse [b, h, t] and, if asked for, weights [b, h, t, s]."""
    batch, t, num_q_heads, _ = args.query.shape
    s, num_kv_heads, width = args.value.shape[1:]
    if 0 in (batch, t, s):
        return nothing(args)
    size_k = -(-s // 4) * 4
    pairs = Pairs(args, Blocks(b=batch, g=num_kv_heads, q=rows, k=size_k))
    poison = {
        name: jnp.where(jnp.isfinite(x).all(axis=-1), 0.0, jnp.nan).astype(pairs.dtype)
        for name, x in (("q", args.query), ("k", args.key), ("v", args.value))
    }
    poison = jax.tree.map(jax.lax.stop_gradient, poison)
    q, k, v = (
        pairs.queries(finite(args.query)),
        pairs.keys(finite(args.key)),
        pairs.keys(finite(args.value)),
    )
    bad_q = pairs.queries(poison["q"][..., None])[..., 0]  # [b, g, r, T]
    bad_k = pairs.keys((poison["k"] + poison["v"])[..., None])[..., 0]  # [b, g, S]
    exact = xla_precision(q.dtype)

    @jax.checkpoint
    def block(i: Any) -> tuple[jax.Array, ...]:
        at = Tile(0, 0, i, 0)
        dots = jnp.einsum(
            "bgrtd,bgsd->bgrts",
            pairs.q_block(q, at),
            k,
            precision=exact,
            preferred_element_type=pairs.dtype,
        )
        x = pairs.logits(dots, at, "ts")
        x = x + pairs.q_block(bad_q, at)[..., None] + bad_k[:, :, None, None, :]
        seen = pairs.visible(at, "ts")
        x = x if seen is None else jnp.where(seen, x, -jnp.inf)
        sinks = pairs.sinks()
        if sinks is not None:
            shape = (*x.shape[:-1], sinks.shape[-1])
            x = jnp.concatenate([x, jnp.broadcast_to(sinks[..., None, :], shape)], axis=-1)
        peak = softmax.shift(jax.lax.stop_gradient(x.max(axis=-1, keepdims=True)))
        weights = jnp.exp(softmax.below(x, peak))
        total = weights.sum(axis=-1, keepdims=True)
        empty = total == 0.0
        total = jnp.where(empty, 1.0, total)
        lse = jnp.where(empty, -jnp.inf, peak + jnp.log(total))[..., 0]
        weights = (weights / total)[..., :size_k]
        drop = pairs.dropout(at, "ts")
        weights = (weights if drop is None else weights * drop).astype(v.dtype)
        out = jnp.einsum(
            "bgrts,bgse->bgrte", weights, v, precision=exact, preferred_element_type=pairs.dtype
        )
        return (out, lse, weights) if with_weights else (out, lse)

    out, lse, *rest = loops.stack(pairs.num_q, block)
    # [nq, b, g, r, bq, e] -> [b, T, h, e]; a head may have no columns to tell T by
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, pairs.padded_t, num_q_heads, width)
    lse = lse.transpose(1, 2, 3, 0, 4).reshape(batch, num_q_heads, pairs.padded_t)
    weights = None
    if with_weights:
        weights = rest[0].transpose(1, 2, 3, 0, 4, 5)
        weights = weights.reshape(batch, num_q_heads, pairs.padded_t, size_k)[:, :, :t, :s]
    return out[:, :t].astype(args.query.dtype), lse[..., :t], weights


def nothing(args: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Results of a call without a pair: only sinks reach the lse."""
    batch, t, num_q_heads, _ = args.query.shape
    s, _, width = args.value.shape[1:]
    dtype = wide(args.query.dtype)
    lse = jnp.full((batch, num_q_heads, t), -jnp.inf, dtype)
    if args.softmax_aux is not None:
        rows = jax.nn.logsumexp(args.softmax_aux.astype(dtype), axis=-1)
        lse = jnp.broadcast_to(rows[None, :, None], lse.shape)
    out = jnp.zeros((batch, t, num_q_heads, width), args.query.dtype)
    return out, lse, jnp.zeros((batch, num_q_heads, t, s), args.query.dtype)
