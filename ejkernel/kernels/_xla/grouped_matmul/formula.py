"""Grouped matmul as a formula that JAX can differentiate any number of times.

Forward mode and second order use it: a scan over the most blocks there can be, each recomputed when
differentiated.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import wide
from ejkernel.kernels._specs.grouped_matmul import out_dtype
from ejkernel.kernels._xla._blocks import loops
from ejkernel.kernels._xla._blocks.logits import pad
from ejkernel.kernels._xla.grouped_matmul import fwd, plan
from ejkernel.xla_utils import dtypes

_ROWS = 128


def grouped_matmul(args: Any) -> tuple[jax.Array]:
    """The output."""
    dtype = out_dtype(args)
    lhs, rhs = args.lhs, args.rhs
    if lhs.ndim == 4 or 0 in (*lhs.shape, *rhs.shape):
        return fwd.forward(args, None)[0]
    m = lhs.shape[0]
    block_m = min(_ROWS, max(m // rhs.shape[0], 8))
    rows = plan.make(args, block_m)
    columns = rhs.shape[-2 if args.transpose_rhs else -1]
    out = jnp.zeros((m + block_m, columns), wide(dtypes.common(lhs.dtype, rhs.dtype)))
    lhs = pad(lhs, 0, m + block_m)

    @jax.checkpoint
    def block(lhs: jax.Array, rhs: jax.Array, i: Any) -> jax.Array:
        mine = (rows.start[i] + jnp.arange(block_m, dtype=jnp.int32) < rows.stop[i])[:, None]
        x = jnp.where(mine, jax.lax.dynamic_slice_in_dim(lhs, rows.start[i], block_m), 0)
        y = fwd.product(x, rhs[rows.group[i]], args.transpose_rhs, out.dtype)
        return jnp.where(mine, y, 0)  # a matrix that is not finite makes nan of 0

    def step(out: jax.Array, i: Any) -> tuple[jax.Array, None]:
        old = jax.lax.dynamic_slice_in_dim(out, rows.start[i], block_m)
        added = old + block(lhs, rhs, i)
        return jax.lax.dynamic_update_slice_in_dim(out, added, rows.start[i], 0), None

    out, _ = loops.scan(rows.group.shape[0], step, loops.vary_like(out, lhs))
    rest = jnp.zeros((), dtype) if args.existing_out is None else args.existing_out
    return (jnp.where(rows.computed[:, None], out[:m].astype(dtype), rest),)
