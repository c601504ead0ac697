"""Block-sparse attention as a formula that JAX can differentiate any number of times.

Forward mode and second order use it. It computes every block and masks: a few rows at a time.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._xla.flash_attention import formula


def blocksparse_attention(args: Any) -> tuple[jax.Array, ...]:
    """Outputs of `blocksparse_attention`."""
    t, s, size = args.query.shape[1], args.key.shape[1], args.block_size
    mask = jnp.repeat(jnp.repeat(args.sparsity_mask, size, axis=2), size, axis=3)[:, :, :t, :s]
    mask = mask if args.attention_mask is None else mask & args.attention_mask
    return formula.flash_attention(dataclasses.replace(args, attention_mask=mask))
