"""A kernel in a program of several devices, outside any `shard_map`.

On GPUs XLA partitions it by a rule (see `partition`). A TPU's compiler takes no such rule: there a
portable kernel runs instead, or the call is refused where the caller asked for the kernel.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ejkernel.errors import UnsupportedError
from ejkernel.ops.core import partition
from ejkernel.ops.core.kernel import Implementation, Invocation
from ejkernel.xla_utils import manual

# (arguments, outputs, residuals, cotangents) -> results; forward has the first alone
Run = Callable[..., Any]


def spread(inv: Invocation, made: Implementation, run: Run, instead: Run | None) -> Run:
    """`run` for any number of devices; `instead` stands in where it can run on one alone."""
    kind = None if inv.target is None else inv.target.kind
    mesh = jax.sharding.get_abstract_mesh()
    cut = bool(mesh.manual_axes)  # a shard_map has
    # nothing is to be cut on one device, and an abstract mesh of one lowers no rule
    alone = not mesh.empty and mesh.size == 1
    if made.portable or made.derivative != "rule" or cut or alone:
        return run
    if kind == "gpu":
        return _partitioned(inv, run)
    if kind == "tpu":
        return _on_one_device(inv, made, run, instead)
    return run


# GPUs


def _partitioned(inv: Invocation, run: Run) -> Run:
    layout, residuals = inv.kernel.layout(inv.call), inv.kernel.residual_axes(inv.call)
    if layout is None or residuals is None:
        return run
    results = (*layout.outputs, *residuals)

    def spread(args: Any, *rest: Any) -> Any:
        names, known = list(args.arrays()), jax.tree.leaves(rest)
        # outputs, residuals and cotangents of outputs
        axes = (*results, *layout.outputs) if rest else ()
        moving = [jax.dtypes.float0 != x.dtype for x in known]
        given = [(a, x) for a, x, moves in zip(axes, known, moving, strict=True) if moves]
        tree: list[Any] = []

        def body(arrays: Sequence[jax.Array], offsets: dict[str, jax.Array]) -> Any:
            here = args.with_arrays(dict(zip(names, arrays, strict=False)))
            others = iter(arrays[len(names) :])
            filled = [next(others) if m else x for m, x in zip(moving, known, strict=True)]
            more = jax.tree.unflatten(jax.tree.structure(rest), filled)
            made = run(layout.localize(here, offsets) if offsets else here, *more)
            leaves, structure = jax.tree.flatten(made)
            tree[:] = [structure]
            return leaves

        cut = partition.Cut.of(
            layout,
            [*(layout.arrays[name] for name in names), *(a for a, _ in given)],
            [layout.arrays[name] for name in sorted(inv.wanted)] if rest else results,
            summed=bool(rest),
        )
        operands = [*args.arrays().values(), *(x for _, x in given)]
        made = partition.run(cut, body, operands)
        return jax.tree.unflatten(tree[0], made)

    return spread


# TPUs


def _on_one_device(inv: Invocation, made: Implementation, run: Run, instead: Run | None) -> Run:
    reason = (
        f"`{inv.kernel.name}`: {made.name}: a program of several devices cannot cut this kernel: "
        "libtpu takes no partitioning rule. Give the call a `mesh=`, call it inside `shard_map`, "
        "make the axes of the mesh Explicit, or leave the choice to platform='auto'."
    )

    def spread(args: Any, *rest: Any) -> Any:
        names = list(args.arrays())
        leaves, tree = jax.tree.flatten((list(args.arrays().values()), rest))
        fixed = [x if jax.dtypes.float0 == x.dtype else None for x in leaves]

        def of_leaves(function: Run | None) -> Any:
            if function is None:
                return None

            def flat(*arrays: jax.Array) -> list[jax.Array]:
                moving = iter(arrays)
                filled = [next(moving) if x is None else x for x in fixed]
                values, more = jax.tree.unflatten(tree, filled)
                here = args.with_arrays(dict(zip(names, values, strict=True)))
                return jax.tree.leaves(function(here, *more))

            return flat

        structure = jax.tree.structure(jax.eval_shape(run, args, *rest))
        operands = [x for x, same in zip(leaves, fixed, strict=True) if same is None]
        made = _one_device_p.bind(
            *operands, run=of_leaves(run), instead=of_leaves(instead), reason=reason
        )
        return jax.tree.unflatten(structure, made)

    return spread


_one_device_p = Primitive("ejkernel_one_device")
_one_device_p.multiple_results = True


@_one_device_p.def_impl
def _eager(*xs: Any, **params: Any) -> Any:
    with jax.disable_jit(False):  # else the call would come back here
        return jax.jit(functools.partial(_bind, params))(*xs)


def _bind(params: dict[str, Any], *xs: Any) -> Any:
    return _one_device_p.bind(*xs, **params)


@_one_device_p.def_abstract_eval
def _(*avals: Any, run: Run, instead: Any, reason: str) -> list[Any]:
    shapes = jax.eval_shape(run, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    return [manual.type_like(avals[0], x.shape, x.dtype) for x in shapes]


def _batch(operands: Any, dims: Any, *, run: Run, instead: Any, reason: str) -> Any:
    mapped = lambda f: None if f is None else jax.vmap(f, in_axes=tuple(dims))
    made = _one_device_p.bind(*operands, run=mapped(run), instead=mapped(instead), reason=reason)
    return made, [0] * len(made)


batching.primitive_batchers[_one_device_p] = _batch


def _lower(ctx: Any, *operands: Any, run: Run, instead: Any, reason: str) -> Any:
    context = ctx.module_context.axis_context
    count = getattr(context, "num_devices", 1)
    if (mesh := getattr(context, "mesh", None)) is not None:
        # what a `shard_map` has cut, this device has alone
        count = mesh.size if set(mesh.axis_names) != set(context.manual_axes) else 1
    if count > 1 and instead is None:
        raise UnsupportedError(reason)
    return mlir.lower_fun(run if count == 1 else instead, multiple_results=True)(ctx, *operands)


mlir.register_lowering(_one_device_p, _lower)
