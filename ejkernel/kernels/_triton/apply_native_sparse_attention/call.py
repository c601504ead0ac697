"""Attention over given blocks as a call of native sparse attention without gates."""

from typing import Any

import jax

from ejkernel.kernels._specs.native_sparse_attention import NativeSparseAttentionArgs
from ejkernel.kernels._triton.native_sparse_attention import bwd, config, fwd


def _as_branch(args: Any) -> NativeSparseAttentionArgs:
    arrays = {"block_counts": None} | args.arrays()
    return NativeSparseAttentionArgs(**arrays, **args.statics())


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array], tuple[jax.Array, ...]]:
    """The output; residuals are its rows' and the selection's bits."""
    outputs, residuals = fwd.forward(_as_branch(args), cfg)
    return outputs, residuals[:3]


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    return bwd.backward(_as_branch(args), cfg, outputs, residuals, cotangents, wanted)
