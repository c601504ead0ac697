"""A TPU kernel with named operands on a grid whose last axes run in order.

Every kernel has one table of int32 that is there before its blocks are fetched, in scalar memory:
block bounds, page ids or group offsets, from which index maps and loops take what they need.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.callib import _pallas
from ejkernel.errors import UnsupportedError
from ejkernel.kernels._pallas.tpu._blocks import capacity

Refs = types.SimpleNamespace  # `table`, and every operand, result and buffer by name
_ENDED = object()


class Operands:
    """Arrays of a kernel by name, each with its block spec; those left out are None in `refs`."""

    def __init__(self, optional: Sequence[str] = ()):
        self._optional = tuple(optional)
        self._names: list[str] = []
        self._arrays: list[jax.Array] = []
        self._specs: list[Any] = []

    def add(self, name: str, array: jax.Array, spec: Any) -> None:
        self._names.append(name)
        self._arrays.append(array)
        self._specs.append(spec)

    def add_scalars(self, name: str, array: jax.Array) -> None:
        """A small array, whole in scalar memory."""
        self.add(name, array, pl.BlockSpec(memory_space=pltpu.SMEM))

    def add_whole(self, name: str, array: jax.Array) -> None:
        """An array that stays in HBM, for a kernel that copies parts of it itself."""
        self.add(name, _pallas.in_hbm(array), pl.BlockSpec(memory_space=pltpu.HBM))

    def run(
        self,
        name: str,
        body: Callable[[Refs], None],
        table: jax.Array,
        out: dict[str, tuple[Any, Any]],
        scratch: dict[str, Any],
        grid: tuple[int, ...],
        sequential: int,
        vmem_limit: int | None = None,
        checked: bool = True,
        aliases: dict[str, str] | None = None,
    ) -> list[jax.Array]:
        """Results of `body(refs)`.

        Args:
          name: The kernel's name in a program.
          body: Called with refs by name, once for each place in the grid.
          table: int32, flattened.
          out: Shapes and block specs of the results by name.
          scratch: Buffers and semaphores by name.
          grid: Sizes of the grid.
          sequential: How many of its last axes must run in order.
          vmem_limit: Bytes of VMEM that the kernel may use. Default: the compiler's.
          checked: Whether a compiled kernel checks the addresses of its copies, two thirds of what
            starting one costs. Only a kernel whose indices were made in the program goes without.
          aliases: Results that share the memory of an operand: its name, by theirs.
        """
        self._check_tables(name, table)
        names = [*self._names, *out, *scratch]

        def kernel(table: Any, *refs: Any) -> None:
            found = dict.fromkeys(self._optional) | dict(zip(names, refs, strict=True))
            body(Refs(table=table, **found))

        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=self._specs,
            out_specs=[spec for _, spec in out.values()],
            scratch_shapes=list(scratch.values()),
        )
        call = _pallas.tpu_call(
            kernel,
            grid_spec=spec,
            out_shape=[shape for shape, _ in out.values()],
            name=name,
            sequential=sequential,
            vmem_limit=vmem_limit,
            checked=checked,
            # the table is the first array
            aliases={
                1 + self._names.index(operand): list(out).index(result)
                for result, operand in (aliases or {}).items()
            },
        )
        return call(table.reshape(-1), *self._arrays)

    def _check_tables(self, name: str, table: jax.Array) -> None:
        """Entries refuse such calls; this is about sizes of blocks that a caller insists on."""
        numbers = table.size
        for array, spec in zip(self._arrays, self._specs, strict=True):
            if spec.memory_space == pltpu.SMEM:  # whole, or two buffers of a block
                block = spec.block_shape
                numbers += 2 * math.prod(n or 1 for n in block) if block else array.size
        if (why := capacity.smem_refusal(numbers)) is not None:
            raise UnsupportedError(f"`{name}`: {why}. Larger blocks make smaller tables.")


def is_first(grid: tuple[int, ...], sequential: int) -> Any:
    """Whether the axes that run in order are at their beginning."""
    return _at(grid, sequential, lambda size: 0)


def is_last(grid: tuple[int, ...], sequential: int) -> Any:
    """Whether the axes that run in order are at their end."""
    return _at(grid, sequential, lambda size: size - 1)


def _at(grid: tuple[int, ...], sequential: int, index: Callable[[int], int]) -> Any:
    axes = range(len(grid) - sequential, len(grid))
    at = [pl.program_id(i) == index(grid[i]) for i in axes if grid[i] > 1]
    return functools.reduce(jnp.logical_and, at) if at else True


@dataclasses.dataclass(frozen=True)
class Chain:
    """How the steps of a program follow those of the one before it, in the same buffers."""

    before: Any  # steps of all programs before it
    started: Any  # whether the one before it has started the copies of its first step
    start_next: Callable[[Any], None]  # starts those of the next program, into a slot


def stream(
    count: Any,
    copies: Callable[[Any, Any], Sequence[Any]],
    visit: Callable[[Any, Any], None],
    chain: Chain | None = None,
) -> None:
    """Runs `visit(j, slot)` for j < count while the copies for j + 1 are under way.

    `copies(j, slot)` makes, and does not start, the copies of block j into one of two buffers
    (`pltpu.make_async_copy`, each with a semaphore of its slot); it is called once to start them
    and once more to wait for them. `count` may be known on the device only. With a chain, the next
    program's first copies are under way while the last block is visited; programs without steps
    are no part of it.
    """
    before = jnp.int32(0) if chain is None else chain.before

    def start(j: Any, slot: Any) -> None:
        for copy in copies(j, slot):
            copy.start()

    own = count > 0 if chain is None else (count > 0) & (chain.started == 0)
    pl.when(own)(lambda: start(jnp.int32(0), jax.lax.rem(before, jnp.int32(2))))

    def step(j: Any, carry: Any) -> Any:
        slot = jax.lax.rem(before + j, jnp.int32(2))
        pl.when(j + 1 < count)(lambda: start(j + 1, 1 - slot))
        if chain is not None:
            pl.when(j + 1 == count)(lambda: chain.start_next(1 - slot))
        for copy in copies(j, slot):
            copy.wait()
        visit(j, slot)
        return carry

    jax.lax.fori_loop(jnp.int32(0), jnp.asarray(count, jnp.int32), step, jnp.int32(0))


def overlap(stages: list[Iterator[None]]) -> None:
    """Runs iterators to their ends, each one stage behind the one before it.

    The compiler keeps the order in which it sees operations; neighbours of independent work fill
    units that one piece of work alone would leave idle.
    """
    running: list[Iterator[None]] = []
    while stages or running:
        running = stages[:1] + running
        stages = stages[1:]
        running = [x for x in running if next(x, _ENDED) is None]


def pad_to(x: jax.Array, axis: int, length: int, fill: float = 0.0) -> jax.Array:
    """The array with zeros, or another number, behind it along an axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths, constant_values=jnp.asarray(fill, x.dtype))
