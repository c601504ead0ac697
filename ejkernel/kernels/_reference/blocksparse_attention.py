"""The oracle of block-sparse attention: attention under the mask of blocks, written out in full."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.kernels._reference import flash_attention


def blocksparse_attention(args) -> tuple[jax.Array, ...]:
    """Output, and lse when asked for."""
    t, s = args.query.shape[1], args.key.shape[1]
    mask = args.sparsity_mask
    mask = jnp.repeat(jnp.repeat(mask, args.block_size, axis=2), args.block_size, axis=3)
    mask = mask[:, :, :t, :s]
    if args.attention_mask is not None:
        mask = mask & args.attention_mask
    out, lse, _ = flash_attention.attend(dataclasses.replace(args, attention_mask=mask))
    return (out, lse) if args.return_lse else (out,)
