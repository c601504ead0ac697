"""Attention over given blocks, backward: that of the selected branch."""

from typing import Any

import jax

from ejkernel.kernels._xla.apply_native_sparse_attention import fwd
from ejkernel.kernels._xla.native_sparse_attention import bwd, config


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    return bwd.backward(fwd.as_branch(args), cfg, outputs, residuals, cotangents, wanted)
