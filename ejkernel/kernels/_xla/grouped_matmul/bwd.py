"""Grouped matmul backward: a grouped product for lhs, sums over each group's rows for rhs."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import multiply, wide
from ejkernel.kernels._xla._blocks import loops
from ejkernel.kernels._xla._blocks.logits import pad
from ejkernel.kernels._xla.grouped_matmul import config, fwd, plan
from ejkernel.xla_utils import dtypes


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[()],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    (dout,), lhs, rhs = cotangents, args.lhs, args.rhs
    if lhs.ndim == 4:
        return _batched(args, dout, wanted)
    if 0 in (*lhs.shape, *rhs.shape):
        grads = {name: jnp.zeros_like(array) for name, array in args.arrays().items()}
        if args.existing_out is not None:
            computed = False
            if rhs.shape[0] and lhs.shape[0]:
                computed = plan.make(args, 1).computed[:, None]
            grads["existing_out"] = jnp.where(computed, jnp.zeros((), dout.dtype), dout)
        return grads
    rows = plan.make(args, cfg.block_m)
    computed, grads = rows.computed[:, None], {}
    if "lhs" in wanted:
        dlhs = fwd.multiply(rows, dout, rhs, not args.transpose_rhs, cfg.block_m, lhs.dtype)
        grads["lhs"] = jnp.where(computed, dlhs, jnp.zeros((), lhs.dtype))
    if "rhs" in wanted:
        left, right = (dout, lhs) if args.transpose_rhs else (lhs, dout)
        grads["rhs"] = outer(rows, left, right, rhs.shape[0], cfg.block_m).astype(rhs.dtype)
    if "existing_out" in wanted:
        grads["existing_out"] = jnp.where(computed, jnp.zeros((), dout.dtype), dout)
    return grads


def _batched(args: Any, dout: jax.Array, wanted: frozenset[str]) -> dict[str, jax.Array]:
    lhs, rhs, grads = args.lhs, args.rhs, {}
    if "lhs" in wanted:
        grads["lhs"] = fwd.product(dout, rhs, not args.transpose_rhs, lhs.dtype)
    if "rhs" in wanted:
        left, right = (dout, lhs) if args.transpose_rhs else (lhs, dout)
        grads["rhs"] = _over_rows(left, right).astype(rhs.dtype)
    return grads


def _over_rows(left: jax.Array, right: jax.Array) -> jax.Array:
    common = dtypes.common(left.dtype, right.dtype)
    return multiply("...mi,...mj->...ij", left.astype(common), right.astype(common))


def outer(
    rows: plan.Plan, left: jax.Array, right: jax.Array, num_groups: int, block_m: int
) -> jax.Array:
    """For each group, the sum over its rows of left row times right row; [g, i, j]."""
    m, dtype = left.shape[0], wide(dtypes.common(left.dtype, right.dtype))
    left, right = pad(left, 0, m + block_m), pad(right, 0, m + block_m)
    sums = jnp.zeros((num_groups, left.shape[1], right.shape[1]), dtype)

    def step(i: Any, sums: jax.Array) -> jax.Array:
        mine = (rows.start[i] + jnp.arange(block_m, dtype=jnp.int32) < rows.stop[i])[:, None]
        # both sides: 0 * nan of another group's row would be nan
        x, y = (
            jnp.where(mine, jax.lax.dynamic_slice_in_dim(z, rows.start[i], block_m), 0)
            for z in (left, right)
        )
        at = tuple(jnp.asarray(x, jnp.int32) for x in (rows.group[i], 0, 0))  # under x64 too
        old = jax.lax.dynamic_slice(sums, at, (1, *sums.shape[1:]))
        return jax.lax.dynamic_update_slice(sums, old + _over_rows(x, y)[None], at)

    return loops.fori(0, rows.count, step, loops.vary_like(sums, left))
