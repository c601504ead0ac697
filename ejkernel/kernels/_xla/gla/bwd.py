"""Gated linear attention backward: that of the linear recurrence, `gk` renamed."""

from typing import Any

import jax

from ejkernel.kernels._xla.gla import fwd
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
    asked = frozenset("gk" if name == "g" else name for name in wanted)
    call = fwd.as_recurrence(args)
    grads = bwd.backward(call, cfg, outputs, residuals, cotangents, asked)
    return {"g" if name == "gk" else name: grad for name, grad in grads.items()}
