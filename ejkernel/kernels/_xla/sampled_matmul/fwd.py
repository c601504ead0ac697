"""Some blocks of a product: rows of blocks of lhs times columns of blocks of rhs."""

from typing import Any

import jax

from ejkernel.kernels._xla.sparse_matmul import products


def forward(args: Any, cfg: None) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """The blocks; no residuals."""
    out = products.sampled(args.lhs, args.rhs, args.rows, args.cols, args.block_size)
    return (out.astype(args.lhs.dtype),), ()
