"""Grouped matmul backward in Triton: a grouped product for lhs, sums over rows for rhs."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared import groups
from ejkernel.kernels._triton.grouped_matmul import config, fwd, products


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
    lhs, rhs, dout = fwd.flat(args.lhs, 2), fwd.flat(args.rhs, 3), fwd.flat(cotangents[0], 2)
    rows, grads = products.groups_of(args), {}
    if "lhs" in wanted:
        dlhs = products.multiply(
            dout, rhs, rows, cfg, transpose_rhs=not args.transpose_rhs, dtype=lhs.dtype
        )
        grads["lhs"] = dlhs.reshape(args.lhs.shape)
    if "rhs" in wanted:
        left, right = (dout, lhs) if args.transpose_rhs else (lhs, dout)
        grads["rhs"] = products.outer(left, right, rows, cfg, rhs.dtype).reshape(args.rhs.shape)
    if "existing_out" in wanted:
        m, count = lhs.shape[0], rhs.shape[0]
        owned = groups.of_sizes(args.group_sizes, args.group_offset, count, m).owned(m)[:, None]
        grads["existing_out"] = jnp.where(owned, jnp.zeros((), dout.dtype), dout)
    return grads
