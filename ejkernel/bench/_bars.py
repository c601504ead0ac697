"""Whether a row keeps the promises of its workload."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ejkernel.bench._results import OURS, Document, Row, Verdict
from ejkernel.bench._workloads import AUTO, BEST, CEILING, TFLOPS, Bar, Workload
from ejkernel.kernels import kernel_registry

Again = Callable[[Sequence[str]], dict[str, list[float]]]


def within(row: Row, workload: Workload, again: Again | None = None) -> None:
    """Adds the verdicts that need no other row.

    What misses its bar is measured once more, in pairs, where `again` can do that.
    """
    for bar in _of_mode(workload, row):
        if bar.workload or bar.beside == CEILING:
            continue
        of, beside = _measured(row, bar.of), _measured(row, bar.beside)
        if bar.beside == TFLOPS:
            rate = None if of is None or not row.flops else row.flops / of.median / 1e9
            ratio = None if rate is None else rate / bar.least
            row.bars.append(Verdict(bar.of, f"{bar.least:g} {TFLOPS}", 1.0, ratio))
            continue
        if not bar.beside:
            limit = None if of is None or of.median is None else bar.least / max(of.median, 1e-9)
            row.bars.append(Verdict(bar.of, f"{bar.least:g} {row.unit}", 1.0, limit))
            continue
        verdict = Verdict(bar.of, bar.beside, bar.least, _ratio(of, beside))
        if not verdict.kept and again is not None and of is not beside:
            verdict.ratio = _paired(again([of.name, beside.name]), of.name, beside.name)
        row.bars.append(verdict)


def across(document: Document, workload: Workload, row: Row) -> None:
    """Adds the verdicts that need the rates of a row: beside its ceiling, or those of another."""
    for bar in _of_mode(workload, row):
        if bar.beside == CEILING:
            of = _measured(row, bar.of)
            row.bars.append(Verdict(bar.of, CEILING, bar.least, None if of is None else of.share))
            continue
        if not bar.workload:
            continue
        found = [r for r in document.rows if (r.op, r.mode) == (row.op, row.mode)]
        other = next((r for r in found if r.workload == bar.workload), None)
        mine, base = (None if r is None else _measured(r, bar.of) for r in (row, other))
        ratio = None
        if mine is not None and base is not None and mine.rate and base.rate:
            ratio = mine.rate / base.rate
        row.bars.append(Verdict(bar.of, f"its rate in {bar.workload}", bar.least, ratio))


def missed(document: Document) -> list[str]:
    """The promises that are not kept, a line each."""
    return [
        f"{row.op}, {row.workload}, {row.mode}: {v.of} is {v.ratio:.2f} times as fast as "
        f"{v.beside}, at least {v.least:g} is promised"
        for row in document.rows
        for v in row.bars
        if not v.kept and v.ratio is not None
    ]


def _of_mode(workload: Workload, row: Row) -> list[Bar]:
    return [bar for bar in workload.bars if row.mode in bar.modes]


def _measured(row: Row, name: str) -> Any:
    """A program that has a number; "auto" may be one of the entries."""
    if name == BEST:
        others = {AUTO, *_only_by_name(row.op)}
        ours = [p for p in row.programs if p.kind == OURS and p.median and p.name not in others]
        return min(ours, key=lambda p: p.median or 0.0, default=None)
    found = row.program(row.auto if name == AUTO else name)
    return found if found is not None and found.median is not None else None


def _only_by_name(op: str) -> set[str]:
    """Entries that "auto" does not take, however fast they are."""
    if op not in kernel_registry.ops():
        return set()
    return {entry.name for entry in kernel_registry.list(op) if entry.by_name is not None}


def _ratio(of: Any, beside: Any) -> float | None:
    if of is None or beside is None or not of.median or beside.median is None:
        return None
    return beside.median / of.median


def _paired(times: dict[str, list[float]], of: str, beside: str) -> float | None:
    if not times.keys() >= {of, beside}:  # one of them failed now
        return None
    pairs = zip(times[of], times[beside], strict=True)
    return statistics.median(b / a for a, b in pairs)
