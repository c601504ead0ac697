"""`jit` over sharded arrays: how XLA cuts a kernel, which it cannot look into.

The rule comes from the names of an op's axes (`sharding.Layout`). Arrays that are split along batch
or heads stay as they are, and each device runs the kernel on its own part; along other axes arrays
are gathered first. Gradients of what devices share are summed over these devices.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.ops.core.sharding import Axes, Layout, axis_names
from ejkernel.xla_utils import dtypes

# (arrays of one device, first index there by axis) -> results of one device
Body = Callable[[Sequence[jax.Array], dict[str, jax.Array]], Sequence[jax.Array]]
Split = dict[str, tuple[str, ...]]  # mesh axes by the op's axis


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """How the arrays of a kernel may be cut."""

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    shapes: tuple[tuple[int, ...], ...]  # of operands and results
    shardable: frozenset[str]
    aliases: Mapping[str, str]
    units: Mapping[str, int]
    summed: bool  # results are gradients: parts of devices that share one are added up

    @staticmethod
    def of(
        layout: Layout, operands: Sequence[Axes], results: Sequence[Axes], summed: bool
    ) -> "Cut":
        free = layout.shardable.difference(layout.only)  # those are for a shard_map
        found = (tuple(operands), tuple(results), (), free, layout.aliases, layout.units, summed)
        return Cut(*found)

    def mapped(self, has_axis: Sequence[bool]) -> "Cut":
        """With an axis of `vmap` in front, of all results and some operands."""
        name = f"vmap{sum(axis.startswith('vmap') for axis in self.shardable)}"
        operands = tuple(
            (name, *axes) if has else axes
            for axes, has in zip(self.operands, has_axis, strict=True)
        )
        return dataclasses.replace(
            self,
            operands=operands,
            results=tuple((name, *axes) for axes in self.results),
            shardable=self.shardable | {name},
        )

    def main(self, axis: str) -> str | None:
        """The axis that an axis is split like; None of one that stays whole."""
        return self.aliases.get(axis, axis) if axis in self.shardable else None

    def dims(self) -> Iterator[tuple[str, int]]:
        """Axis and size of every dimension of every array."""
        for axes, shape in zip((*self.operands, *self.results), self.shapes, strict=True):
            yield from zip(axes, shape, strict=True)

    def pieces(self, main: str) -> dict[str, int]:
        """Into how many pieces an axis, and each that is split like it, can be cut."""
        sizes: dict[str, int] = {}
        for axis, size in self.dims():
            if self.main(axis) == main:  # an array that broadcasts has one element there
                sizes[axis] = max(sizes.get(axis, 0), size // self.units.get(axis, 1))
        return sizes

    def usable(self, main: str) -> bool:
        """Whether devices may each compute a part of all results."""
        results = zip(self.results, self.shapes[len(self.operands) :], strict=True)
        return self.summed or all(
            0 in shape or any(self.main(axis) == main for axis in axes) for axes, shape in results
        )

    # From the shardings of arrays to a split

    def split(self, mesh: Mesh, specs: Sequence[PartitionSpec]) -> Split:
        """Which mesh axes split which axis; `specs` are those of operands and results."""
        wishes: Split = {}
        for axes, spec in zip((*self.operands, *self.results), specs, strict=True):
            for axis, part in zip(axes, spec, strict=False):
                main, over = self.main(axis), axis_names(part)
                if main is not None and over[: len(known := wishes.get(main, ()))] == known:
                    wishes[main] = over  # the first, or one that splits further
        taken: set[str] = set()
        made: Split = {}
        for main, over in wishes.items():
            over = tuple(itertools.takewhile(lambda name: name not in taken, over))
            while over and not self._fits(mesh, main, over):
                over = over[:-1]
            if over:
                made[main] = over
                taken.update(over)
        return made

    def _fits(self, mesh: Mesh, main: str, over: tuple[str, ...]) -> bool:
        """Whether every array can be cut so, or shared where it has fewer pieces than devices."""
        if not self.usable(main):
            return False
        whole = {main}  # what no two devices may share: they would hold parts of it
        if not self.summed:
            whole.update(axis for axes in self.results for axis in axes)
        cuts = {axis: _cutting(mesh, over, count) for axis, count in self.pieces(main).items()}
        return all(c is not None and (c == over or a not in whole) for a, c in cuts.items())

    def shared(self, mesh: Mesh, split: Split, axes: Axes) -> list[tuple[int, str, int, int]]:
        """Where an array has fewer pieces than devices: (dimension, axis, pieces, pieces here).

        Such as keys of 2 heads on 8 devices that each have their own query heads.
        """
        found = []
        for dim, axis in enumerate(axes):
            over = split.get(self.main(axis) or "", ())
            pieces = self.pieces(self.main(axis) or "").get(axis, 1)
            cuts = _cutting(mesh, over, pieces) or ()
            here = pieces // math.prod(mesh.shape[name] for name in cuts)
            if cuts != over and here > 1:
                found.append((dim, axis, pieces, here))
        return found

    def spec(self, mesh: Mesh, split: Split, axes: Axes, shape: Sequence[int]) -> PartitionSpec:
        """Of one array; an axis of one element is the same everywhere."""
        parts: list[Any] = []
        for axis, size in zip(axes, shape, strict=True):
            main = self.main(axis)
            over = None if main is None or size == 1 else split.get(main)
            parts.append(over and _cutting(mesh, over, size // self.units.get(axis, 1)))
        return PartitionSpec(*(part or None for part in parts))

    def specs(self, mesh: Mesh, split: Split) -> list[PartitionSpec]:
        arrays = zip((*self.operands, *self.results), self.shapes, strict=True)
        return [self.spec(mesh, split, axes, shape) for axes, shape in arrays]

    # For Shardy

    def rule(self, extra: Sequence[int]) -> Any:
        """What XLA may propagate; `extra` are the ranks of operands that follow the others."""
        from jax.experimental.custom_partitioning import (
            ArrayMapping,
            CompoundFactor,
            SdyShardingRule,
        )

        fresh = (f"whole{i}" for i in itertools.count())
        whole: list[str] = []  # Shardy wants them in the order of their first use
        sizes: dict[str, int] = {}
        inferred: set[str] = set()

        def dimension(axis: str | None, size: int) -> Any:
            main = None if axis is None else self.main(axis)
            unit = self.units.get(axis or "", 1)
            factors = {} if main is None or size == 1 else self._factors(main, size // unit)
            if not factors or unit > 1:
                whole.append(next(fresh))
                factors[whole[-1]] = unit
            sizes.update(factors)
            if len(factors) == 1:
                inferred.update(factors)
                return next(iter(factors))
            return CompoundFactor(*factors)

        def mapping(axes: Sequence[str | None], shape: Sequence[int]) -> Any:
            return ArrayMapping(*(dimension(a, n) for a, n in zip(axes, shape, strict=True)))

        count = len(self.operands)
        operands = [mapping(*x) for x in zip(self.operands, self.shapes[:count], strict=True)]
        operands += [mapping([None] * rank, [1] * rank) for rank in extra]
        results = [mapping(*x) for x in zip(self.results, self.shapes[count:], strict=True)]
        told: dict[str, Any] = {n: size for n, size in sizes.items() if n not in inferred}
        return SdyShardingRule(
            tuple(operands), tuple(results), need_replication_factors=tuple(whole), **told
        )

    def _factors(self, main: str, pieces: int) -> dict[str, int]:
        """Sizes by name whose product is `pieces`, the first shared with shorter axes.

        Such as 8 query heads over 2 key heads: the key heads, and the 4 query heads of each.
        """
        found, before = {}, 1
        for size in sorted({n for n in self.pieces(main).values() if n > 1}):
            if size % before:  # nothing that both are made of
                return {}
            found[f"{main}{len(found)}"] = size // before
            before = size
            if size == pieces:
                return found
        return {}


def run(cut: Cut, body: Body, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of `body`, which XLA partitions by the names of axes, also under `vmap`."""

    @jax.custom_batching.custom_vmap
    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return _bind(cut, body, arrays)

    @call.def_vmap
    def _(size: int, has_axis: Sequence[bool], *arrays: jax.Array) -> Any:
        lanes = tuple(0 if has else None for has in has_axis)

        def mapped(arrays: Sequence[jax.Array], offsets: dict[str, jax.Array]) -> Any:
            # the axis has a size of its own on each device
            one = lambda *lane: tuple(body(lane, offsets))
            return jax.vmap(one, in_axes=lanes)(*arrays)

        outs = run(cut.mapped(has_axis), mapped, arrays)
        return tuple(outs), (True,) * len(outs)

    return list(call(*arrays))


def _bind(cut: Cut, body: Body, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    from jax.experimental.custom_partitioning import custom_partitioning

    count = len(arrays)
    # JAX allows no captured constants here: a kernel's tables become operands. A partitioned body
    # makes its own.
    traced = jax.make_jaxpr(lambda *xs: tuple(body(xs, {})))(*arrays)
    shapes = tuple(tuple(x.shape) for x in (*arrays, *traced.out_avals))
    cut = dataclasses.replace(cut, shapes=shapes)

    @custom_partitioning
    def whole(*operands: jax.Array) -> tuple[jax.Array, ...]:
        given, constants = operands[:count], operands[count:]
        closed = ClosedJaxpr(traced.jaxpr, constants)
        return tuple(jaxpr_as_fun(closed)(*given))

    def placed(mesh: Mesh, specs: Sequence[PartitionSpec]) -> tuple[Any, Any]:
        """Shardings of operands and results."""
        made = [NamedSharding(mesh, spec) for spec in specs]
        constants = [NamedSharding(mesh, PartitionSpec())] * len(traced.consts)
        return (*made[:count], *constants), tuple(made[count:])

    def partition(mesh: Mesh, operands: Any, results: Any) -> Any:
        split = cut.split(mesh, [x.sharding.spec for x in (*operands[:count], *results)])
        specs = cut.specs(mesh, split)
        of_operands, of_results = placed(mesh, specs)

        def local(*operands: jax.Array) -> tuple[jax.Array, ...]:
            given = zip(operands[:count], cut.operands, strict=True)
            outs = body(
                [_own(x, cut, mesh, split, axes) for x, axes in given],
                _offsets(cut, mesh, split),
            )
            if cut.summed:
                made = zip(outs, cut.results, specs[count:], strict=True)
                outs = [
                    _sum(_at_home(x, cut, mesh, split, axes), split, spec) for x, axes, spec in made
                ]
            return tuple(outs)

        return mesh, local, of_results, of_operands

    def infer(mesh: Mesh, operands: Any, results: Any) -> Any:
        known = [x.sharding.spec for x in operands[:count]]
        split = cut.split(mesh, [*known, *(PartitionSpec() for _ in cut.results)])
        return placed(mesh, cut.specs(mesh, split))[1]

    whole.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=cut.rule([jnp.ndim(x) for x in traced.consts]),
    )
    return tuple(whole(*arrays, *traced.consts))


def _offsets(cut: Cut, mesh: Mesh, split: Split) -> dict[str, jax.Array]:
    """The first index of a device's part, by axis of the op."""
    offsets = {}
    for main, over in split.items():
        if not main.startswith("vmap"):
            parts = cut.pieces(main)
            size = parts.get(main, max(parts.values()))
            count = math.prod(mesh.shape[name] for name in over)
            offsets[main] = jax.lax.axis_index(over) * (size // count)
    return offsets


def _own(x: jax.Array, cut: Cut, mesh: Mesh, split: Split, axes: Axes) -> jax.Array:
    """Of an array that devices share, the piece that this device needs."""
    for dim, axis, pieces, here in cut.shared(mesh, split, axes):
        if x.shape[dim] > 1:  # and does not broadcast
            size = x.shape[dim] // here
            start = _piece(cut, mesh, split, axis, pieces) % here * size
            x = jax.lax.dynamic_slice_in_dim(x, start, size, dim)
    return x


def _at_home(x: jax.Array, cut: Cut, mesh: Mesh, split: Split, axes: Axes) -> jax.Array:
    """A gradient of a piece as one of the whole; zeros elsewhere."""
    for dim, axis, pieces, here in cut.shared(mesh, split, axes):
        shape = list(x.shape)
        shape[dim] *= here
        start = _piece(cut, mesh, split, axis, pieces) % here * x.shape[dim]
        zeros = jnp.zeros(shape, x.dtype)
        x = jax.lax.dynamic_update_slice_in_dim(zeros, x, start, dim)
    return x


def _piece(cut: Cut, mesh: Mesh, split: Split, axis: str, pieces: int) -> jax.Array:
    """Which piece of a shared array this device needs."""
    over = split[cut.main(axis) or ""]
    count = math.prod(mesh.shape[name] for name in over)
    return jax.lax.axis_index(over) // (count // pieces)


def _cutting(mesh: Mesh, over: tuple[str, ...], pieces: int) -> tuple[str, ...] | None:
    """The first of some mesh axes, as many as cut an array of so many pieces.

    None if devices would need more than one piece, or parts of one.
    """
    count = math.prod(mesh.shape[name] for name in over)
    if not pieces or (count % pieces and pieces % count):
        return None
    cut = 1
    for i, name in enumerate(over):
        cut *= mesh.shape[name]
        if pieces % cut:
            return over[:i]
    return over


def _sum(x: jax.Array, split: Split, spec: PartitionSpec) -> jax.Array:
    """A gradient from the parts that devices with the same piece of its array have."""
    own = {name for part in spec for name in axis_names(part)}
    over = tuple(name for names in split.values() for name in names if name not in own)
    if not over:
        return x
    return jax.lax.psum(x.astype(dtypes.wide(x.dtype)), over).astype(x.dtype)
