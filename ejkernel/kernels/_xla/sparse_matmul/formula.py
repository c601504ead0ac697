"""`sparse_matmul` as a formula that JAX can differentiate any number of times."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import multiply
from ejkernel.kernels._xla._blocks.logits import pad


def sparse_matmul(args: Any) -> tuple[jax.Array, ...]:
    """The product, from all blocks at once: memory is that of nnz rows of blocks of `dense`."""
    (m, k), (_, size, _), n = args.shape, args.blocks.shape, args.dense.shape[1]
    num_rows, num_cols = -(-m // size), -(-k // size)
    dense = pad(args.dense, 0, num_cols * size).reshape(num_cols, size, n)
    inside = (args.rows >= 0) & (args.cols >= 0)
    inside &= (args.rows < num_rows) & (args.cols < num_cols)
    rows, cols = (jnp.where(inside, x, 0) for x in (args.rows, args.cols))
    real = cols[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None] < k
    if num_rows * num_cols == 0:
        return (jnp.zeros((m, n), args.dense.dtype),)
    product = multiply(
        "zij,zjn->zin",
        jnp.where((inside[:, None] & real)[:, None], args.blocks, 0),
        jnp.where(inside[:, None, None], dense[cols], 0),
    )
    out = jnp.zeros((num_rows, size, n), product.dtype).at[rows].add(product)
    return (out.reshape(-1, n)[:m].astype(args.dense.dtype),)
