"""The one `shard_map`: a call's `mesh`, `in_specs`, `out_specs`, or the shardings of its types."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from ejkernel.ops.core.kernel import Kernel, Request
from ejkernel.ops.core.types import AbstractArgs

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names of the axes of an op's arrays, and which of them may be split over devices."""

    arrays: dict[str, Axes]  # in the order of the public function
    outputs: tuple[Axes, ...]
    shardable: frozenset[str]
    aliases: dict[str, str]  # axes split alike, such as key heads with query heads
    # (local arguments, offsets of the local block by axis) -> arguments that mean the same locally
    localize: Callable[[Any, dict[str, jax.Array]], Any]
    instead: str  # what to use to split another axis
    # axes that no other mesh axes may split, such as tokens by the ring they travel on
    only: Mapping[str, Axes] = dataclasses.field(default_factory=dict)
    batch: str = "b"  # the axes that a mesh without specs splits
    heads: str = "h"
    # elements of an axis that stay together, such as a head's keys and values
    units: Mapping[str, int] = dataclasses.field(default_factory=dict)


def apply(
    kernel: Kernel, run: Callable[[Any], Any], args: AbstractArgs, request: Request
) -> tuple[jax.Array, ...]:
    """Runs `run(args)`, inside a shard_map if the call is split over devices."""
    given, mesh, out_specs = request.in_specs, request.mesh, request.out_specs
    if mesh is None:
        mesh, given = _from_types(args)
        if mesh is None:
            return run(args)
    layout = kernel.layout(args)
    if layout is None:
        if request.mesh is not None:
            raise ValueError(f"`{kernel.name}`: nobody says which axes of its arrays may be split.")
        return run(args)
    if given is None:
        split = _spread(kernel.name, layout, args, mesh)
    else:
        split = _split_axes(kernel.name, layout, args, mesh, _by_name(kernel.name, layout, given))
    _check_sizes(kernel.name, layout, args, mesh, split)
    specs = {
        name: _spec(array.shape, layout.arrays[name], layout, split)
        for name, array in args.arrays().items()
    }
    results = tuple(
        PartitionSpec(*(split.get(layout.aliases.get(a, a)) for a in axes))
        for axes in layout.outputs
    )
    if out_specs is not None:
        _check_out_specs(kernel.name, out_specs, results)
    names = list(specs)

    def body(*local):
        here = args.with_arrays(dict(zip(names, local, strict=True)))
        offsets = {
            axis: jax.lax.axis_index(over) * _local_size(axis, here, layout)
            for axis, over in split.items()
        }
        return run(layout.localize(here, offsets))

    arrays = [_reshard(x, mesh, specs[name]) for name, x in args.arrays().items()]
    mapped = jax.shard_map(
        body, mesh=_usable(mesh), in_specs=tuple(specs.values()), out_specs=results
    )
    return mapped(*arrays)


def _from_types(args: AbstractArgs) -> tuple[Any, dict[str, PartitionSpec] | None]:
    """Mesh and specs of arguments whose types say how they are split (Explicit mesh axes)."""
    specs, mesh = {}, None
    for name, array in args.arrays().items():
        sharding = jax.typeof(array).sharding
        spec = sharding.spec
        explicit = set(sharding.mesh.explicit_axes)
        if any(set(axis_names(part)) & explicit for part in spec):
            specs[name], mesh = spec, sharding.mesh
    return mesh, specs


def axis_names(part: Any) -> tuple[str, ...]:
    """The mesh axes of one part of a PartitionSpec."""
    if part is None or part is PartitionSpec.UNCONSTRAINED:
        return ()
    return part if isinstance(part, tuple) else (part,)


def _by_name(op: str, layout: Layout, given: Any) -> dict[str, PartitionSpec]:
    names = list(layout.arrays)
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in layout.arrays]:
            raise ValueError(f"`{op}`: `in_specs` names {unknown}; array arguments are {names}.")
        return {name: spec for name, spec in given.items() if spec is not None}
    if isinstance(given, PartitionSpec) or not isinstance(given, tuple | list):
        raise TypeError(
            f"`{op}`: `in_specs` must be a tuple of PartitionSpecs for {names[:3]}… in order, or a "
            f"mapping by name; got {given!r}."
        )
    if len(given) > len(names):
        raise ValueError(f"`{op}`: `in_specs` has {len(given)} entries for {len(names)} arrays.")
    return {name: spec for name, spec in zip(names, given, strict=False) if spec is not None}


def _split_axes(
    op: str, layout: Layout, args: AbstractArgs, mesh: Mesh, given: dict[str, PartitionSpec]
) -> dict[str, tuple[str, ...]]:
    """Which mesh axes split which axis of the op, from the specs that were given."""
    split: dict[str, tuple[str, ...]] = {}
    arrays = args.arrays()
    for name, spec in given.items():
        if name not in arrays:
            raise ValueError(f"`{op}`: `in_specs` has a spec for `{name}`, which is None.")
        if len(spec) > len(layout.arrays[name]):
            raise ValueError(f"`{op}`: the spec of `{name}`, {spec}, is longer than its rank.")
        for axis, part in zip(layout.arrays[name], spec, strict=False):
            if over := axis_names(part):
                _check_axis(op, layout, mesh, name, axis, over)
                axis = layout.aliases.get(axis, axis)
                if split.setdefault(axis, over) != over:
                    raise ValueError(
                        f"`{op}`: axis {axis!r} is split over {split[axis]} and, for `{name}`, "
                        f"over {over}."
                    )
    return split


def _spread(op: str, layout: Layout, args: AbstractArgs, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Which mesh axes split which axis of the op when no specs are given.

    Axes that only certain mesh axes may split get those. The first of the other mesh axes splits
    the batch, or the heads if its size does not divide the batch. Each further one splits the
    heads, or the batch. Over a mesh axis that divides neither, all arrays are replicated.
    """
    split: dict[str, tuple[str, ...]] = {}
    for axis, over in layout.only.items():
        if unknown := [mesh_axis for mesh_axis in over if mesh_axis not in mesh.shape]:
            raise ValueError(
                f"`{op}`: the call splits axis {axis!r} over {unknown}; the mesh has "
                f"{tuple(mesh.shape)}."
            )
        split[layout.aliases.get(axis, axis)] = over
    room = {
        axis: min(sizes.values())
        for axis in (layout.batch, layout.heads)
        if axis in layout.shardable and (sizes := _pieces(axis, layout, args))
    }
    if not room:
        out = f"Pass `in_specs` and `out_specs` to split {sorted(layout.shardable)}."
        raise ValueError(
            f"`{op}`: a `mesh` alone splits batch and heads, and this call has neither. "
            + (out if layout.shardable else "None of its axes can be split.")
        )
    taken = {mesh_axis for over in split.values() for mesh_axis in over}
    free = [mesh_axis for mesh_axis in mesh.shape if mesh_axis not in taken]
    for place, mesh_axis in enumerate(free):
        size = mesh.shape[mesh_axis]
        order = (layout.heads, layout.batch) if place else (layout.batch, layout.heads)
        for axis in order:
            if size > 1 and room.get(axis, 0) and room[axis] % size == 0:
                room[axis] //= size
                split[axis] = (*split.get(axis, ()), mesh_axis)
                break
    return split


def _pieces(axis: str, layout: Layout, args: AbstractArgs) -> dict[str, int]:
    """Into how many pieces an axis, and each that is split like it, can be cut."""
    sizes: dict[str, int] = {}
    for name, array in args.arrays().items():
        for own, size in zip(layout.arrays[name], array.shape, strict=True):
            if layout.aliases.get(own, own) == axis:
                # an array that broadcasts has one element there
                sizes[own] = max(sizes.get(own, 0), size // layout.units.get(own, 1))
    return sizes


def _check_sizes(
    op: str,
    layout: Layout,
    args: AbstractArgs,
    mesh: Mesh,
    split: dict[str, tuple[str, ...]],
) -> None:
    for name, array in args.arrays().items():
        for axis, size in zip(layout.arrays[name], array.shape, strict=True):
            over = split.get(layout.aliases.get(axis, axis), ())
            count = math.prod(mesh.shape[mesh_axis] for mesh_axis in over)
            if size > 1 and size % count:
                raise ValueError(
                    f"`{op}`: {count} devices do not divide the {size} elements of axis {axis!r} "
                    f"of `{name}`."
                )


def _check_axis(
    op: str, layout: Layout, mesh: Mesh, name: str, axis: str, over: tuple[str, ...]
) -> None:
    if axis not in layout.shardable:
        raise ValueError(
            f"`{op}`: `in_specs` splits axis {axis!r} of `{name}` over {over}, but the op reduces "
            f"over it or needs it whole; {layout.instead}."
        )
    if unknown := [mesh_axis for mesh_axis in over if mesh_axis not in mesh.shape]:
        raise ValueError(
            f"`{op}`: the spec of `{name}` names mesh axes {unknown}; the mesh has "
            f"{tuple(mesh.shape)}."
        )
    if over != (allowed := layout.only.get(axis, over)):
        raise ValueError(
            f"`{op}`: the spec of `{name}` splits axis {axis!r} over {over}; only {allowed} may "
            "split it."
        )


def _spec(
    shape: tuple[int, ...], axes: Axes, layout: Layout, split: dict[str, tuple[str, ...]]
) -> PartitionSpec:
    """A derived spec: like the op's axes; an axis of one element is the same everywhere."""
    parts = []
    for axis, size in zip(axes, shape, strict=True):
        over = split.get(layout.aliases.get(axis, axis)) if axis in layout.shardable else None
        parts.append(over if size > 1 else None)
    return PartitionSpec(*parts)


def _local_size(axis: str, args: AbstractArgs, layout: Layout) -> int:
    """Elements of an axis here; no array may have it, only axes that are split like it."""
    sizes: dict[str, int] = {}
    for name, array in args.arrays().items():
        for other, size in zip(layout.arrays[name], array.shape, strict=True):
            if layout.aliases.get(other, other) == axis:
                sizes[other] = max(size, sizes.get(other, 0))
    return sizes[axis] if axis in sizes else max(sizes.values())


def _check_out_specs(op: str, given: Any, expected: tuple[PartitionSpec, ...]) -> None:
    listed = (given,) if isinstance(given, PartitionSpec) else tuple(given)

    def normal(spec: PartitionSpec) -> list[tuple[str, ...]]:
        parts = [axis_names(part) for part in spec]
        while parts and not parts[-1]:
            parts.pop()
        return parts

    if [normal(s) for s in listed] != [normal(s) for s in expected]:
        wanted = expected if len(expected) != 1 else next(iter(expected))
        raise ValueError(
            f"`{op}`: `out_specs` must be {wanted}, which follows from `in_specs`; got {given}."
        )


def _usable(mesh: Any) -> Any:
    """The mesh for `shard_map`: a concrete one with automatic axes unless types carry it."""
    current = jax.sharding.get_abstract_mesh()
    if not current.empty and current.axis_names == mesh.axis_names:
        return current
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    return mesh


def _reshard(array: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    current = jax.sharding.get_abstract_mesh()
    if current.empty or not current.explicit_axes:
        return array
    return jax.sharding.reshard(array, spec)
