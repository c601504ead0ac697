"""`mla_attention` projected: keys and values of all heads, then any kernel of `flash_attention`.

Forward makes keys [b, s, g, d + r] and values [b, s, g, e] of all tokens with one product each, and
backward makes them again: they are temporaries of both, never saved. The rope part of the keys is
the same for all heads, and stands behind what is projected. Backward is the kernel's own, followed
by the gradients of the two products.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import finite, multiply, wide
from ejkernel.kernels._specs.flash_attention import FlashAttentionArgs

# Arrays of `flash_attention`, and what they are computed from.
MADE = {
    "query": ("query", "b_q"),
    "key": ("key_value", "w_kc", "b_k"),
    "value": ("key_value", "w_vc"),
}
# Products of XLA's tiles run at 78 TFLOP/s on an H200, attention kernels at 510 (head sizes 192 and
# 128, bfloat16, docs/measured.md).
_KERNEL_SPEED = 6


def project(args: Any) -> FlashAttentionArgs:
    """The call of `flash_attention` that a call of `mla_attention` means."""
    shared = args.arrays() | args.statics()
    for name in ("key_value", "w_kc", "w_vc", "b_q", "b_k"):
        shared.pop(name, None)
    query, (key, value) = args.query, (_expand(args.key_value, w) for w in (args.w_kc, args.w_vc))
    if args.b_k is not None:
        query = _behind(query, args.b_q)
        key = _behind(key, args.b_k[:, :, None])
    return FlashAttentionArgs(**shared | {"query": query, "key": key, "value": value})


def _expand(latent: jax.Array, weights: jax.Array) -> jax.Array:
    """Of each head [b, s, g, d]; the products are summed in float32 at least."""
    return multiply("bsl,lgd->bsgd", latent, weights).astype(latent.dtype)


def _behind(x: jax.Array, rope: jax.Array) -> jax.Array:
    """[b, t, h, d] and [b, t, h or 1, r] -> [b, t, h, d + r]."""
    return jnp.concatenate([x, jnp.broadcast_to(rope, (*x.shape[:3], rope.shape[-1]))], axis=-1)


def pull(args: Any, of: dict[str, jax.Array], wanted: frozenset[str]) -> dict[str, jax.Array]:
    """Gradients of latent, weights and rope parts from those of queries, keys and values.

    All products are of the call's dtype, as forward, so that a GPU runs them on tensor cores.
    """
    dtype, nope = args.query.dtype, args.w_kc.shape[-1]
    grads: dict[str, jax.Array] = {}
    if "query" in of:
        grads["query"], b_q = of["query"][..., :nope], of["query"][..., nope:]
        if "b_q" in wanted:
            grads["b_q"] = _sum_heads(b_q)[:, :, None] if args.b_q.shape[2] == 1 else b_q
    heads: dict[str, tuple[jax.Array, jax.Array]] = {}  # by the name of the weights
    if "key" in of:
        heads["w_kc"] = args.w_kc, of["key"][..., :nope].astype(dtype)
        if "b_k" in wanted:
            grads["b_k"] = _sum_heads(of["key"][..., nope:])
    if "value" in of:
        heads["w_vc"] = args.w_vc, of["value"].astype(dtype)
    if "key_value" in wanted:
        latent = (multiply("bsgd,lgd->bsl", x, w) for w, x in heads.values())
        grads["key_value"] = sum(latent, jnp.zeros((), wide(dtype)))
    # a latent of padding may be anything, and its keys have gradients of zero
    latent = finite(args.key_value)
    for name, (_, x) in heads.items():
        if name in wanted:
            grads[name] = multiply("bsl,bsgd->lgd", latent, x)
    return {name: grads[name].astype(getattr(args, name).dtype) for name in wanted}


def _sum_heads(x: jax.Array) -> jax.Array:
    """[b, t, h, r] -> [b, t, r]."""
    return x.astype(wide(x.dtype)).sum(axis=2)


def defers(args: Any) -> bool:
    """Whether the queries are so few that projecting all keys is most of the work.

    Compares the multiplications of a key of one batch row: absorbed, each query meets the latent
    twice and the rope part; projected, the key is made once for each head.
    """
    _, t, num_q_heads, nope = args.query.shape
    latent, num_kv_heads, width = args.w_vc.shape
    rope = 0 if args.b_k is None else args.b_k.shape[-1]
    absorbed = t * num_q_heads * (2 * latent + rope)
    projected = t * num_q_heads * (nope + rope + width) + num_kv_heads * latent * (nope + width)
    return _KERNEL_SPEED * absorbed < projected
