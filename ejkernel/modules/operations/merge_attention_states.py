"""`merge_attention_states`: attention over a union of keys from its parts."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel.kernels._xla._blocks import softmax


def merge_attention_states(
    out_a: Float[Array, "b t h e"],
    lse_a: Float[Array, "b h t"],
    out_b: Float[Array, "b t h e"],
    lse_b: Float[Array, "b h t"],
) -> tuple[Float[Array, "b t h e"], Float[Array, "b h t"]]:
    """Merges attention over two sets of keys into attention over both.

    out = (exp(lse_a) * out_a + exp(lse_b) * out_b) / (exp(lse_a) + exp(lse_b))

    Differentiable. A part that saw no key (lse -inf) changes nothing.

    Returns:
      The output in the dtype of `out_a`, and its lse in float32.
    """
    op = "merge_attention_states"
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape:
        raise ValueError(
            f"`{op}`: both parts must have one shape; got outputs {out_a.shape}, {out_b.shape} and "
            f"lse {lse_a.shape}, {lse_b.shape}."
        )
    batch, t, heads, _ = out_a.shape
    if lse_a.shape != (batch, heads, t):
        raise ValueError(
            f"`{op}`: `lse_a` must be {(batch, heads, t)} for `out_a` {out_a.shape}; "
            f"got {lse_a.shape}."
        )
    wide = jnp.float64 if out_a.dtype == jnp.float64 else jnp.float32
    parts = ((out_a, lse_a), (out_b, lse_b))
    (first, lse_a), (second, lse_b) = (
        (out.astype(wide).transpose(0, 2, 1, 3), lse.astype(wide)) for out, lse in parts
    )
    out, lse = softmax.merge(first, lse_a, second, lse_b)
    return out.transpose(0, 2, 1, 3).astype(out_a.dtype), lse
