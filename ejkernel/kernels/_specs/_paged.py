"""Checks of concrete lengths, tables and slots, for `EJKERNEL_DEBUG`; each names a culprit."""

from typing import Any

import numpy as np

from ejkernel.kernels import _spec


def concrete(values: dict[str, Any], *names: str) -> list[np.ndarray] | None:
    """Arguments as NumPy arrays; None when one of them is not known."""
    arrays = [x for name in names if (x := _spec.known(values[name])) is not None]
    return arrays if len(arrays) == len(names) else None


def first(bad: np.ndarray) -> int | None:
    """Index of the first True of a vector."""
    return int(bad.argmax()) if bad.any() else None


def repeated(slots: np.ndarray) -> tuple[int, int] | None:
    """Two places with one slot; negative slots do not count."""
    order = np.argsort(slots, kind="stable")
    again = (np.diff(slots[order]) == 0) & (slots[order][1:] >= 0)
    at = first(again)
    return None if at is None else (int(order[at]), int(order[at + 1]))


def check_tables(
    op: str, name: str, lens: np.ndarray, tables: np.ndarray, pages: tuple[int, int]
) -> None:
    """Lengths fit into their tables, and what they reach of a table names pages."""
    count, size = pages
    room = tables.shape[1] * size
    if (row := first((lens < 0) | (lens > room))) is not None:
        raise ValueError(
            f"`{op}`: `{name}` must be in [0, {room}], the room of a row of `block_tables`; got "
            f"{lens[row]} for sequence {row}."
        )
    used = np.arange(tables.shape[1])[None] * size < lens[:, None]
    bad = used & ((tables < 0) | (tables >= count))
    if (row := first(bad.any(axis=1))) is not None:
        place = first(bad[row])
        raise ValueError(
            f"`{op}`: `block_tables` must name pages in [0, {count}) within a sequence's length; "
            f"got {tables[row, place]} at place {place} of sequence {row}."
        )


def check_starts(op: str, starts: np.ndarray, name: str, lens: np.ndarray, tokens: int) -> None:
    """Sequences own ranges of the tokens, none longer than its context."""
    outside = (starts[:-1] < 0) | (starts[1:] < starts[:-1]) | (starts[1:] > tokens)
    if (row := first(outside)) is not None:
        raise ValueError(
            f"`{op}`: `query_start_loc` must not decrease and stay in [0, {tokens}]; got "
            f"{starts[row]} to {starts[row + 1]} for sequence {row}."
        )
    queries = np.diff(starts)
    if (row := first(queries > lens)) is not None:
        raise ValueError(
            f"`{op}`: a sequence must not have more queries than `{name}`; got {queries[row]} "
            f"queries and a length of {lens[row]} for sequence {row}."
        )
