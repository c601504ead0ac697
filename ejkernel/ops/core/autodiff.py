"""The derivative rule of every op: a kernel's own backward, and forward mode and second order too.

An op is a `custom_jvp` function whose tangent is a linear map that knows its own transpose. Reverse
mode transposes the map, which calls the op's backward kernel; forward mode runs the map itself, and
differentiating a derivative uses its twin in plain JAX (both from the op's differentiable formula).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel.errors import UnsupportedError
from ejkernel.ops.core.types import AbstractArgs
from ejkernel.xla_utils.manual import type_like, vary_alike

_FLOAT0 = jax.dtypes.float0
Arrays = Sequence[jax.Array]
MapFn = Callable[[Arrays, Arrays], Arrays]


@dataclasses.dataclass(frozen=True, eq=False)
class LinearMap:
    """`fun(residuals, tangents)`, its transpose, and twins of both that JAX can differentiate."""

    fun: MapFn
    twin: MapFn
    transposed: MapFn
    transposed_twin: MapFn

    @functools.cached_property
    def T(self) -> "LinearMap":
        return LinearMap(self.transposed, self.transposed_twin, self.fun, self.twin)

    def batched(self, residual_axes: tuple[int | None, ...]) -> "LinearMap":
        """The map over a leading axis of all tangents and of the residuals that have one."""

        def over(f: MapFn) -> MapFn:
            return lambda residuals, tangents: jax.vmap(
                lambda r, t: tuple(f(r, t)), in_axes=(residual_axes, 0)
            )(tuple(residuals), tuple(tangents))

        return LinearMap(*map(over, (self.fun, self.twin, self.transposed, self.transposed_twin)))


def _run(*operands, linear, num_residuals, out_avals):
    outs = linear.fun(operands[:num_residuals], operands[num_residuals:])
    return [jnp.asarray(o, aval.dtype) for o, aval in zip(outs, out_avals, strict=True)]


@functools.lru_cache(maxsize=512)
def _compiled(linear, num_residuals, out_avals):
    return jax.jit(
        lambda *operands: _run(
            *operands, linear=linear, num_residuals=num_residuals, out_avals=out_avals
        )
    )


linear_map_p = Primitive("ejkernel_linear_map")
linear_map_p.multiple_results = True
# an eager gradient compiles its backward once; the map is that of the cached forward program
linear_map_p.def_impl(lambda *operands, **params: _compiled(**params)(*operands))
# A backward may hold a custom_partitioning, which only shows when the map is lowered; JAX must be
# told that the devices will be asked for.
with contextlib.suppress(ImportError, AttributeError):
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(linear_map_p)
linear_map_p.def_abstract_eval(lambda *_, linear, num_residuals, out_avals: list(out_avals))
mlir.register_lowering(linear_map_p, mlir.lower_fun(_run, multiple_results=True))


def linear_map(linear: LinearMap, residuals: Arrays, tangents: Arrays, out_avals: Sequence[Any]):
    """`linear.fun(residuals, tangents)` as one equation."""
    operands = vary_alike([*residuals, *tangents])
    return linear_map_p.bind(
        *operands,
        linear=linear,
        num_residuals=len(residuals),
        out_avals=tuple(aval.strip_weak_type() for aval in out_avals),
    )


def _transpose(cotangents, *operands, linear, num_residuals, out_avals):
    cotangents = [ad.instantiate_zeros(c) if type(c) is ad.Zero else c for c in cotangents]
    inputs = operands[num_residuals:]
    in_avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in inputs]
    back = linear_map(linear.T, operands[:num_residuals], cotangents, in_avals)
    asked = [o if ad.is_undefined_primal(x) else None for o, x in zip(back, inputs, strict=True)]
    return [None] * num_residuals + asked


def _jvp(primals, tangents, *, linear, num_residuals, out_avals):
    def dense(x, t):
        return jnp.zeros_like(x) if type(t) is ad.Zero else t

    residuals, inputs = primals[:num_residuals], primals[num_residuals:]
    outs = linear_map_p.bind(
        *primals, linear=linear, num_residuals=num_residuals, out_avals=out_avals
    )
    moved = [dense(x, t) for x, t in zip(inputs, tangents[num_residuals:], strict=True)]
    douts = linear_map(linear, residuals, moved, out_avals)
    perturbed = [
        i
        for i, t in enumerate(tangents[:num_residuals])
        if type(t) is not ad.Zero and t.dtype != _FLOAT0
    ]
    if perturbed:  # somebody differentiates the derivative

        def of_residuals(*some):
            merged = list(residuals)
            for i, value in zip(perturbed, some, strict=True):
                merged[i] = value
            return tuple(linear.twin(merged, inputs))

        point = tuple(residuals[i] for i in perturbed)
        direction = tuple(tangents[i] for i in perturbed)
        extra = jax.jvp(of_residuals, point, direction)[1]
        douts = [a + b.astype(a.dtype) for a, b in zip(douts, extra, strict=True)]
    return outs, douts


def _batch(operands, dims, *, linear, num_residuals, out_avals):
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    part = _part_of_axis(operands, dims)
    residuals = list(operands[:num_residuals])
    inputs = [
        _split_first(batching.bdim_at_front(x, d, size), part)
        for x, d in zip(operands[num_residuals:], dims[num_residuals:], strict=True)
    ]
    batched = linear.batched(tuple(dims[:num_residuals]))
    avals = [_with_axis(a, size, part) for a in out_avals]
    outs = linear_map(batched, residuals, inputs, avals)
    return outs, [0] * len(outs)


def _part_of_axis(operands, dims):
    """Mesh axes that split the mapped axis, where mesh axes are explicit; None: it is whole."""
    mapped = ((x, d) for x, d in zip(operands, dims, strict=True) if d is not None)
    parts = (jax.typeof(x).sharding.spec[d] for x, d in mapped)
    return next((part for part in parts if part is not None), None)


def _split_first(x, part):
    """An array whose first axis is split like the mapped axis of others, as JAX's vmap wants it."""
    sharding = jax.typeof(x).sharding
    if part is None or sharding.spec[0] == part:
        return x
    spec = PartitionSpec(part, *sharding.spec[1:])
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))


def _with_axis(aval, size, part):
    """The type of a batch of values of a type."""
    made = type_like(aval, (size, *aval.shape), aval.dtype)
    if aval.sharding.mesh.empty:
        return made
    spec = PartitionSpec(part, *aval.sharding.spec)
    return made.update(sharding=NamedSharding(aval.sharding.mesh, spec))


# The identity on its first operand, which has a batch axis as soon as any operand has one. JAX's
# batching of a `custom_jvp` inside jit is wrong where an output has none and its tangent has one:
# value and gradient are multiplied by the axis size (seen with 0.10.2). It has one result, so that
# JAX drops the equation of a result that nobody uses, and what was computed for it.
batched_alike_p = Primitive("ejkernel_batched_alike")
batched_alike_p.def_impl(lambda x, *others: x)
batched_alike_p.def_abstract_eval(lambda x, *others: x)
mlir.register_lowering(batched_alike_p, lambda ctx, x, *others: [x])


def _batch_alike(operands, dims):
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    x = batching.bdim_at_front(operands[0], dims[0], size)
    # bound again: an outer vmap may add an axis of its own
    return batched_alike_p.bind(x, *operands[1:]), 0


def _refuse_transpose(cotangent, *operands):
    raise UnsupportedError(
        "`jax.linear_transpose` does not see that an operation is linear in an argument: use "
        "`jax.vjp`, or transpose what `jax.linearize` gives."
    )


batching.primitive_batchers[batched_alike_p] = _batch_alike
ad.primitive_transposes[batched_alike_p] = _refuse_transpose
ad.primitive_transposes[linear_map_p] = _transpose
ad.primitive_jvps[linear_map_p] = _jvp
batching.primitive_batchers[linear_map_p] = _batch


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """What the derivative of one op is made of; `args` are its canonical arguments."""

    op: str
    forward: Callable[[AbstractArgs], tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]]
    backward: Callable[..., dict[str, jax.Array]]  # (args, outputs, residuals, cotangents, wanted)
    formula: Callable[[AbstractArgs], tuple[jax.Array, ...]]
    differentiable: frozenset[str]
    output_names: tuple[str, ...]
    residual_names: tuple[str, ...]


def apply(rule: Rule, args: AbstractArgs) -> tuple[jax.Array, ...]:
    """The outputs of `rule.forward(args)`, differentiable in every way JAX has."""
    names = tuple(args.arrays())
    leaves = vary_alike(list(args.arrays().values()))

    @jax.custom_jvp
    def op(*leaves):
        outputs, residuals = rule.forward(args.with_arrays(dict(zip(names, leaves, strict=True))))
        return jax.tree.map(lambda x: batched_alike_p.bind(x, *leaves), (outputs, residuals))

    def jvp(primals, tangents):
        wanted = [n for n, t in zip(names, tangents, strict=True) if type(t) is not SymbolicZero]
        _refuse_constants(rule, wanted)
        outputs, residuals = op(*primals)
        outputs = _name(rule.op, rule.output_names, outputs)
        residuals = _name(rule.op, rule.residual_names, residuals)
        saved = [*primals, *map(jax.lax.stop_gradient, (*outputs, *residuals))]
        given = [t for t in tangents if type(t) is not SymbolicZero]
        linear = _linear(rule, args, names, wanted, len(outputs))
        smooth = [o for o in outputs if _smooth(o)]
        douts = iter(linear_map(linear, saved, given, [jax.typeof(o) for o in smooth]))
        tangents_out = tuple(next(douts) if _smooth(o) else _no_tangent(o) for o in outputs)
        return (outputs, residuals), (tangents_out, tuple(map(_no_tangent, residuals)))

    op.defjvp(jvp, symbolic_zeros=True)
    return op(*leaves)[0]


def _smooth(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _no_tangent(x: jax.Array) -> Any:
    return jnp.zeros_like(x) if _smooth(x) else np.zeros(x.shape, _FLOAT0)


def _name(op: str, names: tuple[str, ...], values: Arrays) -> tuple[jax.Array, ...]:
    """Puts names on values that a remat policy can ask for, such as `flash_attention.lse`."""
    named = [checkpoint_name(v, f"{op}.{n}") for n, v in zip(names, values, strict=False)]
    return (*named, *values[len(named) :])


def _refuse_constants(rule: Rule, wanted: Sequence[str]) -> None:
    if constants := [name for name in wanted if name not in rule.differentiable]:
        raise UnsupportedError(
            f"`{rule.op}`: no derivative with respect to {', '.join(f'`{c}`' for c in constants)}; "
            f"differentiable are {sorted(rule.differentiable)}. "
            "Wrap the argument in `jax.lax.stop_gradient` if it is a constant."
        )


def _linear(
    rule: Rule, args: AbstractArgs, names: Sequence[str], wanted: Sequence[str], num_outputs: int
) -> LinearMap:
    """The tangent map at a point; residuals are the op's arrays, its outputs and residuals."""
    count = len(names)

    def at(saved: Arrays) -> AbstractArgs:
        return args.with_arrays(dict(zip(names, saved[:count], strict=True)))

    def of_wanted(saved: Arrays):
        here = at(saved)
        values = here.arrays()
        point = tuple(values[name] for name in wanted)
        return lambda *xs: rule.formula(here.with_arrays(dict(zip(wanted, xs, strict=True)))), point

    def full(outputs: Arrays, cotangents: Arrays) -> tuple[Any, ...]:
        """Cotangents of all outputs from those of the differentiable ones."""
        given = iter(cotangents)
        return tuple(next(given) if _smooth(o) else _no_tangent(o) for o in outputs)

    def push(saved: Arrays, tangents: Arrays) -> Arrays:
        formula, point = of_wanted(saved)
        return [t for t in jax.jvp(formula, point, tuple(tangents))[1] if t.dtype != _FLOAT0]

    def pull(saved: Arrays, cotangents: Arrays) -> Arrays:
        outputs, residuals = saved[count : count + num_outputs], saved[count + num_outputs :]
        # XLA folds what a kernel does with a constant cotangent, that of `sum`, for seconds
        cotangents = jax.lax.optimization_barrier(tuple(cotangents))
        gradients = rule.backward(
            at(saved),
            tuple(outputs),
            tuple(residuals),
            full(outputs, cotangents),
            frozenset(wanted),
        )
        return [gradients[name] for name in wanted]

    def pull_twin(saved: Arrays, cotangents: Arrays) -> Arrays:
        formula, point = of_wanted(saved)
        outputs, pull = jax.vjp(formula, *point)
        return pull(full(outputs, cotangents))

    return LinearMap(push, push, pull, pull_twin)
