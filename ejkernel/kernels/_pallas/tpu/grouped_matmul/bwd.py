"""Grouped matmul backward on a TPU: a grouped product for lhs, sums over rows for rhs."""

from typing import Any

import jax

from ejkernel.kernels._pallas.tpu.grouped_matmul import config, products
from ejkernel.kernels._shared import grouped_gradients, groups


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[()],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    rows = groups.of_call(args)
    return grouped_gradients.gradients(products, args, cfg, rows, cotangents[0], wanted)
