"""A Triton kernel's arguments as trees, whose inner nodes are bundles (NamedTuples).

A leaf is an `Array`, an `Output`, an int, an `Exact` compile-time value, or None if it is absent.
The path of a leaf is its names from the kernel's parameter on, such as ("scores", "bias", "base").
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Array:
    """A pointer to one of the arrays of a launch."""

    index: int


@dataclasses.dataclass(frozen=True)
class Output:
    """A pointer to one of the outputs of a launch."""

    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class Exact:
    """A compile-time value: 1, 1.0 and True make three kernels, and so do 0.0 and -0.0."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Exact) or type(self.value) is not type(other.value):
            return False
        a, b = self.value, other.value
        return repr(a) == repr(b) and bool(a is b or a == b or a != a)  # the last: nan

    def __hash__(self) -> int:
        return hash((type(self.value), repr(self.value)))


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A NamedTuple whose members are trees."""

    kind: Any
    members: tuple[Any, ...]


def is_bundle(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def constant_members(kind: Any) -> frozenset[str]:
    """The members of a NamedTuple that its class annotates with `tl.constexpr`."""
    found = getattr(kind, "__annotations__", {}).items()
    name = lambda annotation: getattr(annotation, "__name__", str(annotation))
    return frozenset(field for field, annotation in found if name(annotation).endswith("constexpr"))


def exact(value: Any) -> Exact | None:
    """A compile-time value; an absent one is None, as an absent array is."""
    if value is None:
        return None
    return Exact(value.item() if isinstance(value, np.generic) else value)


def given(value: Any, path: Path, constant: bool = False) -> Iterator[tuple[Path, Any, bool]]:
    """Path, value and whether it is a compile-time value, for each leaf of a caller's argument."""
    if not is_bundle(value):
        yield path, value, constant
        return
    constants = constant_members(type(value))
    for field, member in zip(value._fields, value, strict=True):
        yield from given(member, (*path, field), constant or field in constants)


def tree(value: Any, leaf: Callable[[Any], Any], constant: bool = False) -> Any:
    """The tree of a caller's argument; `leaf` makes the leaves that are no compile-time values."""
    if not is_bundle(value):
        return exact(value) if constant else leaf(value)
    constants = constant_members(type(value))
    members = (
        tree(member, leaf, constant or field in constants)
        for field, member in zip(value._fields, value, strict=True)
    )
    return Bundle(type(value), tuple(members))


def leaves(parameter: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if not isinstance(parameter, Bundle):
        yield path, parameter
        return
    for field, member in zip(parameter.kind._fields, parameter.members, strict=True):
        yield from leaves(member, (*path, field))


def all_leaves(names: Sequence[str], parameters: Sequence[Any]) -> Iterator[tuple[Path, Any]]:
    """Paths and leaves of all parameters of a kernel, in its order."""
    for name, parameter in zip(names, parameters, strict=True):
        yield from leaves(parameter, (name,))


def replaced(parameter: Any, leaf: Callable[[Any], Any]) -> Any:
    """A tree of the same bundles with other leaves."""
    if not isinstance(parameter, Bundle):
        return leaf(parameter)
    return Bundle(parameter.kind, tuple(replaced(m, leaf) for m in parameter.members))


def named_tuples(parameter: Any) -> Any:
    """A tree with its bundles as the NamedTuples that kernels see."""
    if not isinstance(parameter, Bundle):
        return parameter
    return parameter.kind(*(named_tuples(member) for member in parameter.members))


def constants(names: Sequence[str], parameters: Sequence[Any]) -> dict[str, Any]:
    """The compile-time values of a kernel by their dotted paths."""
    found = all_leaves(names, parameters)
    return {".".join(path): x.value for path, x in found if isinstance(x, Exact)}


def unspecialised(kernel: Any, path: Path) -> bool:
    """Whether `do_not_specialize` of a kernel names an int or a bundle that it is in."""
    names = getattr(kernel, "do_not_specialize", None) or ()
    index = kernel.arg_names.index(path[0]) if path[0] in kernel.arg_names else None
    prefixes = {".".join(path[: i + 1]) for i in range(len(path))}
    return any(name in prefixes or name == index for name in names)


def folded(kernel: Any, path: Path, value: Any) -> bool:
    """Whether an int is compiled in: 1 is, so that a stride of 1 is known to be contiguous."""
    return is_int(value) and value == 1 and not unspecialised(kernel, path)
