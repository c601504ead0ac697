"""Rows of tuned calls, which ship with the package (one file per device and op) or are the user's.

The row of the very call or of a near one counts as measured; a farther shipped row and one of a
sibling device are guesses.
"""

import functools
import importlib.resources
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ejkernel.ops.config.cache import Stored
from ejkernel.ops.core.kernel import Implementation, Invocation

logger = logging.getLogger("ejkernel")

# A shape further than this (sum of log2 ratios of all axes) is no guess.
_FAR = 6.0
# The axes in which a near call may differ, this many times: batch, lengths, tokens and rows of a
# matrix, pages, blocks. The others (heads, head sizes, page sizes, features) must be equal.
_NEAR_AXES = frozenset({"b", "t", "s", "m", "p", "nq", "nk", "nnz", "columns"})
_NEAR = 4.0


class Row(msgspec.Struct, frozen=True):
    """One tuned call: what it was, and what was best."""

    call: dict[str, Any]
    implementation: str
    version: int
    config: Any
    times_ms: dict[str, float] = {}
    rivals: dict[str, int] = {}


@functools.cache
def rows(device: str, op: str) -> tuple[Row, ...]:
    """The shipped rows of an op on a device."""
    folder = importlib.resources.files("ejkernel") / "data" / "tuned" / slug(device)
    try:
        text = (folder / f"{op}.json").read_text()
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple(msgspec.convert(json.loads(text), list[Row]))


def slug(device: str) -> str:
    """The folder of a device: its model in lower case."""
    return "".join(c if c.isalnum() else "_" for c in device.lower()).strip("_")


def exact(inv: Invocation, able: Sequence[Implementation]) -> Stored | None:
    """What the shipped row of this very call says."""
    mine, device = _call(inv.document), _model(inv)
    for row in rows(device, inv.op):
        if _call(row.call) == mine and (stored := _stored(inv, row, able, _shipped(device))):
            return stored
    return None


def near(
    inv: Invocation,
    able: Sequence[Implementation],
    own: Sequence[Any] = (),
    holds: Callable[[Stored], bool] = lambda stored: True,
) -> Stored | None:
    """What the nearest row that counts as measured says: near in the axes that have names, or
    different only within powers of two.

    Args:
      inv: The call.
      able: The implementations that can serve it.
      own: The user's rows of this op and device; of rows as near as each other, these go first.
      holds: Whether a row is up to date.
    """
    mine, device = _call(inv.document), _model(inv)
    layout = inv.keyed.kernel.layout(inv.keyed.call)
    axes = None if layout is None else layout.arrays
    shipped = rows(device, inv.op)
    if axes is None:  # sizes that nobody names may be those of heads
        own = ()

    def counts(row: Any) -> bool:
        call = _call(row.call)
        return _is_near(call, mine, axes) or _bucketed(call) == _bucketed(mine)

    sources = [(row, "near row of the user's cache") for row in own]
    sources += [(row, f"near {_shipped(device)}") for row in shipped]
    measured = ((row, origin) for row, origin in sources if counts(row))
    found = _nearest(inv, measured, able)
    return next((stored for stored in found if holds(stored)), None)


def guess(inv: Invocation, able: Sequence[Implementation]) -> Stored | None:
    """The row of the nearest shape on this device, else on a device of the same architecture."""
    for device in (_model(inv), *_siblings(inv)):
        shipped = ((row, _shipped(device)) for row in rows(device, inv.op))
        if (stored := next(_nearest(inv, shipped, able, _FAR), None)) is not None:
            return stored
    return None


def _shipped(device: str) -> str:
    return f"row of the table shipped for {device}"


def _nearest(
    inv: Invocation,
    found: Iterator[tuple[Any, str]],
    able: Sequence[Implementation],
    most: float = math.inf,
) -> Iterator[Stored]:
    """What rows at most so far say, the nearest first; the order given breaks ties."""
    mine = _call(inv.document)
    ranked = ((_distance(_call(row.call), mine), row, origin) for row, origin in found)
    for distance, row, origin in sorted(ranked, key=lambda item: item[0]):
        if distance <= most and (stored := _stored(inv, row, able, origin)) is not None:
            yield stored


def _model(inv: Invocation) -> str:
    return inv.target.model if inv.target is not None else "cpu"


@functools.cache
def _devices() -> tuple[dict[str, Any], ...]:
    folder = importlib.resources.files("ejkernel") / "data" / "tuned"
    try:
        return tuple(json.loads((folder / "devices.json").read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return ()


def _siblings(inv: Invocation) -> list[str]:
    """Shipped devices of the same kind and capability."""
    if inv.target is None or inv.target.kind == "cpu":
        return []
    return [
        d["model"]
        for d in _devices()
        if (d["kind"], d.get("capability")) == (inv.target.kind, inv.target.capability)
        and d["model"] != inv.target.model
    ]


def _call(document: dict[str, Any]) -> dict[str, Any]:
    """What identifies a call besides the device."""
    return {k: v for k, v in document.items() if k not in ("device", "schema", "platform")}


def _bucketed(call: dict[str, Any]) -> dict[str, Any]:
    """The call with every size rounded up to a power of two."""
    arrays = {
        name: {**array, "shape": [_power(n) for n in array["shape"]]}
        for name, array in call["arrays"].items()
    }
    return {**call, "arrays": arrays}


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Sum of log2 ratios of all sizes; infinite when anything but sizes differs."""
    if _shapeless(a) != _shapeless(b):
        return math.inf
    return sum(_apart(m, n) for _, _, m, n in _sizes(a, b))


def _shapeless(call: dict[str, Any]) -> dict[str, Any]:
    arrays = {n: {**x, "shape": len(x["shape"])} for n, x in call["arrays"].items()}
    return {**call, "arrays": arrays}


def _sizes(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    """Array, axis and both sizes, of calls that differ in sizes alone."""
    for name, array in a["arrays"].items():
        pairs = zip(array["shape"], b["arrays"][name]["shape"], strict=True)
        yield from ((name, axis, m, n) for axis, (m, n) in enumerate(pairs))


def _apart(m: int, n: int) -> float:
    return abs(math.log2(max(m, 1) / max(n, 1)))


def _is_near(
    a: dict[str, Any], b: dict[str, Any], axes: Mapping[str, Sequence[str]] | None
) -> bool:
    """Whether calls differ only in batch, lengths, tokens and pages, each within `_NEAR` times."""
    if axes is None or _shapeless(a) != _shapeless(b) or _broadcast(a, axes) != _broadcast(b, axes):
        return False

    def may_differ(name: str, axis: int) -> bool:
        # an array of lengths or ids begins with a number of sequences or tokens, whatever its
        # letter; `n` is tokens where it comes first, and features in a product of matrices
        integers = a["arrays"][name]["dtype"].startswith(("int", "uint"))
        counted = axis == 0 and (integers or axes[name][0] == "n")
        return counted or axes[name][axis] in _NEAR_AXES

    return all(
        m == n or (may_differ(name, axis) and _apart(m, n) <= math.log2(_NEAR))
        for name, axis, m, n in _sizes(a, b)
    )


def _broadcast(call: dict[str, Any], axes: Mapping[str, Sequence[str]]) -> list[tuple[str, int]]:
    """Where an array has 1 for an axis that is longer in another array, as a bias may."""
    full: dict[str, int] = {}
    for name, array in call["arrays"].items():
        for axis, size in zip(axes[name], array["shape"], strict=True):
            full[axis] = max(full.get(axis, 1), size)
    return [
        (name, index)
        for name, array in call["arrays"].items()
        for index, size in enumerate(array["shape"])
        if size == 1 < full[axes[name][index]]
    ]


def _stored(
    inv: Invocation, row: Any, able: Sequence[Implementation], origin: str
) -> Stored | None:
    """What a row says, if its kernel can serve the call in that version and configuration."""
    for implementation in able:
        if (implementation.name, implementation.version) == (row.implementation, row.version):
            try:
                config = implementation.decode(inv.call, inv.direction, row.config)
            except Exception as error:  # noqa: BLE001 - a table must not stop a call
                logger.warning("the configuration of a %s does not hold: %s", origin, error)
                return None
            if (why := implementation.misfit(inv.call, inv.direction, config)) is not None:
                logger.debug("the configuration of a %s is for other calls: %s", origin, why)
                return None
            shapes = (f"{n}={x['dtype']}{x['shape']}" for n, x in row.call["arrays"].items())
            said = (row.implementation, row.version, config, row.times_ms)
            return Stored(*said, rivals=row.rivals, row=f"{origin}: {', '.join(shapes)}")
    return None
