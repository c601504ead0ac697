"""What changed between two results, beyond the noise of both."""

import dataclasses

from ejkernel.bench._results import OURS, Document, Program, Row

# A change must exceed the spreads of both runs and this share, by which a machine differs from
# itself from one run to the next.
_DRIFT = 0.05

SLOWER, FASTER, SAME, GONE, NEW, FAILED = "slower", "faster", "same", "gone", "new", "fails now"


@dataclasses.dataclass(frozen=True)
class Change:
    """One program in one row, in both results."""

    row: Row
    name: str
    kind: str
    old: float | None
    new: float | None
    noise: float
    verdict: str

    @property
    def is_regression(self) -> bool:
        return self.kind == OURS and self.verdict in (SLOWER, FAILED)


def compare(old: Document, new: Document) -> list[Change]:
    """Every program of either result; ValueError where they are of different devices."""
    if old.device != new.device:
        raise ValueError(
            f"the results are of different devices, {old.device} and {new.device}; times compare "
            "on one device only"
        )
    before, after = ({row.key: row for row in d.rows} for d in (old, new))
    changes = []
    for key, row in after.items():
        earlier = before.get(key)
        names = {p.name: p for p in row.programs}
        known = {p.name: p for p in earlier.programs} if earlier is not None else {}
        for name in dict.fromkeys((*known, *names)):
            changes.append(_change(row, known.get(name), names.get(name)))
    for key, row in before.items():
        if key not in after:
            changes += [_change(row, program, None) for program in row.programs]
    return [c for c in changes if c.old is not None or c.new is not None]


def _change(row: Row, old: Program | None, new: Program | None) -> Change:
    first, second = (None if p is None else p.median for p in (old, new))
    noise = _DRIFT + sum(
        (p.spread or 0.0) / p.median for p in (old, new) if p is not None and p.median
    )
    some = new if new is not None else old
    assert some is not None
    verdict = SAME
    if new is None:
        verdict = GONE
    elif old is None or first is None:
        verdict = NEW
    elif second is None:
        verdict = FAILED
    elif second > first * (1 + noise):
        verdict = SLOWER
    elif second < first / (1 + noise):
        verdict = FASTER
    return Change(row, some.name, some.kind, first, second, noise, verdict)


def rows(changes: list[Change]) -> list[tuple[str, ...]]:
    """The lines of a table: what changed first, then the rest."""
    order = (FAILED, SLOWER, FASTER, NEW, GONE, SAME)
    made = []
    for change in sorted(changes, key=lambda c: order.index(c.verdict)):
        numbers = ["-" if x is None else f"{x:.4g}" for x in (change.old, change.new)]
        ratio = f"{change.new / change.old:.2f}" if change.old and change.new else "-"
        what = (change.row.op, change.row.workload, change.row.mode, change.name)
        mark = f"{change.verdict} (regression)" if change.is_regression else change.verdict
        made.append((*what, *numbers, ratio, f"{100 * change.noise:.0f} %", mark))
    return made
