"""One launch of a Triton kernel: its description, and what a GPU is given for it."""

import dataclasses
import functools
import linecache
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel.callib import _triton_arguments as arguments
from ejkernel.callib import _triton_check
from ejkernel.callib._triton_arguments import Array, Bundle, Exact, Output
from ejkernel.callib._triton_compile import Signature

MOST_PROGRAMS = _triton_check.MOST_PROGRAMS[1]  # beside the first axis of a grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What one launch computes and moves, for reports; None where nobody counted."""

    flops: int | None = None
    bytes_accessed: int | None = None


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch without its arrays; hashable, so that it can be a parameter of a primitive."""

    kernel: Any
    parameters: tuple[Any, ...]  # a tree for each of the kernel's parameters, in its order
    grid: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    out: tuple[tuple[tuple[int, ...], str], ...]  # shapes and dtypes
    zeroed: frozenset[int]  # outputs
    aliases: tuple[tuple[int, int], ...]  # array, output
    cost: Cost | None = None
    # of vmap: its size, and which arrays have the axis
    batch: tuple[int, tuple[bool, ...]] | None = None

    def results(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes, with the batch axis, and dtypes of the outputs."""
        lead = () if self.batch is None else (self.batch[0],)
        return [((*lead, *shape), jnp.dtype(dtype)) for shape, dtype in self.out]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What a GPU gets: a kernel, its grid, and its parameters in order."""

    kernel: Any
    grid: tuple[int, ...]  # three
    signature: Signature
    parameters: list[Any]  # ints, and (bytes to set to zero,) for arrays


def plan(launch: Launch, avals: Sequence[Any]) -> Plan:
    results, aliased = launch.results(), {out for _, out in launch.aliases}
    kernel, grid, trees = launch.kernel, launch.grid, launch.parameters
    if launch.batch is not None:
        kernel, grid, extra = _over_batch(launch, avals)
        trees = (*trees, *extra)

    def kind(leaf: Any) -> Any:
        if isinstance(leaf, Array):
            return avals[leaf.index].dtype
        return results[leaf.index][1] if isinstance(leaf, Output) else leaf

    def passed(leaf: Any) -> Any:
        if isinstance(leaf, int):
            return leaf
        if isinstance(leaf, Array) or leaf.index not in launch.zeroed - aliased:
            return (0,)
        shape, dtype = results[leaf.index]
        return (math.prod(shape) * dtype.itemsize,)

    parameters = [
        passed(leaf)
        for path, leaf in arguments.all_leaves(kernel.arg_names, trees)
        if not (leaf is None or isinstance(leaf, Exact) or arguments.folded(kernel, path, leaf))
    ]
    signature = Signature(tuple(arguments.replaced(tree, kind) for tree in trees))
    return Plan(kernel, (*grid, *(1,) * (3 - len(grid))), signature, parameters)


def _over_batch(launch: Launch, avals: Sequence[Any]) -> tuple[Any, tuple[int, ...], list[int]]:
    """The kernel of a batched launch, its grid, and what it takes besides: size and strides."""
    assert launch.batch is not None
    size, flags = launch.batch
    results = launch.results()
    has_axis = lambda leaf: (
        isinstance(leaf, Output) or (isinstance(leaf, Array) and flags[leaf.index])
    )
    strides = [
        math.prod((results[x.index][0] if isinstance(x, Output) else avals[x.index].shape)[1:])
        for _, x in arguments.all_leaves(launch.kernel.arg_names, launch.parameters)
        if has_axis(x)
    ]
    axis = len(launch.grid)
    strided = tuple(arguments.replaced(tree, has_axis) for tree in launch.parameters)
    kernel = _batched_kernel(launch.kernel, strided, axis)
    extra = (size,)
    if axis == 1 and size > MOST_PROGRAMS:
        extra = (MOST_PROGRAMS, -(-size // MOST_PROGRAMS))
    return kernel, (*launch.grid, *extra), [size, *strides]


@functools.lru_cache(maxsize=256)
def _batched_kernel(kernel: Any, strided: tuple[Any, ...], axis: int) -> Any:
    """The kernel with its arrays moved along by the batch index; a free grid axis holds that.

    `strided` is a tree for each parameter, with True for arrays that have the batch axis. The
    parameters are the kernel's own, then the batch size and a stride for each of these arrays.
    """
    import triton

    names = kernel.arg_names
    index, size, callee, tl = (_unused(n, names) for n in ("index", "size", "kernel", "tl"))
    scope: dict[str, Any] = {callee: kernel, tl: triton.language, "__name__": __name__}
    strides = []

    def moved(tree: Any, text: str) -> str:
        if isinstance(tree, Bundle):
            if not any(leaf for _, leaf in arguments.leaves(tree, ())):
                return text
            members = zip(tree.kind._fields, tree.members, strict=True)
            values = ", ".join([moved(member, f"{text}.{field}") for field, member in members])
            scope[kind := _unused(f"kind_{len(scope)}", names)] = tree.kind
            return f"{kind}({values})"
        if not tree:
            return text
        strides.append(_unused(f"stride_{text.replace('.', '_')}", names))
        return f"{text} + {index} * {strides[-1]}"

    values = ", ".join([moved(tree, name) for name, tree in zip(names, strided, strict=True)])
    first = f"{tl}.program_id({axis})"
    if axis == 1:  # two free axes: more programs than one of them may have
        first += f" + {tl}.program_id(2) * {tl}.num_programs(1)"
    fixed = _triton_check.constant_parameters(kernel)
    own = [f"{n}: {tl}.constexpr" if n in fixed else n for n in names]
    name = _unused(f"{kernel.fn.__name__}_batched", names)
    text = (
        f"def {name}({', '.join([*own, size, *strides])}):\n"
        f"    {index} = ({first}).to({tl}.int64)\n"
        f"    if {index} < {size}:\n"
        f"        {callee}({values})\n"
    )
    path = f"<{name} over axis {axis} of {'_'.join(strides)}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    exec(compile(text, path, "exec"), scope)
    loose = getattr(kernel, "do_not_specialize", None) or ()
    return triton.jit(do_not_specialize=loose, debug=kernel.debug)(scope[name])


def _unused(name: str, names: Sequence[str]) -> str:
    """A name that is none of a kernel's parameters."""
    while name in names:
        name += "_"
    return name
