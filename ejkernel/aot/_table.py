"""Tables of configurations chosen by static cycles, in the form that ships with the package."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from ejkernel import _folders
from ejkernel.aot import _targets
from ejkernel.aot._reports import COMPILED, Report


def choose(reports: Sequence[Report]) -> list[Report]:
    """The report of least cycles for every target and direction; the earlier one if equal.

    There is none where a candidate whose cycles are only a lower bound may be the better one.
    """
    best: dict[tuple[str, str], tuple[float, Report]] = {}
    bounds: dict[tuple[str, str], float] = {}
    for report in reports:
        place, cycles = (report.target, report.direction), report.cycles
        if report.status != COMPILED or cycles is None:
            continue
        if not report.exact:
            bounds[place] = min(cycles, bounds.get(place, cycles))
        elif place not in best or cycles < best[place][0]:
            best[place] = (cycles, report)
    return [report for place, (least, report) in best.items() if least <= bounds.get(place, least)]


def rows(chosen: Sequence[Report]) -> list[dict[str, Any]]:
    """What was chosen, as rows of a table."""
    return [
        {
            "call": dict(report.call),
            "implementation": report.entry,
            "version": report.version,
            "config": report.config,
            "cycles": report.cycles,
        }
        for report in chosen
    ]


def write(folder: pathlib.Path, chosen: Sequence[Report]) -> list[pathlib.Path]:
    """Adds rows to the tables in a folder, in place of those of the same calls."""
    written = []
    for target in dict.fromkeys(report.target for report in chosen):
        device = _targets.parse(target)
        mine = [report for report in chosen if report.target == target]
        entry = {"kind": "tpu", "model": device.model, "capability": device.capability}
        written.append(_add(folder, entry, mine[0].call["op"], rows(mine)))
    return written


def write_records(folder: pathlib.Path, records: Sequence[Any]) -> list[pathlib.Path]:
    """Adds records of a cache to the tables in a folder, as `write` does."""
    found: dict[tuple[str, str], list[Any]] = {}
    for record in records:
        if record.complete and record.call:
            found.setdefault((record.device, record.op), []).append(record)
    written = []
    for (device, op), mine in found.items():
        kind, model, *capability = device.split("|")
        entry = {"kind": kind, "model": model, "capability": (capability or [None])[0]}
        # the first row of a call serves every platform that it can: what "auto" chose goes first
        mine.sort(key=lambda record: record.call["platform"] != "auto")
        made = [
            {
                "call": {k: v for k, v in record.call.items() if k != "device"},
                "implementation": record.implementation,
                "version": record.version,
                "config": record.config,
                "rivals": record.rivals,
            }
            for record in mine
        ]
        written.append(_add(folder, entry, op, made))
    return written


def _add(folder: pathlib.Path, entry: dict[str, Any], op: str, made: list[Any]) -> pathlib.Path:
    """Adds the rows of an op on a device, and the device."""
    from ejkernel.ops.config import table

    file = folder / table.slug(entry["model"]) / f"{op}.json"
    kept = [row for row in _read(file) if row["call"] not in [new["call"] for new in made]]
    _dump(file, [*kept, *made])
    known = _read(folder / "devices.json")
    if entry not in known:
        _dump(folder / "devices.json", [*known, entry])
    return file


def _read(file: pathlib.Path) -> list[Any]:
    return json.loads(file.read_text()) if file.exists() else []


def _dump(file: pathlib.Path, values: list[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(value) for value in values)  # a row is a line
    _folders.write_whole(file, f"[\n{lines}\n]\n")
