"""Recorded invocations, and the kernels they name."""

import dataclasses
import json
import logging
import os
import pathlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax

from ejkernel import _folders
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.utils import fingerprint

logger = logging.getLogger("ejkernel")

_OWNER = "ejkernel recorded calls"
_recorded: dict[str, Invocation] = {}
_resolvers: list[Callable[[str], Kernel | None]] = []
_kernels: "weakref.WeakValueDictionary[str, Kernel]" = weakref.WeakValueDictionary()


def record_invocation(kernel: Kernel, inv: Invocation) -> None:
    """Keeps one call for a later tuning run: shapes and options, no data; equal calls once."""
    if inv.kernel is not kernel:
        raise ValueError(f"`record_invocation`: {inv.kernel.name!r} is not {kernel.name!r}.")
    avals = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inv.call.arrays().items()}
    abstract = dataclasses.replace(inv, call=inv.call.with_arrays(avals), metadata={})
    # the key of the call itself: it knows the precision and shardings of the moment
    for made, of in ((abstract, inv), (abstract.keyed, inv.keyed)):
        for name in ("document", "key"):
            made.__dict__[name] = getattr(of, name)
    _recorded[inv.key] = abstract
    _kernels[kernel.name] = kernel


def get_invocations() -> list[Invocation]:
    """The recorded calls, oldest first."""
    return list(_recorded.values())


def clear_invocations() -> None:
    """Forgets all recorded calls."""
    _recorded.clear()


def save_invocations(path: str | os.PathLike[str]) -> int:
    """Writes the recorded calls to a file, for `ejkernel tune --recorded`; how many there are."""
    calls = [inv.document for inv in get_invocations()]
    document = {"owner": _OWNER, "schema": fingerprint.SCHEMA, "calls": calls}
    _folders.write_whole(path, json.dumps(document, indent=1) + "\n")
    return len(calls)


def load_calls(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The calls in a file of `save_invocations`, as documents; ValueError where it is none."""
    try:
        found = json.loads(pathlib.Path(path).read_text())
        mine = (found["owner"], found["schema"]) == (_OWNER, fingerprint.SCHEMA)
        calls = list(found["calls"])
        named = all(isinstance(call["op"], str) for call in calls)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no recorded calls: {error!r}") from None
    if not mine or not named:
        raise ValueError(f"{path} holds no recorded calls of this version")
    return calls


def remember_kernel(kernel: Kernel) -> None:
    """Makes a kernel known by name, so that a label can be turned back into a call."""
    _kernels[kernel.name] = kernel


def add_resolver(resolve: Callable[[str], Kernel | None]) -> None:
    """Adds a way to find kernels by name that have not been used yet in this process."""
    _resolvers.append(resolve)


def kernel_named(name: str) -> Kernel | None:
    """A kernel that is alive, or that a resolver makes."""
    found = _kernels.get(name)
    for resolve in _resolvers if found is None else ():
        found = found or resolve(name)
    return found


def from_labels(labels: Iterable[Any]) -> list[Invocation]:
    """The calls that json stamps in a program describe, for kernels known in this process."""
    made = []
    for item in labels:
        # of the op whose key the call has, which need not be the op that was called
        kernel = kernel_named(item.document["call"]["op"]) if item.document is not None else None
        if kernel is not None and type(kernel).restore is not Kernel.restore:
            made.append(kernel.restore(item.document["call"]))
        elif item.document is not None:
            logger.warning("a program has calls of %r, which cannot be restored here", item.name)
    return made
