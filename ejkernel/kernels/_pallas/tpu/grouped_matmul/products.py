"""The two grouped products on a TPU: rows times their group's matrix, and sums over a group's rows.

Both walk over a table of steps, each a block of rows with one matrix (`_shared/groups.py`). A block
with rows of several groups is visited once for each: the product has all of its rows, and those of
the group are kept.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.tpu._blocks import grid, tiles
from ejkernel.kernels._pallas.tpu.grouped_matmul import config
from ejkernel.kernels._shared import groups
from ejkernel.xla_utils import dtypes

# rows of the table, as `groups.Visits` has them
_GROUP, _BLOCK, _LOW, _HIGH, _FIRST, _LAST = range(6)


class _Steps:
    """The table of steps as kernels and index maps read it."""

    def __init__(self, visits: groups.Visits):
        self.table = visits.table()
        self.count = self.table.shape[1]

    def read(self, table: Any, row: int, step: Any) -> Any:
        return table[row * self.count + step]

    def mine(self, table: Any, step: Any, size: int) -> jax.Array:
        """Rows of a block that belong to the step's group, [size, 1]."""
        row = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        return (row >= self.read(table, _LOW, step)) & (row < self.read(table, _HIGH, step))

    def has_rows(self, table: Any, step: Any) -> Any:
        return self.read(table, _LOW, step) < self.read(table, _HIGH, step)

    def flag(self, table: Any, row: int, step: Any) -> Any:
        return self.read(table, row, step) != 0


def multiply(
    lhs: jax.Array,
    rhs: jax.Array,
    rows: groups.Groups,
    cfg: config.Config,
    *,
    transpose_rhs: bool,
    dtype: Any,
    existing: jax.Array | None = None,
) -> jax.Array:
    """[m, n]: each row of `lhs` times its group's matrix; other rows from `existing`, or 0."""
    (m, k), n = lhs.shape, rhs.shape[1 if transpose_rhs else 2]
    bm, bk, bn = config.fitting(cfg, m, k, n)
    steps = _Steps(groups.by_block(rows, m, bm))
    num_k, common = cdiv(k, bk), dtypes.common(lhs.dtype, rhs.dtype)
    operands = grid.Operands(optional=("existing",))
    operands.add(
        "lhs",
        _whole(lhs, bm, bk),
        pl.BlockSpec((bm, bk), lambda j, v, i, table: (steps.read(table, _BLOCK, v), i)),
    )
    if transpose_rhs:
        shape, index = (None, bn, bk), lambda j, v, i, table: (steps.read(table, _GROUP, v), j, i)
        operands.add("rhs", _whole(rhs, 1, bn, bk), pl.BlockSpec(shape, index))
    else:
        shape, index = (None, bk, bn), lambda j, v, i, table: (steps.read(table, _GROUP, v), i, j)
        operands.add("rhs", _whole(rhs, 1, bk, bn), pl.BlockSpec(shape, index))
    out = pl.BlockSpec((bm, bn), lambda j, v, i, table: (steps.read(table, _BLOCK, v), j))
    if existing is not None:
        operands.add("existing", _whole(existing, bm, bn), out)

    def body(refs: Any) -> None:
        step, i = pl.program_id(1), pl.program_id(2)

        @pl.when(steps.has_rows(refs.table, step))
        def _() -> None:
            x, y = refs.lhs[...].astype(common), refs.rhs[...].astype(common)
            before = jnp.where(i == 0, 0.0, refs.acc[...])  # cheaper than a branch that writes 0
            refs.acc[...] = before + tiles.product(x, y, transpose=transpose_rhs)  # [bm, bn]

        @pl.when(i == num_k - 1)
        def _() -> None:
            # what earlier steps of the same block wrote is still there
            rest = jnp.zeros_like(refs.out) if existing is None else refs.existing[...]
            rest = jnp.where(steps.flag(refs.table, _FIRST, step), rest, refs.out[...])
            mine = steps.mine(refs.table, step, bm)
            refs.out[...] = jnp.where(mine, refs.acc[...].astype(dtype), rest)

    made = operands.run(
        "grouped_matmul_kernel",
        body,
        steps.table,
        {"out": (jax.ShapeDtypeStruct((cdiv(m, bm) * bm, cdiv(n, bn) * bn), dtype), out)},
        {"acc": pltpu.VMEM((bm, bn), jnp.float32)},
        grid=(cdiv(n, bn), steps.count, num_k),
        sequential=2,
        checked=False,
        vmem_limit=config.vmem_limit((bm, bk, bn), (lhs.dtype, rhs.dtype, dtype)),
    )
    return made[0][:m, :n]


def outer(
    left: jax.Array, right: jax.Array, rows: groups.Groups, cfg: config.Config, dtype: Any
) -> jax.Array:
    """[g, i, j]: for each group the sum over its rows of left row times right row."""
    (m, num_i), num_j, count = left.shape, right.shape[1], rows.start.shape[0]
    bm, bi, bj = config.fitting(cfg, m, num_i, num_j)
    steps = _Steps(groups.by_group(rows, m, bm))
    common = dtypes.common(left.dtype, right.dtype)
    operands = grid.Operands()
    for name, array, size, axis in (("left", left, bi, 0), ("right", right, bj, 1)):
        index = lambda i, j, v, table, axis=axis: (steps.read(table, _BLOCK, v), (i, j)[axis])
        operands.add(name, _whole(array, bm, size), pl.BlockSpec((bm, size), index))
    index = lambda i, j, v, table: (steps.read(table, _GROUP, v), i, j)

    def body(refs: Any) -> None:
        step = pl.program_id(2)

        @pl.when(steps.has_rows(refs.table, step))
        def _() -> None:
            mine = steps.mine(refs.table, step, bm)
            # both sides: 0 * nan of another group's row would be nan; in float32, as v5e has no
            # select of bfloat16
            x, y = (
                jnp.where(mine, ref[...].astype(jnp.float32), 0.0).astype(common)
                for ref in (refs.left, refs.right)
            )
            before = jnp.where(steps.flag(refs.table, _FIRST, step), 0.0, refs.acc[...])
            refs.acc[...] = before + tiles.product(x.T, y)  # [bi, bj]

        @pl.when(steps.flag(refs.table, _LAST, step))
        def _() -> None:
            some = steps.has_rows(refs.table, step)  # of an empty group nothing was summed
            refs.out[...] = jnp.where(some, refs.acc[...], 0.0).astype(dtype)

    shape = (count, cdiv(num_i, bi) * bi, cdiv(num_j, bj) * bj)
    made = operands.run(
        "grouped_matmul_drhs_kernel",
        body,
        steps.table,
        {"out": (jax.ShapeDtypeStruct(shape, dtype), pl.BlockSpec((None, bi, bj), index))},
        {"acc": pltpu.VMEM((bi, bj), jnp.float32)},
        grid=(cdiv(num_i, bi), cdiv(num_j, bj), steps.count),
        sequential=1,
        checked=False,
        vmem_limit=config.vmem_limit((bi, bm, bj), (left.dtype, right.dtype, dtype)),
    )
    return made[0][:, :num_i, :num_j]


def _whole(x: jax.Array, *sizes: int) -> jax.Array:
    """The array padded to whole blocks; a matrix of usual sizes is not copied."""
    for axis, size in enumerate(sizes):
        x = grid.pad_to(x, axis, cdiv(x.shape[axis], size) * size)
    return x
