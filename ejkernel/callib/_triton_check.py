"""Refuses calls of kernels that would touch foreign memory, or fail without a word."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel.callib import _triton_compile

MOST_PROGRAMS = (2**31 - 1, 65535, 65535)  # along each axis of a grid


def check(
    kernel: Any,
    inputs: Sequence[Any],
    grid: Sequence[int],
    outputs: Sequence[Any],
    zeroed: Sequence[int],
    aliases: Mapping[int, int],
    constants: Mapping[str, Any],
) -> None:
    """Raises, with the name of the kernel and of what is wrong."""
    if not hasattr(kernel, "arg_names"):
        raise TypeError(f"`triton_call`: `kernel` must be made by `triton.jit`; got {kernel!r}.")
    what = f"`triton_call({kernel.fn.__name__})`"
    names = list(kernel.arg_names)
    _check_names(what, names, len(inputs), len(outputs), constants)
    for name, value in zip(names, inputs, strict=False):
        if isinstance(value, bool | float | complex):
            raise TypeError(
                f"{what}: `{name}` must be an array, an int or None; got {value!r}. Pass an array, "
                "or make it a `tl.constexpr`."
            )
    for name, value in zip(names, (*inputs, *outputs), strict=False):
        dtype = getattr(value, "dtype", None)
        if dtype is not None and not _triton_compile.has_type(dtype):
            raise TypeError(f"{what}: `{name}` is of {dtype}, of which Triton has no arrays.")
    inside = (0 <= n <= most for n, most in zip(grid, MOST_PROGRAMS, strict=False))
    if not 1 <= len(grid) <= 3 or not all(inside):
        raise ValueError(
            f"{what}: `grid` must have one to three axes, of at most {MOST_PROGRAMS} programs; "
            f"got {tuple(grid)}."
        )
    if lost := [i for i in zeroed if i not in range(len(outputs))]:
        raise ValueError(f"{what}: `zeroed` names the outputs {lost}; there are {len(outputs)}.")
    _check_aliases(what, inputs, outputs, aliases)


def _check_names(
    what: str, names: Sequence[str], num_in: int, num_out: int, constants: Mapping[str, Any]
) -> None:
    given = f"got {num_in} inputs, {num_out} outputs and the constants {sorted(constants)}"
    rest = names[num_in + num_out :]
    if num_in + num_out > len(names):
        problem = "fewer than those"
    elif missing := [name for name in rest if name not in constants]:
        problem = f"`{missing[0]}` is missing"
    elif unknown := [name for name in constants if name not in rest]:
        problem = f"`{unknown[0]}` is none of the last ones"
    else:
        return
    raise TypeError(
        f"{what}: {given}; the kernel's parameters, in that order, are {list(names)}: {problem}."
    )


def _check_aliases(
    what: str, inputs: Sequence[Any], outputs: Sequence[Any], aliases: Mapping[int, int]
) -> None:
    if len(set(aliases.values())) < len(aliases):
        raise ValueError(f"{what}: `aliases` gives one output to two inputs; got {dict(aliases)}.")
    for i, o in aliases.items():
        array, output = _kind(inputs, i), _kind(outputs, o)
        if array is None or array != output:
            raise ValueError(
                f"{what}: `aliases` must map an array to an output of its shape and dtype; input "
                f"{i} is {array or 'no array'}, output {o} is {output or 'absent'}."
            )


def _kind(values: Sequence[Any], index: int) -> str | None:
    value = values[index] if index in range(len(values)) else None
    if not hasattr(value, "dtype"):
        return None
    return f"{jnp.dtype(value.dtype).name}{list(value.shape)}"
