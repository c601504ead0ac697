"""Refuses calls of kernels that would touch foreign memory, or fail without a word."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.callib import _triton_arguments as arguments
from ejkernel.callib import _triton_compile

MOST_PROGRAMS = (2**31 - 1, 65535, 65535)  # along each axis of a grid


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """What a caller binds to a kernel's parameters."""

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    zeroed: Sequence[str]
    aliases: Mapping[str, str]
    constants: Mapping[str, Any]


def constant_parameters(kernel: Any) -> frozenset[str]:
    """The parameters of a kernel that it annotates with `tl.constexpr`."""
    found = getattr(kernel.fn, "__annotations__", {}).items()
    name = lambda annotation: getattr(annotation, "__name__", str(annotation))
    return frozenset(n for n, annotation in found if name(annotation).endswith("constexpr"))


def check(kernel: Any, given: Given, grid: Sequence[int]) -> None:
    """Raises, with the name of the kernel and of what is wrong."""
    what = _name(kernel)
    for name, value, kind, words in (
        ("inputs", given.inputs, Mapping, "map names of the kernel's parameters to values"),
        ("outputs", given.outputs, Mapping, "map names of the kernel's parameters to shapes"),
        ("aliases", given.aliases, Mapping, "map names of outputs to names of inputs"),
        ("grid", grid, Sequence, "be a sequence"),
        ("zeroed", given.zeroed, Sequence, "be a sequence of names"),
    ):
        if not isinstance(value, kind) or isinstance(value, str):
            raise TypeError(f"{what}: `{name}` must {words}; got {value!r}.")
    _check_names(what, kernel, given)
    _check_order(what, kernel, given)
    for name, value in given.constants.items():
        _check_hashable(what, f"the constant `{name}`", value)
    for name, output in given.outputs.items():
        if output is None:
            continue
        if not (hasattr(output, "shape") and hasattr(output, "dtype")):
            raise TypeError(
                f"{what}: the output `{name}` must be a jax.ShapeDtypeStruct or None; got "
                f"{output!r}."
            )
        _check_dtype(what, name, output.dtype)
    for name, value in given.inputs.items():
        for path, leaf, constant in arguments.given(value, (name,)):
            _check_leaf(what, ".".join(path), leaf, constant)
    inside = (_is_int(n) and 0 <= n <= most for n, most in zip(grid, MOST_PROGRAMS, strict=False))
    if not 1 <= len(grid) <= 3 or not all(inside):
        raise ValueError(
            f"{what}: `grid` must be one to three ints, of at most {MOST_PROGRAMS} programs; "
            f"got {tuple(grid)}."
        )
    if lost := [name for name in given.zeroed if name not in given.outputs]:
        raise ValueError(f"{what}: `zeroed` names {lost}; the outputs are {sorted(given.outputs)}.")
    _check_aliases(what, given)


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


_is_int = arguments.is_int


_TAKEN = ("type", "values")  # attributes of the tuples that Triton's compiler makes of bundles


def _check_leaf(what: str, name: str, value: Any, constant: bool) -> None:
    if taken := [part for part in name.split(".")[1:] if part in _TAKEN]:
        raise TypeError(f"{what}: `{name}` has the name {taken[0]!r}, which Triton needs itself.")
    if constant:
        _check_hashable(what, f"the constant `{name}`", value)
        return
    if isinstance(value, bool | float | complex | str):
        raise TypeError(
            f"{what}: `{name}` must be an array, an int or None; got {value!r}. Pass an array, "
            "or make it a `tl.constexpr`."
        )
    if _is_int(value) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{what}: `{name}` must fit 64 bits; got {value}.")
    dtype = getattr(value, "dtype", None)
    if isinstance(value, list | tuple):
        dtype = np.asarray(value).dtype
    if dtype is not None:
        _check_dtype(what, name, dtype)


def _check_dtype(what: str, name: str, dtype: Any) -> None:
    if not _triton_compile.has_type(dtype):
        raise TypeError(f"{what}: `{name}` is of {dtype}, of which Triton has no arrays.")


def _check_names(what: str, kernel: Any, given: Given) -> None:
    names, fixed = list(kernel.arg_names), constant_parameters(kernel)
    parts = {"inputs": given.inputs, "outputs": given.outputs, "constants": given.constants}
    bound = [name for part in parts.values() for name in part]
    problem = None
    if unknown := [name for name in bound if name not in names]:
        problem = f"`{unknown[0]}` is none of them"
    elif missing := [name for name in names if name not in bound]:
        problem = f"`{missing[0]}` is missing"
    elif twice := [name for name in names if bound.count(name) > 1]:
        problem = f"`{twice[0]}` is given twice"
    elif wrong := [name for name in names if (name in given.constants) != (name in fixed)]:
        problem = (
            f"`{wrong[0]}` is {'a' if wrong[0] in fixed else 'no'} `tl.constexpr` of the kernel"
        )
    if problem:
        got = ", ".join(f"{part} {list(values)}" for part, values in parts.items())
        raise TypeError(f"{what}: got {got}; the kernel's parameters are {names}: {problem}.")
    for name in getattr(kernel, "do_not_specialize", None) or ():
        if isinstance(name, str) and name.split(".")[0] not in names:
            raise ValueError(
                f"{what}: `do_not_specialize` names {name!r}; the kernel's parameters are {names}."
            )


def _check_order(what: str, kernel: Any, given: Given) -> None:
    """A launch takes the memory of all arrays, then that of all outputs."""
    outputs = [name for name in kernel.arg_names if given.outputs.get(name) is not None]
    if not outputs:
        return
    for name in kernel.arg_names[kernel.arg_names.index(outputs[0]) :]:
        leaves = arguments.given(given.inputs.get(name), (name,))
        arrays = (x for _, x, constant in leaves if not (constant or arguments.is_int(x)))
        if any(hasattr(x, "shape") for x in arrays):
            raise ValueError(
                f"{what}: the array `{name}` comes after the output `{outputs[0]}` among the "
                "kernel's parameters. Move the outputs behind the inputs."
            )


def _check_aliases(what: str, given: Given) -> None:
    if len(set(given.aliases.values())) < len(given.aliases):
        raise ValueError(
            f"{what}: `aliases` gives one input to two outputs; got {dict(given.aliases)}."
        )
    found = {
        ".".join(path): leaf
        for name, value in given.inputs.items()
        for path, leaf, constant in arguments.given(value, (name,))
        if not constant
    }
    for out, path in given.aliases.items():
        array, output = _kind(found.get(path)), _kind(given.outputs.get(out))
        if array is None or array != output:
            raise ValueError(
                f"{what}: `aliases` must map an output to an array of its shape and dtype; output "
                f"`{out}` is {output or 'absent'}, input `{path}` is {array or 'no array'}."
            )


def _kind(value: Any) -> str | None:
    if not hasattr(value, "dtype"):
        return None
    return f"{jnp.dtype(value.dtype).name}{list(value.shape)}"
