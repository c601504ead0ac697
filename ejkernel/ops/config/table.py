"""Configurations that ship with the package, one file per device and op.

An exact or bucketed hit counts as measured; the nearest shape and a sibling device are guesses.
"""

import functools
import importlib.resources
import json
import logging
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from ejkernel.ops.config.cache import Stored
from ejkernel.ops.core.kernel import Implementation, Invocation

logger = logging.getLogger("ejkernel")

# A nearest shape further than this (sum of log2 ratios of all axes) says nothing.
_FAR = 6.0


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


def known(inv: Invocation, able: Sequence[Implementation]) -> Stored | None:
    """The row of this very call, or of one that differs only within powers of two."""
    mine = inv.document
    found = rows(_model(inv), inv.kernel.name)
    for match in (lambda call: call, _bucketed):
        for row in found:
            if match(_call(row.call)) == match(_call(mine)) and (stored := _stored(inv, row, able)):
                return stored
    return None


def near(inv: Invocation, able: Sequence[Implementation]) -> Stored | None:
    """The row of the nearest shape on this device, else on a device of the same architecture."""
    mine = _call(inv.document)
    for device in (_model(inv), *_siblings(inv)):
        ranked = sorted(
            ((distance, i) for i, row in enumerate(rows(device, inv.kernel.name))
             if (distance := _distance(_call(row.call), mine)) <= _FAR)
        )  # fmt: skip
        for _, index in ranked:
            if stored := _stored(inv, rows(device, inv.kernel.name)[index], able):
                return stored
    return None


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

    def shapeless(call: dict[str, Any]) -> dict[str, Any]:
        arrays = {n: {**x, "shape": len(x["shape"])} for n, x in call["arrays"].items()}
        return {**call, "arrays": arrays}

    if shapeless(a) != shapeless(b):
        return math.inf
    total = 0.0
    for name, array in a["arrays"].items():
        for m, n in zip(array["shape"], b["arrays"][name]["shape"], strict=True):
            total += abs(math.log2(max(m, 1) / max(n, 1)))
    return total


def _stored(inv: Invocation, row: Row, able: Sequence[Implementation]) -> Stored | None:
    """What a row says, if its kernel can serve the call in that version and configuration."""
    for implementation in able:
        if (implementation.name, implementation.version) == (row.implementation, row.version):
            try:
                config = implementation.decode(inv.call, inv.direction, row.config)
            except Exception as error:  # noqa: BLE001 - a table must not stop a call
                logger.warning("a shipped configuration does not hold: %s", error)
                return None
            if (why := implementation.misfit(inv.call, inv.direction, config)) is not None:
                logger.debug("a shipped configuration is for other calls: %s", why)
                return None
            return Stored(row.implementation, row.version, config, row.times_ms, rivals=row.rivals)
    return None
