"""Merging of attention states in plain JAX; JAX differentiates."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla._blocks import softmax


@kernel_registry.register("merge_attention_states", Platform.XLA, Backend.ANY, derivative="jax")
def merge_attention_states(args: Any, cfg: None) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Output in the dtype of `out_a`, and lse."""
    wide = jnp.float64 if args.lse_a.dtype == jnp.float64 else jnp.float32
    parts = ((args.out_a, args.lse_a), (args.out_b, args.lse_b))
    (first, lse_a), (second, lse_b) = (
        (out.astype(wide).transpose(0, 2, 1, 3), lse.astype(wide)) for out, lse in parts
    )
    out, lse = softmax.merge(first, lse_a, second, lse_b)
    return (out.transpose(0, 2, 1, 3).astype(args.out_a.dtype), lse), ()
