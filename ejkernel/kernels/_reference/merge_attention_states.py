"""The oracle of `merge_attention_states`: a softmax over two parts."""

import jax
import jax.numpy as jnp


def merge_attention_states(args) -> tuple[jax.Array, jax.Array]:
    """Output and lse of the union of two sets of keys."""
    wide = jnp.promote_types(args.lse_a.dtype, args.lse_b.dtype)
    lse = jnp.stack([args.lse_a.astype(wide), args.lse_b.astype(wide)])  # [2, b, h, t]
    empty = jnp.isneginf(lse).all(axis=0)
    safe = jnp.where(empty, 0.0, lse)
    weights = jnp.where(empty, 0.0, jax.nn.softmax(safe, axis=0)).transpose(0, 1, 3, 2)[..., None]
    parts = jnp.stack([args.out_a.astype(wide), args.out_b.astype(wide)])
    out = jnp.where(weights > 0, weights * parts, 0.0).sum(axis=0)
    total = jnp.where(empty, -jnp.inf, jax.nn.logsumexp(safe, axis=0))
    return out.astype(args.out_a.dtype), total
