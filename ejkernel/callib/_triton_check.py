"""Refuses calls of kernels that would touch foreign memory, or fail without a word."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

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
    what = _name(kernel)
    names = list(kernel.arg_names)
    for name, given in (("grid", grid), ("out_shape", outputs), ("zeroed", zeroed)):
        if not isinstance(given, Sequence):
            raise TypeError(f"{what}: `{name}` must be a sequence; got {given!r}.")
    for i, output in enumerate(outputs):
        if output is not None and not (hasattr(output, "shape") and hasattr(output, "dtype")):
            raise TypeError(
                f"{what}: `out_shape[{i}]` must be a jax.ShapeDtypeStruct or None; got {output!r}."
            )
    _check_names(what, names, len(inputs), len(outputs), constants)
    for name, value in constants.items():
        _check_hashable(what, f"the constant `{name}`", value)
    _check_inputs(what, kernel, inputs)
    for name, value in zip(names, (*inputs, *outputs), strict=False):
        dtype = getattr(value, "dtype", None)
        if isinstance(value, list | tuple):
            dtype = np.asarray(value).dtype
        if dtype is not None and not _triton_compile.has_type(dtype):
            raise TypeError(f"{what}: `{name}` is of {dtype}, of which Triton has no arrays.")
    inside = (_is_int(n) and 0 <= n <= most for n, most in zip(grid, MOST_PROGRAMS, strict=False))
    if not 1 <= len(grid) <= 3 or not all(inside):
        raise ValueError(
            f"{what}: `grid` must be one to three ints, of at most {MOST_PROGRAMS} programs; "
            f"got {tuple(grid)}."
        )
    if lost := [i for i in zeroed if i not in range(len(outputs))]:
        raise ValueError(f"{what}: `zeroed` names the outputs {lost}; there are {len(outputs)}.")
    _check_aliases(what, inputs, outputs, aliases)


def check_options(kernel: Any, settings: Mapping[str, int], options: Mapping[str, Any]) -> None:
    """Refuses options that nothing would act on."""
    what = _name(kernel)
    warps, stages = settings["num_warps"], settings["num_stages"]
    if not _is_int(warps) or warps not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"{what}: `num_warps` must be a power of two up to 32; got {warps!r}.")
    if not _is_int(stages) or stages < 1:
        raise ValueError(f"{what}: `num_stages` must be an int, at least 1; got {stages!r}.")
    if not options:
        return
    if twice := sorted(settings.keys() & options.keys()):
        raise ValueError(f"{what}: {twice} are arguments, and none of `options`.")
    known = _triton_compile.known_options("cuda") | _triton_compile.known_options("hip")
    if unknown := sorted(options.keys() - known):
        raise ValueError(
            f"{what}: `options` has {unknown}, which Triton's compiler does not know; it knows "
            f"{sorted(known - settings.keys() - _NOT_LAUNCHED.keys())}."
        )
    for name, value in options.items():
        _check_hashable(what, f"the option `{name}`", value)
    for name, plain in _NOT_LAUNCHED.items():
        if options.get(name, plain) != plain:
            raise ValueError(
                f"{what}: `options` has {name}={options[name]!r}; JAX launches kernels with "
                f"{name}={plain!r} only."
            )


# options that a launch has to know of, and what JAX's launches are like
_NOT_LAUNCHED = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False}


def _name(kernel: Any) -> str:
    inner = getattr(kernel, "fn", None)
    if hasattr(inner, "arg_names"):
        raise TypeError(
            f"`triton_call`: `kernel` must be made by `triton.jit` alone; got {kernel!r} around "
            "one. Pass its `.fn`, with the settings that it would choose."
        )
    if not hasattr(kernel, "arg_names") or inner is None:
        raise TypeError(f"`triton_call`: `kernel` must be made by `triton.jit`; got {kernel!r}.")
    return f"`triton_call({inner.__name__})`"


def _check_hashable(what: str, name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{what}: {name} must be hashable; got {value!r}. Pass a tuple in place of a list, and "
            "an array as an input."
        ) from None


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_inputs(what: str, kernel: Any, inputs: Sequence[Any]) -> None:
    params = getattr(kernel, "params", ())
    fixed = {p.name for p in params if p.is_constexpr}
    for name, value in zip(kernel.arg_names, inputs, strict=False):
        if isinstance(value, bool | float | complex):
            raise TypeError(
                f"{what}: `{name}` must be an array, an int or None; got {value!r}. Pass an array, "
                "or make it a `tl.constexpr`."
            )
        if name in fixed and value is not None:
            raise TypeError(
                f"{what}: `{name}` is a `tl.constexpr` of the kernel, and no input; got {value!r}. "
                "Constants come behind the outputs, and are given by name."
            )
        if _is_int(value) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{what}: `{name}` must fit 64 bits; got {value}.")


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
