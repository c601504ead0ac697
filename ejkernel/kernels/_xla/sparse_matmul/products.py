"""Both products of block-sparse matrices, one block at a time; each is in the other's gradient.

Partial last blocks count as far as the matrix reaches: what a block holds beyond may be anything.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import multiply, wide
from ejkernel.kernels._xla._blocks import loops
from ejkernel.kernels._xla._blocks.logits import pad


def sparse(
    blocks: jax.Array, rows: jax.Array, cols: jax.Array, dense: jax.Array, m: int
) -> jax.Array:
    """The matrix [m, k] of some blocks times dense [k, n], in the dtype of sums."""
    (nnz, size, _), (k, n) = blocks.shape, dense.shape
    dtype = wide(dense.dtype)
    if 0 in (nnz, m, k, n):
        return loops.vary_like(jnp.zeros((m, n), dtype), dense)
    num_rows, num_cols = -(-m // size), -(-k // size)
    dense = pad(dense, 0, num_cols * size)

    def step(i: Any, out: jax.Array) -> jax.Array:
        row, col, inside = _place(rows, cols, i, num_rows, num_cols)
        block = jax.lax.dynamic_index_in_dim(blocks, i, keepdims=False)
        if k % size:
            block = jnp.where(col * size + jnp.arange(size, dtype=jnp.int32)[None] < k, block, 0)
        product = multiply("ij,jn->in", block, loops.take(dense, col, size, 0))
        return loops.put(out, jnp.where(inside, product, 0.0), (row, 0))

    out = loops.vary_like(jnp.zeros((num_rows * size, n), dtype), dense)
    return loops.fori(0, nnz, step, loops.vary_like(out, blocks))[:m]


def sampled(
    lhs: jax.Array, rhs: jax.Array, rows: jax.Array, cols: jax.Array, size: int
) -> jax.Array:
    """Blocks [nnz, size, size] of lhs [m, k] times rhs [k, n], in the dtype of sums."""
    (m, k), n, nnz = lhs.shape, rhs.shape[1], rows.shape[0]
    dtype = wide(lhs.dtype)
    if 0 in (nnz, m, k, n):
        return loops.vary_like(jnp.zeros((nnz, size, size), dtype), lhs)
    num_rows, num_cols = -(-m // size), -(-n // size)
    lhs, rhs = pad(lhs, 0, num_rows * size), pad(rhs, 1, num_cols * size)
    index = jnp.arange(size, dtype=jnp.int32)

    def block(i: Any) -> jax.Array:
        row, col, inside = _place(rows, cols, i, num_rows, num_cols)
        left, right = loops.take(lhs, row, size, 0), loops.take(rhs, col, size, 1)
        product = multiply("ik,kj->ij", left, right)
        real = (row * size + index[:, None] < m) & (col * size + index[None] < n)
        return jnp.where(inside & real, product, 0.0)

    return loops.stack(nnz, block)


def _place(rows: jax.Array, cols: jax.Array, i: Any, num_rows: int, num_cols: int) -> Any:
    """Row and column of block i, brought inside, and whether they were."""
    row, col = rows[i], cols[i]
    inside = (row >= 0) & (row < num_rows) & (col >= 0) & (col < num_cols)
    return jnp.clip(row, 0, num_rows - 1), jnp.clip(col, 0, num_cols - 1), inside
