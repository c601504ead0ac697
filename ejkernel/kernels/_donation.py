"""Ops that write into an argument: outside a jit it is copied with a warning, or given away."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ejkernel.errors import EjkernelWarning


@dataclasses.dataclass(frozen=True)
class Work:
    """A computation on a call; the token alone tells two of them apart."""

    token: Any
    compute: Callable[[dict[str, Any]], Any] = dataclasses.field(compare=False)


def run(op: str, written: tuple[str, ...], call: dict[str, Any], work: Work) -> Any:
    """The result of a call; outside a jit the arrays `written` are copied or given away."""
    given = call["donate_cache"]
    if not isinstance(given, bool | np.bool_):
        return work.compute(call)  # the check of types says more
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(call)):
        return work.compute(call)
    if not given:
        warnings.warn(
            f"`{op}`: outside a jit the whole cache is copied; call it inside a jit that donates "
            "the cache, or pass `donate_cache=True`.",
            EjkernelWarning,
            stacklevel=5,  # the caller of the public function
        )
        return work.compute(call)
    arrays = {n: x for n, x in call.items() if isinstance(x, jax.Array | np.ndarray)}
    given = {name: arrays.pop(name) for name in written}
    options = tuple((n, type(x), x) for n, x in call.items() if n not in arrays | given)
    try:
        program = _program(work, options)
    except TypeError:  # an option that cannot be hashed: nothing to remember the program by
        program = _program.__wrapped__(work, options)
    return program(given, arrays)


@functools.lru_cache(maxsize=64)
def _program(work: Work, options: tuple[tuple[str, type, Any], ...]) -> Callable[..., Any]:
    """A jitted computation with its options that takes the arrays of its first argument over."""

    def program(given: dict[str, Any], others: dict[str, Any]) -> Any:
        return work.compute(given | others | {name: value for name, _, value in options})

    return jax.jit(program, donate_argnums=0)


def refuse(op: str, call: dict[str, Any]) -> None:
    """An executor may time a call, and runs it from arrays that it does not own."""
    if call["donate_cache"]:
        raise ValueError(
            f"`{op}`: an executor does not give arrays away; pass `donate_cache=True` to the "
            "function, or donate in a jit of your own."
        )
