"""Mean pooling forward on a TPU: sums of blocks of tokens in float32, divided at a row's end."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu._blocks import grid
from ejkernel.kernels._pallas.tpu.mean_pooling import config, layout


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array], tuple[()]]:
    """The means; there are no residuals."""
    return (_rows(args, cfg) if args.cu_seqlens is None else _runs(args, cfg),), ()


def _rows(args: Any, cfg: config.Config) -> jax.Array:
    of = layout.Rows(args, cfg)
    operands = grid.Operands(optional=("mask",))
    operands.add("x", of.inputs(), of.token_spec())
    of.add_mask(operands)

    def body(refs: Any) -> None:
        program = pl.program_id(0)  # JAX's plain interpreter knows no number inside `when`

        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            refs.acc[...] = jnp.zeros_like(refs.acc)

        for row in range(of.rows):
            x = refs.x[row].astype(jnp.float32)  # [bt, …]
            if args.mask is not None:  # not a product with it: 0 * nan is nan
                x = jnp.where(of.kept(refs, row), x, 0.0)
            refs.acc[row] += of.features.total(x)

        @pl.when(pl.program_id(2) == of.grid[2] - 1)
        def _() -> None:
            for row in range(of.rows):
                mean = refs.acc[row] / of.divisor(refs.table, program, row)
                refs.out[row] = mean.astype(refs.out.dtype)

    shape = jax.ShapeDtypeStruct(of.features.row_shape(of.count), args.inputs.dtype)
    (out,) = operands.run(
        "mean_pooling_kernel",
        body,
        of.counts(),
        {"out": (shape, of.row_spec())},
        {"acc": pltpu.VMEM((of.rows, *of.features.row), jnp.float32)},
        of.grid,
        sequential=1,
        vmem_limit=of.vmem_limit,
    )
    return of.features.unpadded(out).reshape(of.shape())


def _runs(args: Any, cfg: config.Config) -> jax.Array:
    of = layout.Runs(args, cfg, by_block=False)
    operands = grid.Operands()
    operands.add("x", of.inputs(), of.token_spec())

    def body(refs: Any) -> None:
        visit = pl.program_id(1)  # as above

        @pl.when(of.is_first(refs.table))
        def _() -> None:
            refs.acc[...] = jnp.zeros_like(refs.acc)

        x = jnp.where(of.mine(refs.table), refs.x[...].astype(jnp.float32), 0.0)  # [bt, …]
        refs.acc[...] += of.features.total(x)

        @pl.when(of.is_last(refs.table))
        def _() -> None:
            mean = refs.acc[...] / of.divisor(refs.table, visit)
            refs.out[...] = mean.astype(refs.out.dtype)

    shape = jax.ShapeDtypeStruct(of.features.row_shape(of.count), args.inputs.dtype)
    (out,) = operands.run(
        "mean_pooling_packed_kernel",
        body,
        of.table,
        {"out": (shape, of.row_spec())},
        {"acc": pltpu.VMEM(of.features.row, jnp.float32)},
        of.grid,
        sequential=1,
        vmem_limit=of.vmem_limit,
    )
    return of.features.unpadded(out).reshape(of.shape())
