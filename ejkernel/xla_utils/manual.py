"""Arrays inside `shard_map`: over which mesh axes they differ."""

from collections.abc import Sequence
from typing import Any

import jax


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes over which an array differs from device to device."""
    return jax.typeof(x).manual_axis_type.varying


def vary_alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Casts arrays to one common set of manual axes, so that their gradients are summed."""
    axes = frozenset().union(*map(varying_axes, arrays))
    missing = [tuple(sorted(axes - varying_axes(x))) for x in arrays]
    return [
        jax.lax.pcast(x, m, to="varying") if m else x for x, m in zip(arrays, missing, strict=True)
    ]


def type_like(like: Any, shape: Sequence[int], dtype: Any) -> Any:
    """An abstract array of a shape and dtype that differs over the same axes as `like`."""
    mesh = like.sharding.mesh
    if mesh.empty:
        return jax.core.ShapedArray(tuple(shape), dtype)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * len(shape)))
    return jax.core.ShapedArray(
        tuple(shape), dtype, sharding=whole, manual_axis_type=like.manual_axis_type
    )
