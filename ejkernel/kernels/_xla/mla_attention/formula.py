"""Latent attention as a formula that JAX can differentiate any number of times.

Forward mode and second order use it; it makes keys and values of all heads.
"""

import types
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.precision import xla_precision
from ejkernel.kernels._shared.products import finite, wide
from ejkernel.kernels._xla.flash_attention import formula


def mla_attention(args: Any) -> tuple[jax.Array, ...]:
    """Outputs of `mla_attention`."""
    query, dtype = args.query, args.query.dtype
    spoiled = ~jnp.isfinite(args.key_value).all(axis=-1)[..., None, None]
    latent = finite(args.key_value)

    def expand(weights: jax.Array) -> jax.Array:
        made = jnp.einsum(
            "bsl,lgd->bsgd",
            latent,
            weights,
            precision=xla_precision(dtype),
            preferred_element_type=wide(dtype),
        )
        # a latent that is not finite spoils who sees it, and nothing else
        return jnp.where(spoiled, jnp.nan, made.astype(dtype))

    key, value = expand(args.w_kc), expand(args.w_vc)
    if args.b_k is not None:
        size = args.b_k.shape[-1]
        b_q = jnp.broadcast_to(args.b_q, (*query.shape[:3], size))
        b_k = jnp.broadcast_to(args.b_k[:, :, None], (*key.shape[:3], size))
        query, key = jnp.concatenate([query, b_q], -1), jnp.concatenate([key, b_k], -1)
    view = types.SimpleNamespace(
        **{**vars(args), "query": query}, key=key, value=value, q_positions=None, kv_positions=None
    )
    return formula.flash_attention(view)
