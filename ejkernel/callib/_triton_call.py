"""`triton_call`: a Triton kernel as a JAX function, on NVIDIA, on AMD, and interpreted on a CPU."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ejkernel.callib import _triton_arguments as arguments
from ejkernel.callib import (
    _triton_check,
    _triton_compile,
    _triton_interpret,
    _triton_jaxlib,
    _triton_launch,
    _triton_source,
)
from ejkernel.callib._triton_arguments import Array, Output
from ejkernel.callib._triton_compile import Compiled, GpuTarget
from ejkernel.callib._triton_launch import Cost, Launch
from ejkernel.xla_utils import manual


def triton_call(  # noqa: PLR0913 (a public signature; all but the first by name)
    kernel: Any,
    *,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    grid: Sequence[int],
    num_warps: int = 4,
    num_stages: int = 3,
    zeroed: Sequence[str] = (),
    aliases: Mapping[str, str] | None = None,
    options: dict[str, Any] | None = None,
    cost: Cost | None = None,
    **constants: Any,
) -> dict[str, Any]:
    """Runs a `@triton.jit` kernel on JAX arrays; differentiation is the caller's.

    Arguments are bound to the kernel's parameters by name. On a CPU the kernel runs in Triton's
    interpreter. Under `jax.vmap` the new axis becomes a free axis of the grid, and an array without
    it is not copied.

    Args:
      kernel: A function decorated with `triton.jit`.
      inputs: By parameter: an array; an int, of which the compiled code knows only whether it is 1
        or a multiple of 16, and not even that if the kernel's `do_not_specialize` names it; None if
        it is absent, a compile-time None to the kernel; or a bundle, a NamedTuple of these and of
        further bundles. Members that the class annotates with `tl.constexpr` are compile-time
        values. Elsewhere a member is named by its path, as in "scores.bias".
      outputs: Shape and dtype by parameter; None for one that is not wanted, a compile-time None.
      grid: Number of programs along each of at most three axes.
      num_warps: Warps to a program.
      num_stages: Depth of the software pipeline.
      zeroed: Outputs that start as zeros; the others start as whatever memory holds.
      aliases: For an output the array among the inputs whose memory it shares and starts as.
      options: Further options of Triton's compiler, such as `maxnreg`.
      cost: What the launch computes, for the reports of `ejkernel.aot`.
      **constants: The kernel's `tl.constexpr` parameters.

    Returns:
      The outputs by name, None for those that are not wanted.
    """
    settings = {"num_warps": num_warps, "num_stages": num_stages}
    given = _triton_check.Given(inputs, outputs, zeroed, aliases or {}, constants)
    _triton_check.check(kernel, given, grid)
    _triton_check.check_options(kernel, settings, options or {})
    arrays: list[jax.Array] = []
    # a launch takes the memory of its results in the order of the kernel's parameters
    wanted = [name for name in kernel.arg_names if outputs.get(name) is not None]
    shapes: list[Any] = [outputs[name] for name in wanted]
    launch = Launch(
        kernel=kernel,
        parameters=_parameters(kernel, given, wanted, arrays),
        grid=tuple(int(n) for n in grid),
        options=tuple(sorted({**settings, **(options or {})}.items())),
        out=tuple((tuple(o.shape), jnp.dtype(o.dtype).name) for o in shapes),
        zeroed=frozenset(wanted.index(name) for name in zeroed if name in wanted),
        aliases=(),
        cost=cost,
    )
    found = dict(arguments.all_leaves(kernel.arg_names, launch.parameters))
    shared = {out: found[tuple(path.split("."))].index for out, path in (aliases or {}).items()}
    pairs = tuple((array, wanted.index(out)) for out, array in shared.items())
    launch = dataclasses.replace(launch, aliases=pairs)
    if 0 in launch.grid:
        results = {
            name: arrays[shared[name]] if name in shared else jnp.zeros(shape, dtype)
            for name, (shape, dtype) in zip(wanted, launch.out, strict=True)
        }
    else:
        made = triton_call_p.bind(*manual.vary_alike(arrays), launch=launch)
        results = dict(zip(wanted, made, strict=True))
    return {name: results.get(name) for name in outputs}


def _parameters(
    kernel: Any, given: _triton_check.Given, wanted: Sequence[str], arrays: list[jax.Array]
) -> tuple[Any, ...]:
    """The trees of a kernel's parameters; their arrays are appended to `arrays`."""

    def leaf(value: Any) -> Any:
        if value is None:
            return None
        if arguments.is_int(value):
            return int(value)
        arrays.append(jnp.asarray(value))
        return Array(len(arrays) - 1)

    def parameter(name: str) -> Any:
        if name in given.inputs:
            return arguments.tree(given.inputs[name], leaf)
        if name in given.outputs:
            return Output(wanted.index(name)) if name in wanted else None
        return arguments.tree(given.constants[name], leaf, constant=True)

    return tuple(parameter(name) for name in kernel.arg_names)


triton_call_p = Primitive("ejkernel_triton_call")
triton_call_p.multiple_results = True


@functools.lru_cache(maxsize=1024)
def _compiled_call(launch: Launch) -> Callable[..., Any]:
    return jax.jit(lambda *arrays: triton_call_p.bind(*arrays, launch=launch))


@triton_call_p.def_impl
def _eager(*arrays: Any, launch: Launch) -> Any:
    with jax.disable_jit(False):  # else the call would come back here
        return _compiled_call(launch)(*arrays)


@triton_call_p.def_abstract_eval
def _abstract(*avals: Any, launch: Launch) -> list[Any]:
    if not avals:
        return [jax.core.ShapedArray(shape, dtype) for shape, dtype in launch.results()]
    return [manual.type_like(avals[0], shape, dtype) for shape, dtype in launch.results()]


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
    full = len(launch.grid) == 3 or (len(launch.grid) == 2 and total > _triton_launch.MOST_PROGRAMS)
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


# Lowering


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
    plan = _triton_launch.plan(launch, avals)
    return _triton_compile.compile_kernel(plan.kernel, plan.signature, launch.options, target)


def _lower_gpu(platform: str, ctx: Any, *operands: Any, launch: Launch) -> Any:
    target = _forced_target.get() or _triton_jaxlib.device_target(platform)
    plan = _triton_launch.plan(launch, ctx.avals_in)
    compiled = _triton_compile.compile_kernel(plan.kernel, plan.signature, launch.options, target)
    name, aliases = launch.kernel.fn.__name__, launch.aliases
    facts = {"grid": plan.grid, "name": name, "aliases": aliases}
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
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in launch.results()]

    def host(*given: Any) -> list[np.ndarray]:
        return _run_on_host([np.ascontiguousarray(np.asarray(x)) for x in given], launch)

    return jax.pure_callback(host, shapes, *arrays, vmap_method="sequential")


def _run_on_host(arrays: list[np.ndarray], launch: Launch) -> list[np.ndarray]:
    size, flags = launch.batch or (1, (False,) * len(arrays))
    aliased = {out: array for array, out in launch.aliases}
    shapes = dataclasses.replace(launch, batch=None).results()
    results: list[list[Any]] = [[] for _ in launch.out]
    for v in range(size):
        local = [x[v] if flag else x for x, flag in zip(arrays, flags, strict=True)]
        outs: list[Any] = []
        for i, (shape, dtype) in enumerate(shapes):
            if i in aliased:
                local[aliased[i]] = local[aliased[i]].copy()
                outs.append(local[aliased[i]])
            elif i in launch.zeroed:
                outs.append(np.zeros(shape, dtype))
            else:
                outs.append(_triton_interpret.poisoned(shape, dtype))
        memory = {Array: local, Output: outs}
        take = lambda leaf, memory=memory: (
            memory[type(leaf)][leaf.index] if type(leaf) in memory else leaf
        )
        trees = [arguments.replaced(tree, take) for tree in launch.parameters]
        _triton_interpret.run(launch.kernel, trees, launch.grid)
        for made, out in zip(results, outs, strict=True):
            made.append(out)
    return [np.stack(made) if launch.batch is not None else made[0] for made in results]


mlir.register_lowering(
    triton_call_p, mlir.lower_fun(_interpret, multiple_results=True), platform="cpu"
)
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(
        triton_call_p, functools.partial(_lower_gpu, _platform), platform=_platform
    )
