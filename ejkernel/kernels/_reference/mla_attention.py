"""The oracle of multi-head latent attention: keys and values of all heads, then attention."""

import types

import jax
import jax.numpy as jnp

from ejkernel.kernels._reference import flash_attention


def mla_attention(args) -> tuple[jax.Array, ...]:
    """Output, and lse when asked for."""
    query, latent = args.query, args.key_value

    def expand(weights):
        wide = jnp.promote_types(query.dtype, jnp.float32)
        exact = jax.lax.Precision.HIGHEST
        made = jnp.einsum(
            "bsl,lgd->bsgd", latent, weights, precision=exact, preferred_element_type=wide
        )
        return made.astype(query.dtype)

    key, value = expand(args.w_kc), expand(args.w_vc)
    if args.b_k is not None:
        size = args.b_k.shape[-1]
        b_q = jnp.broadcast_to(args.b_q, (*query.shape[:3], size))
        b_k = jnp.broadcast_to(args.b_k[:, :, None], (*key.shape[:3], size))
        query = jnp.concatenate([query, b_q], axis=-1)
        key = jnp.concatenate([key, b_k], axis=-1)
    view = types.SimpleNamespace(
        **{**vars(args), "query": query}, key=key, value=value, q_positions=None, kv_positions=None
    )
    return flash_attention.flash_attention(view)
