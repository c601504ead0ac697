"""The call that is compiled: what a user gave, or one that is worth looking at."""

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _spec, _types, kernel_registry


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """Public arguments of an op: shapes of its arrays, and its options."""

    spec: _spec.OpSpec
    arrays: dict[str, Any]  # some hold several, such as the weights of a cell
    options: dict[str, Any]

    def args(self, arrays: Mapping[str, Any]) -> Any:
        """The canonical arguments, inside a trace."""
        values = self.spec.unpack(self.spec.complete({**arrays, **self.options}))
        _types.check_types(self.spec.name, self.spec.args, values)
        return self.spec.canonicalize(values)


def encode(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as plain values; arrays become their shapes and dtypes."""
    arrays, options = {}, {}
    for name, value in values.items():
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            arrays[name] = [list(value.shape), str(jnp.dtype(value.dtype))]
            continue
        options[name] = repr(value)
        try:
            ast.literal_eval(options[name])
        except (ValueError, SyntaxError):
            raise TypeError(
                f"`aot.compile`: `{name}` must be an array or a plain value; got {value!r}."
            ) from None
    return {"arrays": arrays, "options": options}


def decode(op: str, plain: Mapping[str, Any], dtype: str = "bfloat16") -> Call:
    """The call that `encode` described; without arrays the op's own example."""
    spec = kernel_registry.spec(op)
    arrays = {
        name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(kind))
        for name, (shape, kind) in plain["arrays"].items()
    }
    options = {name: ast.literal_eval(text) for name, text in plain["options"].items()}
    fields = _spec.public_fields(spec.args)
    if unknown := sorted({*arrays, *options} - {f.name for f in fields}):
        raise TypeError(f"`{op}`: there is no argument {unknown[0]!r}.")
    if not arrays:
        example = _example(spec, jnp.dtype(dtype))
        return Call(spec, example.arrays, example.options | options)
    needed = {f.name for f in fields if f.default is dataclasses.MISSING}
    if missing := sorted(needed - {*arrays, *options}):
        raise TypeError(f"`{op}`: `{missing[0]}` is missing.")
    return Call(spec, arrays, options)


def _example(spec: _spec.OpSpec, dtype: Any) -> Call:
    """The first call that `ejkernel bench` measures on devices; without one a call of the tests."""
    measured = [] if spec.work is None else spec.work.benchmarks()
    cases = [case for case in measured if "device" in case.tags] or spec.cases()
    if not cases:
        raise ValueError(f"`{spec.name}` has no example; give the shapes of its arrays.")
    options = {}

    def arrays() -> dict[str, Any]:
        given = cases[0].values(dtype, jax.random.key(0))
        found = {n: v for n, v in given.items() if _holds_arrays(v)}
        options.update({n: v for n, v in given.items() if v is not None and n not in found})
        return found

    shapes = jax.eval_shape(arrays)  # fills `options` too
    return Call(spec, shapes, options)


def _holds_arrays(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(hasattr(x, "shape") for x in leaves)
