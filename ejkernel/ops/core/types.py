"""Type variables, the arguments of a call, and the portable block parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self, TypeVar

import jax
import numpy as np

Cfg = TypeVar("Cfg")
Out = TypeVar("Out")


def is_array(x: Any) -> bool:
    """Whether a value is data of a call; anything else is an option."""
    return isinstance(x, jax.Array | np.ndarray)


class AbstractArgs:
    """The arguments of one call: a pytree whose leaves are its arrays; options are static."""

    def arrays(self) -> dict[str, jax.Array]:
        """The arrays that are present, by name, in a fixed order."""
        raise NotImplementedError

    def statics(self) -> dict[str, Any]:
        """The options, by name."""
        raise NotImplementedError

    def with_arrays(self, arrays: Mapping[str, Any]) -> Self:
        """The same call with the named arrays exchanged; the others stay."""
        raise NotImplementedError


@jax.tree_util.register_pytree_node_class
class CallArgs(AbstractArgs):
    """Positional and keyword arguments of a user's own kernel."""

    def __init__(self, leaves: list[Any], treedef: Any, options: tuple[tuple[int, Any], ...]):
        self._leaves, self._treedef, self._options = leaves, treedef, options

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "CallArgs":
        leaves, treedef = jax.tree.flatten((args, dict(kwargs)))
        options = tuple((i, leaf) for i, leaf in enumerate(leaves) if not is_array(leaf))
        return cls([leaf for leaf in leaves if is_array(leaf)], treedef, options)

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments as the user wrote them."""
        leaves = list(self._leaves)
        for index, value in self._options:
            leaves.insert(index, value)
        return jax.tree.unflatten(self._treedef, leaves)

    def arrays(self) -> dict[str, jax.Array]:
        return {str(i): leaf for i, leaf in enumerate(self._leaves)}

    def statics(self) -> dict[str, Any]:
        return {"structure": str(self._treedef), **{str(i): v for i, v in self._options}}

    def with_arrays(self, arrays: Mapping[str, Any]) -> "CallArgs":
        leaves = [arrays.get(str(i), leaf) for i, leaf in enumerate(self._leaves)]
        return CallArgs(leaves, self._treedef, self._options)

    def tree_flatten(self):
        return self._leaves, (self._treedef, self._options)

    @classmethod
    def tree_unflatten(cls, aux, leaves):
        return cls(list(leaves), *aux)


@dataclasses.dataclass(frozen=True)
class _BlockParams:
    """Block sizes of one direction in the portable spelling; None keeps the heuristic's value."""

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"`{type(self).__name__}`: `{field.name}` must be a positive int or None; "
                    f"got {value!r}."
                )

    def settings(self) -> dict[str, int]:
        """The given values under the names entry configs use."""
        names = {"q_blocksize": "block_q", "kv_blocksize": "block_k"}
        given = {names.get(f.name, f.name): getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in given.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class FwdParams(_BlockParams):
    """Block sizes for a forward kernel."""


@dataclasses.dataclass(frozen=True)
class BwdParams(_BlockParams):
    """Block sizes for a backward kernel."""
