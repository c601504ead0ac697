"""Lightning attention backward: that of the linear recurrence."""

from typing import Any

import jax

from ejkernel.kernels._xla.lightning_attention import fwd
from ejkernel.kernels._xla.linear_recurrence import bwd, config


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[()],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    return bwd.backward(fwd.as_recurrence(args), cfg, outputs, residuals, cotangents, wanted)
