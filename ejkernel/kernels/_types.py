"""Arguments checked against the annotations of an args type, with messages that name them."""

import dataclasses
import functools
import operator
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Integer

_repr = reprlib.Repr()
_repr.maxlist = _repr.maxtuple = 8
_repr.maxother = _repr.maxstring = 100


def brief(value: Any) -> str:
    """The repr of a value for a message; what is long is cut."""
    if isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer):
        if value.size <= 16:
            return str(np.asarray(value).tolist())
        return f"{_repr.repr(np.asarray(value).tolist())} with shape {list(value.shape)}"
    return _repr.repr(value)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def array_type(annotation: Any) -> Any:
    return next((t for t in _alternatives(annotation) if hasattr(t, "dim_str")), None)


def plain_type(annotation: Any) -> Any:
    """The type of an option without the arrays that may stand for it."""
    kinds = [t for t in _alternatives(annotation) if not hasattr(t, "dim_str")]
    return functools.reduce(operator.or_, kinds)


@functools.cache
def axes_of(annotation: Any) -> tuple[str, ...]:
    """The axis names of a jaxtyping annotation."""
    return tuple(a.lstrip("#") for a in array_type(annotation).dim_str.split())


def check_types(op: str, cls: type, values: Mapping[str, Any]) -> None:
    """Checks public arguments against the annotations of an args type; axes must agree."""
    sizes: dict[str, tuple[int, str]] = {}
    for field in dataclasses.fields(cls):
        if field.name not in values:
            continue
        value = values[field.name]
        if field.metadata.get("static"):
            _check_static(op, field, value)
        elif value is not None or field.default is dataclasses.MISSING:
            _check_array(op, field, value, sizes)


def _check_static(op: str, field: dataclasses.Field, value: Any) -> None:
    from beartype import BeartypeConf
    from beartype.door import is_bearable

    if isinstance(value, jax.Array) and array_type(field.type) is not None:
        return  # canonicalization checks it, with a message of its own
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"`{op}`: `{field.name}` is part of the compiled program and must be a Python value; "
            f"got {value.dtype}{list(value.shape)}, an array or traced value."
        )
    plain = value.item() if isinstance(value, np.generic) else value
    hint: Any = plain_type(field.type)
    if not is_bearable(plain, hint, conf=BeartypeConf(is_pep484_tower=True)):
        name = getattr(hint, "__name__", None) or str(hint)
        raise TypeError(
            f"`{op}`: `{field.name}` must be {name.replace('typing.', '')}; "
            f"got {brief(value)} of type {type(value).__name__}."
        )


def check_library(what: str, value: Any) -> None:
    """Refuses arrays of other libraries, such as torch's tensors; `what` names the argument."""
    if isinstance(value, jax.Array) or isinstance(value.dtype, np.dtype):
        return
    kind = type(value)
    raise TypeError(
        f"{what} must be a JAX or NumPy array; got a {kind.__module__}.{kind.__name__} of "
        f"{value.dtype}{list(value.shape)}. Convert it, for example with `jnp.from_dlpack(x)`, or "
        "`jnp.asarray(x.detach().cpu().numpy())` of a torch tensor."
    )


def _check_array(
    op: str, field: dataclasses.Field, value: Any, sizes: dict[str, tuple[int, str]]
) -> None:
    annotation = array_type(field.type)
    axes = [] if annotation is None else annotation.dim_str.split()
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(
            f"`{op}`: `{field.name}` must be an array [{', '.join(axes)}]; "
            f"got {brief(value)} of type {type(value).__name__}. Convert it with `jnp.asarray`."
        )
    check_library(f"`{op}`: `{field.name}`", value)
    if annotation is None:  # an op from outside that does not say more
        return
    kind, dtypes = annotation.__name__.partition("[")[0], annotation.dtypes
    if kind == "Int":  # unsigned ids and lengths are converted, see `_check_integers`
        kind, dtypes = "Integer", Integer.dtypes
    if isinstance(dtypes, list | tuple) and str(value.dtype) not in dtypes:
        raise TypeError(
            f"`{op}`: `{field.name}` must have a dtype of kind {kind}; got {value.dtype}."
        )
    bare = [axis.lstrip("#") for axis in axes]
    bound = ", ".join(f"{a}={sizes[a][0]} (from `{sizes[a][1]}`)" for a in bare if a in sizes)
    rule = f"[{', '.join(axes)}]" + (f" with {bound}" if bound else "")
    if len(value.shape) != len(axes):
        if len(value.shape) in (field.metadata.get("ranks") or ()):
            return
        hint = field.metadata.get("hint", "")
        raise ValueError(
            f"`{op}`: `{field.name}` must have {len(axes)} axes, {rule}; got {value.shape}.{hint}"
        )
    full = tuple(sizes[a.lstrip("#")][0] if a.lstrip("#") in sizes else None for a in axes)
    if None not in full and all(a.startswith("#") for a in axes):
        broadcasts = True
    else:
        broadcasts = False
    for axis, size in zip(axes, value.shape, strict=True):
        free = axis.startswith("#") and size == 1
        known = sizes.setdefault(axis.lstrip("#"), (size, field.name))[0] if not free else size
        if known != size:
            rule = f"broadcast to {full}" if broadcasts else f"have shape {rule}"
            raise ValueError(f"`{op}`: `{field.name}` must {rule}; got {value.shape}.")
