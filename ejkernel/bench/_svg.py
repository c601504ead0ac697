"""Bars as SVG: longer is faster. Colours are CSS variables, so one drawing suits both themes."""

import html
from collections.abc import Sequence

from ejkernel.bench._results import OURS, Program, Row

WIDTH = 360
_ROW, _BAR = 38, 10
LIGHT = (
    "--ink:#1c2430;--soft:#5b6675;--line:#dfe4ea;--page:#f6f7f9;--card:#ffffff;--track:#eceff3;"
    "--ours:#2f6fdf;--peer:#9aa7b6;--bad:#b3261e;--good:#1b7f4b"
)
DARK = (
    "--ink:#e8ecf2;--soft:#9aa6b5;--line:#2b333e;--page:#12161c;--card:#1a2028;--track:#262e38;"
    "--ours:#6aa1ff;--peer:#67758a;--bad:#ff8a80;--good:#6bd29a"
)
BARS = (
    ".name{font-size:13px;fill:var(--ink)}.value{font-size:12px;fill:var(--soft)}"
    ".track{fill:var(--track)}.ours{fill:var(--ours)}.peer{fill:var(--peer)}"
    ".noise{stroke:var(--ink);stroke-width:1.5;opacity:.55}.failed{fill:var(--bad)}"
    "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}"
)


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def rate_text(rate: float, unit: str) -> str:
    """A rate in the unit that suits it."""
    if unit == "TFLOP/s" and rate < 1:
        return f"{number(1000 * rate)} GFLOP/s"
    return f"{number(rate)} {unit}"


def value_text(row: Row, program: Program) -> str:
    """A program's number in words: its rate, its time and its share of the ceiling."""
    if program.median is None:
        return program.failed
    parts = [f"{number(program.median)} {row.unit}"]
    if program.rate is not None:
        parts.insert(0, rate_text(program.rate, row.rate_unit))
    if program.share is not None:
        parts.append(f"{100 * program.share:.0f} %")
    return " · ".join(parts)


def shown(row: Row) -> list[Program]:
    """The programs of a row that have a number, the fastest first."""
    measured = [p for p in row.programs if p.median is not None]
    return sorted(measured, key=lambda p: p.median or 0.0)


def ordered(row: Row) -> list[Program]:
    """All programs of a row: those with a number, then the others."""
    return [*shown(row), *(p for p in row.programs if p.median is None)]


def bars(row: Row, programs: Sequence[Program], x: int = 0, y: int = 0, width: int = WIDTH) -> str:
    """One bar a program, with its name and number above it and its spread as a thin line."""
    fastest = min((p.median for p in programs if p.median), default=1.0)
    parts = []
    for index, program in enumerate(programs):
        top = y + index * _ROW
        median = program.median or fastest
        length = max(width * fastest / median, 1.0)
        kind = "ours" if program.kind == OURS else "peer"
        name, value = html.escape(program.name), html.escape(value_text(row, program))
        parts.append(
            f'<text class="name" x="{x}" y="{top + 14}">{name}</text>'
            f'<text class="value" x="{x + width}" y="{top + 14}" text-anchor="end">{value}</text>'
            f'<rect class="track" x="{x}" y="{top + 20}" width="{width}" height="{_BAR}" rx="3"/>'
            f'<rect class="{kind}" x="{x}" y="{top + 20}" width="{length:.1f}" height="{_BAR}" '
            'rx="3"/>'
        )
        if program.spread:
            half = min(program.spread / median / 2, 1.0) * length
            middle, end = top + 20 + _BAR / 2, min(x + length + half, x + width)
            parts.append(
                f'<line class="noise" x1="{x + length - half:.1f}" x2="{end:.1f}" y1="{middle}" '
                f'y2="{middle}"/>'
            )
    return "".join(parts)


def height(count: int) -> int:
    return max(count, 1) * _ROW


def inline(row: Row) -> str:
    """The chart of a row, for a page that has the styles."""
    programs = shown(row)
    label = html.escape(f"{row.op}, {row.workload}, {row.mode}")
    return (
        f'<svg viewBox="0 0 {WIDTH} {height(len(programs))}" role="img" aria-label="{label}">'
        f"{bars(row, programs)}</svg>"
    )
