"""Launches of the two grouped products."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.callib import Cost, cdiv, next_power_of_2, triton_call
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._blocks import groups
from ejkernel.kernels._triton.grouped_matmul import config, kernels


def groups_of(args: Any) -> groups.Groups:
    """The groups of a call; those of the batched form have one size."""
    if args.lhs.ndim == 4:
        batch, count, m, _ = args.lhs.shape
        return groups.Groups(None, None, batch * count, batch * count, m, 1)
    count = args.group_sizes.shape[0]
    offset = args.group_offset
    return groups.Groups(
        sizes=args.group_sizes,
        offset=None if offset is None else offset.reshape(1),
        num_groups=count,
        num_matrices=args.rhs.shape[0],
        rows=args.lhs.shape[0],
        PADDED=next_power_of_2(count),
    )


def _operands(*arrays: jax.Array) -> tuple[bool, str]:
    """Whether operands become float32 first, and the precision of their product."""
    converted = len({x.dtype for x in arrays}) > 1
    dtype = jnp.float32 if converted else arrays[0].dtype
    return converted, _launch.dot_precision(dtype)


def _most_tiles(rows: groups.Groups, num_rows: int, size: int) -> int:
    """Tiles of rows, of which every group may have one that is cut."""
    if rows.sizes is None:
        return rows.num_matrices * cdiv(rows.rows, size)
    return cdiv(num_rows, size) + rows.num_matrices + 1


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
    (m, inner), columns = lhs.shape, rhs.shape[1 if transpose_rhs else 2]
    converted, precision = _operands(lhs, rhs)
    product = kernels.Product(
        inner=inner // _launch.unit(inner),
        columns=columns // _launch.unit(columns),
        INNER_UNIT=_launch.unit(inner),
        COLUMN_UNIT=_launch.unit(columns),
        TRANSPOSED=transpose_rhs,
        WHOLE_INNER=inner % cfg.block_k == 0,
        WHOLE_COLUMNS=columns % cfg.block_n == 0,
        CONVERTED=converted,
        PRECISION=precision,
        DESCRIBED=cfg.descriptors,
    )
    tiles = _most_tiles(rows, m, cfg.block_m) * cdiv(columns, cfg.block_n)
    made = triton_call(
        kernels.grouped_matmul_kernel,
        inputs={"lhs": lhs, "rhs": rhs, "groups": rows, "product": product, "existing": existing},
        outputs={"out": jax.ShapeDtypeStruct((m, columns), dtype)},
        aliases=None if existing is None else {"out": "existing"},
        grid=(min(cfg.num_programs, tiles),),
        cost=Cost(flops=2 * m * inner * columns),
        **cfg.launch(),
        **_tile(cfg),
    )
    return made["out"]


def outer(
    left: jax.Array, right: jax.Array, rows: groups.Groups, cfg: config.Config, dtype: Any
) -> jax.Array:
    """[g, i, j]: for each matrix the sum over its rows of left row times right row."""
    (m, num_i), num_j, cfg = left.shape, right.shape[1], config.over_rows(cfg)
    converted, precision = _operands(left, right)
    sums = kernels.Sums(
        num_i=num_i // _launch.unit(num_i),
        num_j=num_j // _launch.unit(num_j),
        I_UNIT=_launch.unit(num_i),
        J_UNIT=_launch.unit(num_j),
        WHOLE_I=num_i % cfg.block_m == 0,
        WHOLE_J=num_j % cfg.block_n == 0,
        CONVERTED=converted,
        PRECISION=precision,
        DESCRIBED=cfg.descriptors,
    )
    tiles = rows.num_matrices * cdiv(num_i, cfg.block_m) * cdiv(num_j, cfg.block_n)
    made = triton_call(
        kernels.grouped_matmul_drhs_kernel,
        inputs={"left": left, "right": right, "groups": rows, "sums": sums},
        outputs={"out": jax.ShapeDtypeStruct((rows.num_matrices, num_i, num_j), dtype)},
        grid=(min(cfg.num_programs, tiles),),
        cost=Cost(flops=2 * m * num_i * num_j),
        **cfg.launch(),
        **_tile(cfg),
    )
    return made["out"]


def _tile(cfg: config.Config) -> dict[str, int]:
    return {"BM": cfg.block_m, "BN": cfg.block_n, "BK": cfg.block_k, "BAND": cfg.band}
