"""Kernels from outside the package: keyword functions matched against an op's own arguments."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _spec

_EMPTY = inspect.Parameter.empty


def adapt(registry: Any, op: str, fn: Callable[..., Any]) -> dict[str, Any]:
    """Entry options for a keyword function; a new op is defined from its signature."""
    parameters = _parameters(op, fn)
    new = op not in registry.ops()
    spec = _new_op(op, fn, parameters) if new else registry.spec(op)
    fields = _spec.public_fields(spec.args)
    required = [f.name for f in fields if f.default is dataclasses.MISSING]
    optional = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    if differences := _differences(parameters, required, optional):
        raise TypeError(f"`{op}`: {fn.__name__} does not fit the op: {'; '.join(differences)}.")
    if new:
        registry.define(spec, from_signature=True)
    computed = {f.name for f in fields if f.metadata.get("computed")}
    taken = [p.name for p in parameters if p.default is not _EMPTY and p.name in optional]

    def forward(args: Any, cfg: None) -> tuple[tuple[jax.Array, ...], tuple[()]]:
        values, given = spec.publish(args), args.given()
        # a value the user left alone keeps the function's own default, unless the op computed it
        keywords = {name: values[name] for name in taken if name in given | computed}
        return _as_tuple(fn(*(values[name] for name in required), **keywords)), ()

    return {"fn": forward, "honours": frozenset(taken), "derivative": "jax"}


def _parameters(op: str, fn: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(fn).parameters.values())
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            raise TypeError(
                f"`{op}`: {fn.__name__} takes {str(parameter).partition(':')[0]}, so nobody can "
                "tell which arguments it acts on; name them."
            )
    return parameters


def _differences(
    parameters: Sequence[inspect.Parameter], required: list[str], optional: dict[str, Any]
) -> list[str]:
    found = []
    needed = [p.name for p in parameters if p.default is _EMPTY]
    if len(needed) != len(required):
        found.append(f"it requires {needed}, the op {required}")
    if wrong := [n for n in needed if n in optional]:
        found.append(f"it requires {wrong}, which the op leaves optional")
    for parameter in parameters:
        if parameter.default is _EMPTY or parameter.name in ("fwd_params", "bwd_params"):
            continue
        if parameter.name not in optional:
            found.append(f"it takes `{parameter.name}`, which the op does not have")
        elif parameter.default != optional[parameter.name]:
            found.append(
                f"`{parameter.name}` defaults to {parameter.default!r}, "
                f"in the op to {optional[parameter.name]!r}"
            )
    return found


def _is_array_type(annotation: Any) -> bool:
    options = typing.get_args(annotation) or (annotation,)
    return any(hasattr(t, "dim_str") or t is jax.Array for t in options)


def _new_op(
    op: str, fn: Callable[..., Any], parameters: Sequence[inspect.Parameter]
) -> _spec.OpSpec:
    """An op whose arguments are a function's: arrays are what is required or annotated so."""
    fields, annotations = {}, {}
    for parameter in parameters:
        name, array = parameter.name, _is_array_type(parameter.annotation)
        annotations[name] = parameter.annotation if array else Any
        if parameter.default is _EMPTY:
            continue
        fields[name] = _spec.array() if array else _spec.static(default=parameter.default)
    body = fields | {"__annotations__": annotations, "__module__": fn.__module__}
    args = _spec.op_args(type(f"{op.title().replace('_', '')}Args", (_spec.OpArgs,), body))
    required = [p.name for p in parameters if p.default is _EMPTY]
    arrays = {f.name for f in _spec.array_fields(args)}

    def canonicalize(values: dict[str, Any]) -> Any:
        return args(
            **{n: jnp.asarray(v) if n in arrays and v is not None else v for n, v in values.items()}
        )

    def reference(made: Any) -> tuple[jax.Array, ...]:
        values = made.arrays() | made.statics()
        positional = [values.pop(name) for name in required]
        return _as_tuple(fn(*positional, **values))

    return _spec.OpSpec(
        name=op,
        args=args,
        canonicalize=canonicalize,
        reference=reference,
        differentiable=frozenset(arrays),
        outputs=lambda made: (),
        output_axes={},
    )


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def public_differences(spec: _spec.OpSpec) -> list[str]:
    """Where a public function's arguments differ from those of its args type."""
    from ejkernel.kernels import _op_kernel

    kernel = _op_kernel.OpKernel.public(spec.name)
    if kernel is None:
        return []
    own = _op_kernel.args_signature(spec).parameters
    beside = {*_op_kernel.CALL_ARGUMENTS, "mask_info"}
    public = {
        name: parameter
        for name, parameter in inspect.signature(kernel.function).parameters.items()
        if name not in beside
    }
    if list(own) != list(public):
        return [f"{spec.name}: public function {list(public)}, args type {list(own)}"]
    return [
        f"{spec.name}: `{name}` defaults to {public[name].default!r} and {own[name].default!r}"
        for name in own
        if own[name].default != public[name].default
    ]
