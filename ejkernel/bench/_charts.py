"""Charts of committed results: one SVG for each op and device, for README and the documents."""

import argparse
import hashlib
import html
import pathlib
import re
import sys
from collections.abc import Sequence

import msgspec

from ejkernel import _folders
from ejkernel.bench import _results, _svg
from ejkernel.bench._results import OURS, Document, Program, Row

_ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = _ROOT / "benchmarks" / "results"
CHARTS = _ROOT / "docs" / "charts"
_HASHES = re.compile(r"<!-- results: (.+) -->")
_COLUMN, _GAP, _MARGIN, _TITLE, _HEAD = 340, 28, 20, 56, 26
_MODES = ("fwd", "fwd+bwd")
# settings of a peer that only show what its best one is worth, and our own past
_LEFT_OUT = ("public as set", "public unset", "version 8")
# the rows of a file that README shows
_SUMMARY = {
    "gpu_attention_hopper.json": (
        "B4 S4096 H16 d128 causal",
        "B1 S16384 H16 d128 causal",
    )
}


def results() -> dict[pathlib.Path, Document]:
    """The results that are kept, by file; files of other kinds are left out."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        if f'"owner": "{_results.OWNER}"' in path.read_text():
            found[path] = _results.read(path)
    return found


def charts() -> dict[pathlib.Path, str]:
    """The files and what they should hold: of each row that was measured twice, the newer one."""
    found: dict[pathlib.Path, dict[tuple[str, str], tuple[pathlib.Path, Document, Row]]] = {}
    for path, document in sorted(results().items(), key=lambda one: one[1].date):
        for row in document.rows:
            if row.unit not in ("ms", "cycles"):
                continue
            if all(program.kind == OURS for program in _programs(row)):  # or there is none
                continue
            files = [CHARTS / f"{row.op}-{_slug(document)}.svg"]
            if row.workload in _SUMMARY.get(path.name, ()):
                files.append(CHARTS / "summary.svg")
            for file in files:
                rows = found.setdefault(file, {})
                rows[row.workload, row.mode] = path, document, row
    return {file: _chart_of(list(rows.values())) for file, rows in found.items()}


def _chart_of(rows: Sequence[tuple[pathlib.Path, Document, Row]]) -> str:
    documents = {path: document for path, document, _ in rows}
    digests = [f"{x.name} {hashlib.sha256(x.read_bytes()).hexdigest()}" for x in sorted(documents)]
    return chart(list(documents.values()), [row for *_, row in rows], ", ".join(digests))


def stale() -> list[str]:
    """Charts that are missing, or that were not made from the results that are here now."""
    said = []
    for file in charts():
        found = _HASHES.search(file.read_text()) if file.exists() else None
        if found is None:
            said.append(f"{file.name} is missing")
            continue
        for one in found[1].split(", "):
            name, digest = one.split(" ")
            now = RESULTS / name
            if not now.exists() or hashlib.sha256(now.read_bytes()).hexdigest() != digest:
                said.append(f"{file.name} is older than {name}")
    return said


def _slug(document: Document) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", document.model.lower()).strip("-")
    return words[:40].strip("-")


def _programs(row: Row) -> list[Program]:
    """What "auto" runs and the peers, fastest first; a chart needs two programs at least."""
    mine = row.program(row.auto)
    ours = [mine] if mine is not None else [p for p in row.programs if p.kind == OURS]
    peers = [p for p in row.programs if p.kind != OURS and p.name not in _LEFT_OUT]
    found = [p for p in (*ours, *peers) if p.median is not None]
    named = [msgspec.structs.replace(p, name=_name(p)) for p in found]
    return sorted(named, key=lambda p: p.median or 0.0) if len(named) > 1 else []


def _name(program: Program) -> str:
    """What a reader without the run at hand understands."""
    if program.kind == OURS:
        return f"ours ({program.name})"
    return "public ejkernel" if program.name == "public" else program.name


def chart(documents: Sequence[Document], rows: Sequence[Row], digests: str) -> str:
    """One SVG: bars of each workload, the forward on the left, with its backward on the right."""
    names = dict.fromkeys(row.workload for row in rows)
    parts, y = [], _TITLE
    for name in names:
        here = {row.mode: row for row in rows if row.workload == name}
        parts.append(f'<text class="head" x="{_MARGIN}" y="{y + 14}">{html.escape(name)}</text>')
        tallest = 0
        for column, mode in enumerate(_MODES):
            if (row := here.get(mode)) is None:
                continue
            x = _MARGIN + column * (_COLUMN + _GAP)
            place = f'x="{x + _COLUMN}" y="{y + 14}" text-anchor="end"'
            parts.append(f'<text class="value" {place}>{mode}</text>')
            programs = _programs(row)
            parts.append(_svg.bars(row, programs, x, y + _HEAD - 6, _COLUMN))
            tallest = max(tallest, _svg.height(len(programs)))
        y += _HEAD + tallest + 14
    width = 2 * _MARGIN + 2 * _COLUMN + _GAP
    title = f"{rows[0].op} on {documents[0].model}"
    days = sorted({document.date[:10] for document in documents})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    versions = ", ".join(sorted({document.versions.get("jax", "?") for document in documents}))
    said = f"{when}; jax {versions}; longer is faster"
    style = (
        f"svg{{{_svg.LIGHT}}}@media(prefers-color-scheme:dark){{svg{{{_svg.DARK}}}}}{_svg.BARS}"
        ".head{font-size:14px;font-weight:600;fill:var(--ink)}"
        ".title{font-size:18px;font-weight:700;fill:var(--ink)}.page{fill:var(--card)}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" '
        f'height="{y}" role="img" aria-label="{html.escape(title)}">\n'
        f"<!-- results: {digests} -->\n<style>{style}</style>\n"
        f'<rect class="page" width="{width}" height="{y}" rx="10"/>'
        f'<text class="title" x="{_MARGIN}" y="28">{html.escape(title)}</text>'
        f'<text class="value" x="{_MARGIN}" y="46">{html.escape(said)}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the files, instead of checking")
    if not parser.parse_args().write:
        return 1 if stale() else 0
    CHARTS.mkdir(parents=True, exist_ok=True)
    made = charts()
    for old in CHARTS.glob("*.svg"):
        if old not in made:
            old.unlink()
    for file, text in made.items():
        _folders.write_whole(file, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
