"""`sampled_matmul` as a formula that JAX can differentiate any number of times."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import multiply
from ejkernel.kernels._xla._blocks.logits import pad


def sampled_matmul(args: Any) -> tuple[jax.Array, ...]:
    """The blocks, all at once: memory is that of nnz rows of blocks of both factors."""
    (m, k), n, size = args.lhs.shape, args.rhs.shape[1], args.block_size
    num_rows, num_cols = -(-m // size), -(-n // size)
    if num_rows * num_cols == 0:
        return (jnp.zeros((args.rows.shape[0], size, size), args.lhs.dtype),)
    lhs = pad(args.lhs, 0, num_rows * size).reshape(num_rows, size, k)
    rhs = pad(args.rhs, 1, num_cols * size).reshape(k, num_cols, size).transpose(1, 0, 2)
    inside = (args.rows >= 0) & (args.cols >= 0)
    inside &= (args.rows < num_rows) & (args.cols < num_cols)
    rows, cols = (jnp.where(inside, x, 0) for x in (args.rows, args.cols))
    index = jnp.arange(size, dtype=jnp.int32)
    real_rows = inside[:, None] & (rows[:, None] * size + index[None] < m)
    real_cols = inside[:, None] & (cols[:, None] * size + index[None] < n)
    product = multiply(
        "zik,zkj->zij",
        jnp.where(inside[:, None, None], lhs[rows], 0),
        jnp.where(inside[:, None, None], rhs[cols], 0),
    )
    real = real_rows[:, :, None] & real_cols[:, None, :]
    return (jnp.where(real, product, 0.0).astype(args.lhs.dtype),)
