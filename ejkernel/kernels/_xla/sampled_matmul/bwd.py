"""Backward: the block-sparse cotangent times rhs.T, and lhs.T times it."""

from typing import Any

import jax

from ejkernel.kernels._xla.sparse_matmul import products


def backward(
    args: Any,
    cfg: None,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[()],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    dout = cotangents[0].astype(args.lhs.dtype)
    grads, m, n = {}, args.lhs.shape[0], args.rhs.shape[1]
    if "lhs" in wanted:
        dlhs = products.sparse(dout, args.rows, args.cols, args.rhs.T, m)
        grads["lhs"] = dlhs.astype(args.lhs.dtype)
    if "rhs" in wanted:
        drhs = products.sparse(dout.swapaxes(1, 2), args.cols, args.rows, args.lhs, n)
        grads["rhs"] = drhs.T.astype(args.rhs.dtype)
    return grads
