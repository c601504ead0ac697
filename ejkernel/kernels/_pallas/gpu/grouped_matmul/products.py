"""Launches of the two grouped products."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.gpu._blocks import launch
from ejkernel.kernels._pallas.gpu.grouped_matmul import config, rows, sums
from ejkernel.kernels._shared import groups
from ejkernel.xla_utils import manual


def multiply(
    lhs: jax.Array,
    rhs: jax.Array,
    group: groups.Groups,
    cfg: config.Config,
    *,
    transpose_rhs: bool,
    dtype: Any,
    existing: jax.Array | None = None,
) -> jax.Array:
    """[m, n]: each row of `lhs` times its group's matrix; other rows from `existing`, or 0.

    `lhs` may be float32.
    """
    (m, inner), columns = lhs.shape, rhs.shape[1 if transpose_rhs else 2]
    given = (lhs, rhs, *group, *(() if existing is None else (existing,)))
    if existing is not None and any(map(manual.varying_axes, given)):
        # JAX allows no refs to arrays that differ over a mesh, which the kernel would update
        options = {"transpose_rhs": transpose_rhs, "dtype": dtype}
        made = multiply(lhs, rhs, group, cfg, **options)
        return jnp.where(group.owned(m)[:, None], made, existing)
    cfg, parts = config.fitted(cfg, columns), _num_parts(lhs)
    kernel = rows.Kernel(cfg, rhs.dtype, jnp.dtype(dtype), parts, inner, columns, transpose_rhs)

    @sequential_vmap
    def run(
        lhs: jax.Array, rhs: jax.Array, start: jax.Array, stop: jax.Array, *existing: jax.Array
    ) -> jax.Array:
        table = rows.tiles(groups.Groups(start, stop), m, cfg.block_m, not existing)
        length, width = _rows(m, cfg.block_m, cfg.rows), _columns(columns, cfg.block_n)
        lhs = _padded(_parts(lhs, rhs.dtype), parts, length, inner)
        size = (rhs.shape[0], width, inner) if transpose_rhs else (rhs.shape[0], inner, width)
        arrays = [lhs, _padded(rhs, *size), *table]
        into = _padded(existing[0], length, width) if existing else None
        return kernel.launch(arrays, (length, width), into)[:m, :columns]

    return run(*given)


def outer(
    left: jax.Array, right: jax.Array, group: groups.Groups, cfg: config.Config, dtype: Any
) -> jax.Array:
    """[g, i, j]: for each group the sum over its rows of left row times right row.

    One of them may be float32; the other has the result's dtype.
    """
    (m, num_i), num_j, count = left.shape, right.shape[1], group.start.shape[0]
    cfg, parts = config.fitted(cfg, num_j, num_i), (_num_parts(left), _num_parts(right))
    kernel = sums.Kernel(cfg, dtype, dtype, parts, num_i, num_j, count)

    @sequential_vmap
    def run(left: jax.Array, right: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
        length = _rows(m, cfg.block_k, cfg.block_k)
        i, j = _columns(num_i, cfg.block_m), _columns(num_j, cfg.block_n)
        factors = [
            _padded(_parts(x, dtype), number, length, width)
            for x, number, width in zip((left, right), parts, (i, j), strict=True)
        ]
        return kernel.launch([*factors, start, stop], (count, i, j))[:, :num_i, :num_j]

    return run(left, right, *group)


def _num_parts(x: jax.Array) -> int:
    return 2 if x.dtype.itemsize == 4 else 1


def _parts(x: jax.Array, dtype: Any) -> jax.Array:
    """[parts, ...]: float32 as the sum of two numbers of half as many bits."""
    if x.dtype == dtype:
        return x[None]
    high = x.astype(dtype)
    rest = jnp.where(jnp.isfinite(high), x - high.astype(x.dtype), 0)
    return jnp.stack([high, rest.astype(dtype)])


# The interpreter takes no part of a tile, which TMA fills with zeros and leaves unwritten.


def _rows(m: int, block: int, least: int) -> int:
    """Rows of an array that TMA copies, from any multiple of eight on."""
    if launch.interpreted():
        return cdiv(m, rows.TILE_ROWS) * rows.TILE_ROWS + block
    return max(cdiv(m, rows.TILE_ROWS) * rows.TILE_ROWS, least)


def _columns(n: int, block: int) -> int:
    return cdiv(n, block) * block if launch.interpreted() else n


def _padded(x: jax.Array, *shape: int) -> jax.Array:
    """Zeros behind an array; usual sizes need none."""
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, size - old) for old, size in zip(x.shape, shape, strict=True)])
