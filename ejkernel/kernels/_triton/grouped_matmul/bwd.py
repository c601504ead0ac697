"""Grouped matmul backward in Triton: a grouped product for lhs, sums over rows for rhs."""

from typing import Any

import jax

from ejkernel.kernels._shared import grouped_gradients
from ejkernel.kernels._triton.grouped_matmul import config, products


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[()],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    config.check(args, cfg)
    rows = products.groups_of(args)
    return grouped_gradients.gradients(products, args, cfg, rows, cotangents[0], wanted)
