"""Which function carries out an instruction."""

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

# The block, the operands, the parts of the opcode that the pattern names, and which threads run it
# (None for all).
Handler = Callable[[Any, Any, dict[str, Any], np.ndarray | None], None]
_HANDLERS: list[tuple[re.Pattern[str], Handler]] = []

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


def handles(pattern: str) -> Callable[[Handler], Handler]:
    """Registers a function for the opcodes that a pattern matches from end to end.

    The whole opcode must match, so that a modifier nobody thought of is never passed over.
    """

    def register(handler: Handler) -> Handler:
        _HANDLERS.append((re.compile(pattern), handler))
        return handler

    return register


@functools.cache
def find(opcode: str) -> tuple[Handler, dict[str, Any]] | None:
    """The function for an opcode and what its pattern found; None if nobody knows it."""
    for pattern, handler in _HANDLERS:
        if (match := pattern.fullmatch(opcode)) is not None:
            options: dict[str, Any] = match.groupdict()
            if "type" in options:
                options |= {"signed": options["type"][0] == "s", "bits": bits(options["type"])}
            return handler, options
    return None


def bits(kind: str) -> int:
    """The width of a type such as "s32"."""
    return int("".join(filter(str.isdigit, kind)))


def as_kind(value: np.ndarray, signed: bool) -> np.ndarray:
    """Bits as signed numbers, or as they are."""
    return value.view(SIGNED[8 * value.itemsize]) if signed else value
