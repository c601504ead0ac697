"""Backward: the blocks of dout @ dense.T at the same places, and the transposed matrix @ dout."""

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
    dout = cotangents[0].astype(args.dense.dtype)
    grads, (_, k) = {}, args.shape
    if "blocks" in wanted:
        size = args.blocks.shape[1]
        dblocks = products.sampled(dout, args.dense.T, args.rows, args.cols, size)
        grads["blocks"] = dblocks.astype(args.blocks.dtype)
    if "dense" in wanted:
        transposed = args.blocks.swapaxes(1, 2)
        ddense = products.sparse(transposed, args.cols, args.rows, dout, k)
        grads["dense"] = ddense.astype(args.dense.dtype)
    return grads
