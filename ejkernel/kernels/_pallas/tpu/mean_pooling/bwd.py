"""Mean pooling backward on a TPU: each token that counts gets its share of its row's cotangent."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels._pallas.tpu._blocks import grid
from ejkernel.kernels._pallas.tpu.mean_pooling import config, layout


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[()],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """The gradient of `inputs`."""
    made = (_rows if args.cu_seqlens is None else _runs)(args, cfg, cotangents[0])
    return {"inputs": made.reshape(args.inputs.shape)}


def _rows(args: Any, cfg: config.Config, dout: jax.Array) -> jax.Array:
    of = layout.Rows(args, cfg)
    operands = grid.Operands(optional=("mask",))
    dout = of.features.rows(dout.reshape(of.count, *of.features.rest))
    operands.add("dout", dout, of.row_spec())
    of.add_mask(operands)

    def body(refs: Any) -> None:
        for row in range(of.rows):
            share = refs.dout[row].astype(jnp.float32) / of.divisor(
                refs.table, pl.program_id(0), row
            )
            dx = of.features.spread(share, of.bt)  # [bt, …]
            if args.mask is not None:
                dx = jnp.where(of.kept(refs, row), dx, 0.0)
            refs.dx[row] = dx.astype(refs.dx.dtype)

    shape = jax.ShapeDtypeStruct((of.count, of.padded, *of.features.padded), args.inputs.dtype)
    (dx,) = operands.run(
        "mean_pooling_bwd_kernel",
        body,
        of.counts(),
        {"dx": (shape, of.token_spec())},
        {},
        of.grid,
        sequential=0,
        vmem_limit=of.vmem_limit,
    )
    dx = of.features.unpadded(dx)[:, : of.length]
    return dx.reshape(of.batch, -1, *dx.shape[2:])[:, : of.t]


def _runs(args: Any, cfg: config.Config, dout: jax.Array) -> jax.Array:
    of = layout.Runs(args, cfg, by_block=True)
    operands = grid.Operands()
    dout = of.features.rows(dout.reshape(of.count, *of.features.rest))
    operands.add("dout", dout, of.row_spec())

    def body(refs: Any) -> None:
        share = refs.dout[...].astype(jnp.float32) / of.divisor(refs.table, pl.program_id(1))
        # what earlier visits of the same block wrote is still there
        rest = jnp.where(of.is_first(refs.table), 0.0, refs.dx[...].astype(jnp.float32))
        dx = jnp.where(of.mine(refs.table), of.features.spread(share, of.bt), rest)
        refs.dx[...] = dx.astype(refs.dx.dtype)

    shape = jax.ShapeDtypeStruct((of.padded, *of.features.padded), args.inputs.dtype)
    (dx,) = operands.run(
        "mean_pooling_packed_bwd_kernel",
        body,
        of.table,
        {"dx": (shape, of.token_spec())},
        {},
        of.grid,
        sequential=1,
        vmem_limit=of.vmem_limit,
    )
    return of.features.unpadded(dx)[: of.t]
