"""Attention over given blocks, forward: the selected branch of native sparse attention."""

from typing import Any

import jax

from ejkernel.kernels._specs.native_sparse_attention import NativeSparseAttentionArgs
from ejkernel.kernels._xla.native_sparse_attention import config, fwd


def as_branch(args: Any) -> NativeSparseAttentionArgs:
    """The same call as one of `native_sparse_attention`, without gates."""
    arrays = {"block_counts": None} | args.arrays()
    return NativeSparseAttentionArgs(**arrays, **args.statics())


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array], tuple[jax.Array, ...]]:
    """The output; residuals are its rows' and the selection's bits."""
    outputs, residuals = fwd.forward(as_branch(args), cfg)
    return outputs, residuals[:3]
