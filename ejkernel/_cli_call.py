"""Arguments of an operation as one writes them on a command line."""

import argparse
import ast
import re
from collections.abc import Sequence
from typing import Any


class UsageError(Exception):
    """Bad input; its text is the one line that the user sees."""


def add_arguments(parser: argparse.ArgumentParser, dtype: str) -> None:
    """Options that describe a call."""
    text = "an array; without NAME=, query, key and value alike"
    many: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--shape", metavar="NAME=2,1024,8,64[:DTYPE]", help=text, **many)
    parser.add_argument("--dtype", default=dtype, help=f"of arrays of floats ({dtype})")
    parser.add_argument("--set", metavar="NAME=VALUE", dest="options", help="an option", **many)


def values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The call that the options describe: shapes of arrays and values of options, by name."""
    shapes = arguments.shape
    made = arrays(arguments.op, shapes, arguments.dtype) if shapes else {}
    for text in arguments.options:
        name, given = _named("--set", text)
        if name in made:
            raise UsageError(f"{name!r} is given twice")
        made[name] = value(given)
    return made


def _named(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise UsageError(f"{option} {text!r} must be NAME=VALUE")
    return name.strip(), value.strip()


def value(text: str) -> Any:
    """A Python value as one writes it on a command line; what is none stays text."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def arrays(op: str, shapes: Sequence[str], dtype: str) -> dict[str, Any]:
    """Shapes and dtypes of the arrays of a call, by name."""
    import jax

    from ejkernel.kernels import _spec, kernel_registry

    fields = {f.name: f for f in _spec.array_fields(kernel_registry.spec(op).args)}
    fields = {n: f for n, f in fields.items() if not f.metadata.get("internal")}
    default = _dtype(dtype)
    made: dict[str, Any] = {}
    for text in shapes:
        if "=" in text:
            name, rest = _named("--shape", text)
            names: tuple[str, ...] = (name,)
        else:
            names, rest = ("query", "key", "value"), text
            if not set(names) <= set(fields):
                raise UsageError(f"--shape {text!r} must name one of {', '.join(fields)}: NAME=…")
        sizes, colon, own = rest.partition(":")
        if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*,?\s*", sizes):
            raise UsageError(f"--shape {text!r} must hold sizes such as 2,1024,8,64")
        shape = tuple(int(size) for size in sizes.split(",") if size.strip())
        for name in names:
            if name not in fields:
                raise UsageError(f"{op} has no array {name!r}; it has {', '.join(fields)}")
            if name in made:
                raise UsageError(f"{name!r} is given twice")
            kind = _dtype(own) if colon else _fitting(fields[name], default)
            made[name] = jax.ShapeDtypeStruct(shape, kind)
    return made


def _dtype(text: str) -> Any:
    import jax.numpy as jnp

    try:
        return jnp.dtype(text.strip())
    except TypeError:
        raise UsageError(f"{text!r} is no dtype; try float32, bfloat16 or int32") from None


def _fitting(field: Any, default: Any) -> Any:
    """The default dtype, or one that an array of ids, lengths or masks has."""
    from ejkernel.kernels import _types

    allowed = getattr(_types.array_type(field.type), "dtypes", None)
    if not isinstance(allowed, list | tuple):
        return _dtype("bool") if field.name.endswith("mask") else default
    if str(default) in allowed:
        return default
    return next((_dtype(d) for d in ("int32", "bool") if d in allowed), default)
