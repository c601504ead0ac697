"""Tables of measured numbers, from benchmarks/results/*.json.

Each op's page gets the rows that concern it; docs/measured.md gets one line for each comparison.
"""

import pathlib
import re
from collections.abc import Sequence

from ejkernel.bench import _charts
from ejkernel.bench._results import OURS, Document, Program, Row
from ejkernel.kernels import _support_docs

ROOT = pathlib.Path(__file__).parents[1]
MODES = {"fwd": "forward", "fwd+bwd": "forward + backward"}
UNITS = {"ms": "milliseconds", "us": "microseconds", "cycles": "cycles", "bytes": "bytes"}
TOPICS = {
    "Attention": ("flash_attention", "ring_attention", "mla_attention"),
    "Pages": ("page_attention", "ragged_page_attention", "mla_page_attention"),
    "Sparse": ("blocksparse_attention", "native_sparse_attention"),
    "Recurrences": ("gla", "lightning_attention", "linear_recurrence", "recurrent"),
    "Matrix products": ("grouped_matmul", "mean_pooling"),
}


def files() -> dict[pathlib.Path, str]:
    """The pages with measured numbers, and what they should hold."""
    overview = ROOT / "docs" / "measured.md"
    made = {overview: _support_docs.render(overview.read_text(), summary(), "measured", "")}
    for op in sorted({row.op for document in _charts.results().values() for row in document.rows}):
        page = ROOT / "docs" / "ops" / f"{op}.md"
        made[page] = _support_docs.render(page.read_text(), numbers(op), "measured", "## Measured")
    return made


def device(document: Document) -> str:
    """The device in words: "AMD EPYC x2" is 2 cores of an AMD EPYC."""
    return re.sub(r"^(.*) x(\d+)$", r"\2 cores of an \1", document.model)


def numbers(op: str) -> str:
    """All tables of an op's page: one for each file of results, unit and set of programs."""
    parts = []
    for path, document in _charts.results().items():
        rows = [row for row in document.rows if row.op == op]
        tables = {}
        for row in rows:
            names = tuple(p.name for p in shown(row))
            tables.setdefault((row.unit, row.dtype, names), []).append(row)
        for (unit, dtype, names), some in tables.items():
            parts.append(table(some, f"{UNITS[unit]}, {dtype}", names))
        if rows:
            versions = ", ".join(
                f"{k} {v}" for k, v in document.versions.items() if k != "ejkernel"
            )
            link = f"[{path.name}](../../benchmarks/results/{path.name})"
            parts.append(f"({device(document)}, {versions}, {document.date[:10]}; {link})")
    return "\n\n".join(parts)


def shown(row: Row) -> list[Program]:
    """Programs of a row with a number, ours first."""
    found = [p for p in row.programs if p.median is not None]
    return sorted(found, key=lambda p: p.kind != OURS)


def timed_with(row: Row, peer: Program) -> Program | None:
    """What "auto" runs, as it was timed in turns with a peer."""
    return row.program(f"{row.auto}, beside {peer.name}") or row.program(row.auto)


def table(rows: Sequence[Row], unit: str, names: Sequence[str]) -> str:
    lines = [
        f"In {unit}; less is better.",
        "",
        "| call | " + " | ".join(names) + " |",
        "|---|" + "---:|" * len(names),
    ]
    for row in rows:
        values = [number(p.median) for p in shown(row) if p.median is not None]
        lines.append(f"| {row.workload}, {MODES[row.mode]} | {' | '.join(values)} |")
    return "\n".join(lines)


def number(value: float) -> str:
    """About three digits, and all of those before the point."""
    if value < 0.1:
        return f"{value:.2g}"
    return f"{value:,.{max(0, 3 - len(str(int(value))))}f}"


def summary() -> str:
    """The tables of docs/measured.md: one line for each comparison, by topic."""
    lines: list[str] = []
    for topic, ops in TOPICS.items():
        rows = [line for op in ops for line in comparisons(op)]
        if rows:
            head = "| operation | beside | times as fast | calls | measured on |"
            lines += [f"### {topic}", "", head, "|---|---|---|---:|---|", *rows, ""]
    return "\n".join(lines).rstrip()


def comparisons(op: str) -> list[str]:
    """A line for each peer, mode and file: how many times as fast what "auto" runs is."""
    found: dict[tuple[pathlib.Path, str, str], list[float]] = {}
    documents = _charts.results()
    for path, document in documents.items():
        for row in document.rows:
            if row.op != op or row.unit == "bytes":
                continue
            for peer in (p for p in shown(row) if p.kind != OURS):
                mine = timed_with(row, peer)
                if mine is not None and mine.median and peer.median:
                    key = (path, peer.name, row.mode)
                    found.setdefault(key, []).append(peer.median / mine.median)
    lines = []
    for (path, peer, mode), ratios in found.items():
        document = documents[path]
        link = f"[{device(document)}, {document.date[:10]}](../benchmarks/results/{path.name})"
        first = f"[`{op}`](ops/{op}.md#measured)"
        beside = f"{peer}, {MODES[mode]}"
        lines.append(f"| {first} | {beside} | {span(ratios)} | {len(ratios)} | {link} |")
    return lines


def span(ratios: list[float]) -> str:
    low, high = number(min(ratios)), number(max(ratios))
    return low if low == high else f"{low} \u2013 {high}"
