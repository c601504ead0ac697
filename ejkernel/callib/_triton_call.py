"""`triton_call`: a Triton kernel as a JAX function, on NVIDIA, on AMD, and interpreted on a CPU."""

import contextlib
import dataclasses
import functools
import linecache
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ejkernel.callib import (
    _triton_check,
    _triton_compile,
    _triton_interpret,
    _triton_jaxlib,
    _triton_source,
)
from ejkernel.callib._triton_compile import Compiled, Constants, Exact, GpuTarget, Signature
from ejkernel.xla_utils import manual

_MOST_PROGRAMS = _triton_check.MOST_PROGRAMS[1]  # beside the first axis of a grid


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch without its arrays; hashable, so that it can be a parameter of a primitive."""

    kernel: Any
    slots: tuple[Any, ...]  # a kernel's inputs: an index of an array, ("int", value), or None
    grid: tuple[int, ...]
    constants: Constants
    options: tuple[tuple[str, Any], ...]
    out: tuple[tuple[tuple[int, ...], str] | None, ...]  # shapes and dtypes; None: absent
    zeroed: frozenset[int]
    aliases: tuple[tuple[int, int], ...]
    batch: tuple[int, tuple[bool, ...]] | None = (
        None  # of vmap: its size, and the arrays that have it
    )

    def results(self) -> list[tuple[int, tuple[int, ...], Any]]:
        """Index among the outputs, shape with the batch axis, and dtype of those that exist."""
        lead = () if self.batch is None else (self.batch[0],)
        return [
            (i, (*lead, *o[0]), jnp.dtype(o[1])) for i, o in enumerate(self.out) if o is not None
        ]


def triton_call(
    kernel: Any,
    *inputs: Any,
    grid: Sequence[int],
    out_shape: Sequence[jax.ShapeDtypeStruct | None],
    num_warps: int = 4,
    num_stages: int = 3,
    zeroed: Sequence[int] = (),
    aliases: dict[int, int] | None = None,
    options: dict[str, Any] | None = None,
    **constants: Any,
) -> list[Any]:
    """Runs a `@triton.jit` kernel on JAX arrays; differentiation is the caller's.

    The kernel's parameters are the inputs, then a pointer to each output, then its constants.
    On a CPU the kernel runs in Triton's interpreter. Under `jax.vmap` the new axis becomes a free
    axis of the grid, and an array without it is not copied.

    Args:
      kernel: A function decorated with `triton.jit`.
      *inputs: Arrays; ints, of which the compiled code knows only whether they are 1 or a multiple
        of 16, and not even that for those in the kernel's `do_not_specialize`; None for an absent
        array, a compile-time None to the kernel.
      grid: Number of programs along each of at most three axes.
      out_shape: Shapes and dtypes of the outputs; None for one that is not wanted, a compile-time
        None to the kernel too.
      num_warps: Warps to a program.
      num_stages: Depth of the software pipeline.
      zeroed: Outputs that start as zeros; the others start as whatever memory holds.
      aliases: Index of an array among the inputs to the output that shares its memory.
      options: Further options of Triton's compiler, such as `maxnreg`.
      **constants: The kernel's `tl.constexpr` parameters.
    """
    settings = {"num_warps": num_warps, "num_stages": num_stages}
    _triton_check.check(kernel, inputs, grid, out_shape, zeroed, aliases or {}, constants)
    _triton_check.check_options(kernel, settings, options or {})
    constants = {n: v.item() if isinstance(v, np.generic) else v for n, v in constants.items()}
    arrays: list[jax.Array] = []
    slots: list[Any] = []
    for value in inputs:
        if value is None:
            slots.append(None)
        elif isinstance(value, int | np.integer) and not isinstance(value, bool):
            slots.append(("int", int(value)))
        else:
            slots.append(len(arrays))
            arrays.append(jnp.asarray(value))
    position = {i: slot for i, slot in enumerate(slots) if isinstance(slot, int)}
    launch = Launch(
        kernel=kernel,
        slots=tuple(slots),
        grid=tuple(int(n) for n in grid),
        constants=tuple((name, Exact(value)) for name, value in sorted(constants.items())),
        options=tuple(sorted({**settings, **(options or {})}.items())),
        out=tuple(
            None if o is None else (tuple(o.shape), jnp.dtype(o.dtype).name) for o in out_shape
        ),
        zeroed=frozenset(zeroed),
        aliases=tuple((position[i], o) for i, o in (aliases or {}).items()),
    )
    if 0 in launch.grid:
        kept = {out: arrays[array] for array, out in launch.aliases}
        return [
            None if o is None else kept[i] if i in kept else jnp.zeros(o.shape, o.dtype)
            for i, o in enumerate(out_shape)
        ]
    made = iter(triton_call_p.bind(*manual.vary_alike(arrays), launch=launch))
    return [None if o is None else next(made) for o in out_shape]


triton_call_p = Primitive("ejkernel_triton_call")
triton_call_p.multiple_results = True


@functools.lru_cache(maxsize=1024)
def _compiled_call(launch: Launch) -> Callable[..., Any]:
    return jax.jit(lambda *arrays: triton_call_p.bind(*arrays, launch=launch))


@triton_call_p.def_impl
def _eager(*arrays: Any, launch: Launch) -> Any:
    return _compiled_call(launch)(*arrays)


@triton_call_p.def_abstract_eval
def _abstract(*avals: Any, launch: Launch) -> list[Any]:
    if not avals:
        return [jax.core.ShapedArray(shape, dtype) for _, shape, dtype in launch.results()]
    return [manual.type_like(avals[0], shape, dtype) for _, shape, dtype in launch.results()]


# vmap


def _batch(arrays: Sequence[Any], dims: Sequence[Any], *, launch: Launch) -> Any:
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(arrays, dims, strict=True)]
    flags = tuple(d is not None for d in dims)
    for array, _ in launch.aliases:  # the output that shares its memory has the axis
        if not flags[array]:
            moved[array] = jnp.broadcast_to(moved[array], (size, *moved[array].shape))
            flags = (*flags[:array], True, *flags[array + 1 :])
    if launch.batch is not None:
        moved, flags = _fold(moved, flags, size, launch.batch)
    total = size if launch.batch is None else size * launch.batch[0]
    flat = dataclasses.replace(launch, batch=None)
    full = len(launch.grid) == 3 or (len(launch.grid) == 2 and total > _MOST_PROGRAMS)
    # a kernel that looks at axes behind its grid must find one program there
    if full or any(axis >= len(launch.grid) for axis in _triton_source.grid_axes(launch.kernel)):
        some = [x for x, flag in zip(moved, flags, strict=True) if flag]

        def one(given: Sequence[Any]) -> Any:
            rest = iter(given)
            operands = [next(rest) if f else x for x, f in zip(moved, flags, strict=True)]
            return triton_call_p.bind(*operands, launch=flat)

        outs = jax.lax.map(one, some)
    else:
        batched = dataclasses.replace(flat, batch=(total, flags))
        outs = triton_call_p.bind(*moved, launch=batched)
    if launch.batch is not None:
        outs = [o.reshape(size, launch.batch[0], *o.shape[1:]) for o in outs]
    return outs, [0] * len(outs)


def _fold(
    arrays: Sequence[Any], outer: tuple[bool, ...], size: int, inner: tuple[int, tuple[bool, ...]]
) -> tuple[list[Any], tuple[bool, ...]]:
    """Two batch axes as one; an array that has only one of them is repeated along the other."""
    inner_size, has_inner = inner
    folded = []
    for x, has_out, has_in in zip(arrays, outer, has_inner, strict=True):
        if has_out or has_in:
            x = x if has_out else x[None]
            if not has_in:
                x = x[:, None]
            x = jnp.broadcast_to(x, (size, inner_size, *x.shape[2:]))
            x = x.reshape(size * inner_size, *x.shape[2:])
        folded.append(x)
    return folded, tuple(a or b for a, b in zip(outer, has_inner, strict=True))


batching.primitive_batchers[triton_call_p] = _batch


@functools.lru_cache(maxsize=256)
def _batched_kernel(kernel: Any, strided: tuple[str, ...], count: int, axis: int) -> Any:
    """The kernel with its arrays moved along by the batch index; a free grid axis holds that.

    Parameters: the kernel's own first `count`, the batch size, a stride for each name in
    `strided`, then the kernel's constants.
    """
    import triton

    names = kernel.arg_names
    index, size, callee, tl = (_unused(n, names) for n in ("index", "size", "kernel", "tl"))
    strides = {n: _unused(f"stride_{n}", names) for n in strided}
    moved = [f"{n} + {index} * {strides[n]}" if n in strides else n for n in names[:count]]
    constants = names[count:]
    first = f"{tl}.program_id({axis})"
    if axis == 1:  # two free axes: more programs than one of them may have
        first += f" + {tl}.program_id(2) * {tl}.num_programs(1)"
    head = [*names[:count], size, *strides.values()]
    parameters = ", ".join([*head, *(f"{n}: {tl}.constexpr" for n in constants)])
    arguments = ", ".join([*moved, *(f"{n}={n}" for n in constants)])
    name = _unused(f"{kernel.fn.__name__}_batched", names)
    text = (
        f"def {name}({parameters}):\n"
        f"    {index} = ({first}).to({tl}.int64)\n"
        f"    if {index} < {size}:\n"
        f"        {callee}({arguments})\n"
    )
    path = f"<{name} over axis {axis} of {'_'.join(strided)}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    scope: dict[str, Any] = {callee: kernel, tl: triton.language, "__name__": __name__}
    exec(compile(text, path, "exec"), scope)
    loose = [names[i] for i in range(count) if kernel.params[i].do_not_specialize]
    return triton.jit(do_not_specialize=loose, debug=kernel.debug)(scope[name])


def _unused(name: str, names: Sequence[str]) -> str:
    """A name that is none of a kernel's parameters."""
    while name in names:
        name += "_"
    return name


# Lowering


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """What a GPU gets: a kernel, its grid, and its parameters in order."""

    kernel: Any
    grid: tuple[int, ...]  # three
    signature: Signature
    parameters: list[Any]  # ints, and (bytes to set to zero,) for arrays


def _plan(launch: Launch, avals: Sequence[Any]) -> _Plan:
    aliased = {out for _, out in launch.aliases}
    # each parameter of the kernel: a dtype, an int or None; arrays with the bytes to set to zero
    slots: list[tuple[Any, int]] = [
        (None if s is None else avals[s].dtype if isinstance(s, int) else s[1], 0)
        for s in launch.slots
    ]
    outs: list[tuple[Any, int]] = [(None, 0)] * len(launch.out)
    for i, shape, dtype in launch.results():
        zeroed = i in launch.zeroed and i not in aliased
        outs[i] = (dtype, math.prod(shape) * dtype.itemsize if zeroed else 0)
    slots += outs
    kernel, grid = launch.kernel, launch.grid
    if launch.batch is not None:
        kernel, grid, extra = _over_batch(launch, avals)
        slots += [(value, 0) for value in extra]
    parameters = [
        kind if isinstance(kind, int) else (zeros,)
        for i, (kind, zeros) in enumerate(slots)
        if kind is not None and not _triton_compile.folded(kernel, i, kind)
    ]
    signature = Signature(tuple(kind for kind, _ in slots), launch.constants)
    return _Plan(kernel, (*grid, *(1,) * (3 - len(grid))), signature, parameters)


def _over_batch(launch: Launch, avals: Sequence[Any]) -> tuple[Any, tuple[int, ...], list[int]]:
    assert launch.batch is not None
    size, flags = launch.batch
    names = launch.kernel.arg_names
    count = len(launch.slots) + len(launch.out)
    strides = {
        names[i]: math.prod(avals[slot].shape[1:])
        for i, slot in enumerate(launch.slots)
        if isinstance(slot, int) and flags[slot]
    }
    first = len(launch.slots)
    strides |= {names[first + i]: math.prod(s[1:]) for i, s, _ in launch.results()}
    axis = len(launch.grid)
    kernel = _batched_kernel(launch.kernel, tuple(strides), count, axis)
    extra = (size,)
    if axis == 1 and size > _MOST_PROGRAMS:
        extra = (_MOST_PROGRAMS, -(-size // _MOST_PROGRAMS))
    return kernel, (*launch.grid, *extra), [size, *strides.values()]


def launches(jaxpr: Any) -> Iterator[Any]:
    """The equations of a traced program that launch Triton kernels, those of inner programs too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is triton_call_p:
            yield eqn
        for value in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from launches(inner)


def compile_launch(launch: Launch, avals: Sequence[Any], target: GpuTarget) -> Compiled:
    """The machine code of a launch for a target, on any machine."""
    plan = _plan(launch, avals)
    return _triton_compile.compile_kernel(plan.kernel, plan.signature, launch.options, target)


def _lower_gpu(platform: str, ctx: Any, *operands: Any, launch: Launch) -> Any:
    target = _forced_target.get() or _triton_jaxlib.device_target(platform)
    plan = _plan(launch, ctx.avals_in)
    compiled = _triton_compile.compile_kernel(plan.kernel, plan.signature, launch.options, target)
    order = [i for i, _, _ in launch.results()]
    facts = {
        "grid": plan.grid,
        "name": launch.kernel.fn.__name__,
        "aliases": [(a, order.index(o)) for a, o in launch.aliases],
    }
    return _triton_jaxlib.lower(ctx, operands, compiled, target, plan.parameters, facts)


class _Forced:
    """A target that stands in for the device's own, for programs made to be looked at."""

    def __init__(self) -> None:
        self._value: GpuTarget | None = None

    def get(self) -> GpuTarget | None:
        return self._value

    @contextlib.contextmanager
    def set(self, target: GpuTarget) -> Iterator[None]:
        before, self._value = self._value, target
        try:
            yield
        finally:
            self._value = before


_forced_target = _Forced()
lower_for = _forced_target.set


def _interpret(*arrays: Any, launch: Launch) -> Any:
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in launch.results()]

    def host(*given: Any) -> list[np.ndarray]:
        return _run_on_host([np.ascontiguousarray(np.asarray(x)) for x in given], launch)

    return jax.pure_callback(host, shapes, *arrays, vmap_method="sequential")


def _run_on_host(arrays: list[np.ndarray], launch: Launch) -> list[np.ndarray]:
    size, flags = launch.batch or (1, (False,) * len(arrays))
    aliased = {out: array for array, out in launch.aliases}
    results: list[list[Any]] = [[] for _ in launch.out]
    for v in range(size):
        local = [x[v] if flag else x for x, flag in zip(arrays, flags, strict=True)]
        outs: list[Any] = [None] * len(launch.out)
        for i, shape, dtype in dataclasses.replace(launch, batch=None).results():
            if i in aliased:
                outs[i] = local[aliased[i]] = local[aliased[i]].copy()
            elif i in launch.zeroed:
                outs[i] = np.zeros(shape, dtype)
            else:
                outs[i] = _triton_interpret.poisoned(shape, dtype)
        inputs = [
            None if slot is None else local[slot] if isinstance(slot, int) else slot[1]
            for slot in launch.slots
        ]
        parameters = [*inputs, *outs]
        constants = _triton_compile.values(launch.constants)
        _triton_interpret.run(launch.kernel, parameters, constants, launch.grid)
        for made, out in zip(results, outs, strict=True):
            made.append(out)
    kept = [made for made in results if made[0] is not None]
    return [np.stack(made) if launch.batch is not None else made[0] for made in kept]


mlir.register_lowering(
    triton_call_p, mlir.lower_fun(_interpret, multiple_results=True), platform="cpu"
)
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(
        triton_call_p, functools.partial(_lower_gpu, _platform), platform=_platform
    )
