"""One HTML file with a chart for every row; it needs nothing besides itself."""

import html
from collections.abc import Sequence

from ejkernel.bench import _svg
from ejkernel.bench._results import Document, Program, Row

_STYLE = (
    f":root{{color-scheme:light dark;{_svg.LIGHT}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_svg.DARK}}}}}"
    f"{_svg.BARS}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
header,main,footer{max-width:1240px;margin:0 auto;padding:20px 16px}
h1{font-size:1.6rem;margin:0 0 4px}
h2{font-size:1.25rem;margin:24px 0 4px}
main{padding-top:0}
h3{font-size:.95rem;margin:0}
p{margin:4px 0}
.soft{color:var(--soft)}
nav{display:flex;flex-wrap:wrap;gap:8px;margin-top:12px}
nav a,.tag{border:1px solid var(--line);border-radius:999px;padding:2px 10px;color:inherit;
text-decoration:none;background:var(--card);font-size:.85rem;white-space:nowrap}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;
margin-top:14px}
.facts div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:8px 12px;
overflow-wrap:anywhere}
.facts b{display:block;font-size:.75rem;font-weight:600;color:var(--soft)}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:14px;
margin-top:10px}
article{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:14px;
min-width:0}
article header{padding:0;margin:0 0 8px;display:flex;justify-content:space-between;gap:8px;
align-items:start}
svg{display:block;width:100%;height:auto}
details{margin-top:8px;font-size:.85rem}
summary{cursor:pointer;color:var(--soft)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.82rem;white-space:nowrap}
th,td{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid var(--line)}
td.n,th.n{text-align:right}
.bad{color:var(--bad)}
.good{color:var(--good)}
.wrap{white-space:normal;overflow-wrap:anywhere}
"""
)


def page(document: Document) -> str:
    """The whole report."""
    merged: dict[str, list[Row]] = {}
    for row in document.rows:
        merged.setdefault(row.op, []).append(row)
    links = "".join(f'<a href="#{op}">{op}</a>' for op in merged)
    sections = "".join(_section(op, rows) for op, rows in merged.items())
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in document.notes)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>ejkernel bench on {html.escape(document.model)}</title><style>{_STYLE}</style>"
        "</head><body><header><h1>ejkernel bench</h1>"
        f'<p class="soft">{html.escape(document.model)}, {html.escape(document.date[:10])}. '
        "Longer bars are faster, ours are blue, and the thin line is the spread between rounds. "
        "Numbers were checked before times were taken.</p>"
        f"{_facts(document)}<nav>{links}</nav></header><main>{sections}</main>"
        f'<footer class="soft">{notes}{_versions(document)}</footer></body></html>\n'
    )


def _facts(document: Document) -> str:
    facts = {"device": document.device, "measured": document.date.replace("T", " ")}
    for ceiling in document.ceilings:
        name = f"{ceiling.name}, {ceiling.dtype}"
        facts[name] = _svg.rate_text(ceiling.rate, ceiling.unit)
    facts["source"] = document.source or "unknown"
    cells = (f"<div><b>{html.escape(k)}</b>{html.escape(v)}</div>" for k, v in facts.items())
    return f'<div class="facts">{"".join(cells)}</div>'


def _versions(document: Document) -> str:
    text = ", ".join(f"{name} {version}" for name, version in document.versions.items())
    return f"<p>{html.escape(text)}</p>"


def _section(op: str, rows: Sequence[Row]) -> str:
    cards = "".join(map(_card, rows))
    return f'<section id="{op}"><h2>{op}</h2><div class="grid">{cards}</div></section>'


def _card(row: Row) -> str:
    shapes = ", ".join(f"{name} {shape}" for name, shape in row.shapes.items())
    bound = f"bounded by {row.bound}" if row.bound else row.unit
    return (
        f"<article><header><h3>{html.escape(row.workload)}</h3>"
        f'<span class="tag">{row.mode}</span></header>{_svg.inline(row)}'
        f"<details><summary>numbers, {row.dtype}, {bound}</summary>"
        f'<div class="scroll">{_table(row)}</div>{_bars(row)}'
        f'<p class="soft wrap">{html.escape(shapes)}</p></details></article>'
    )


def _table(row: Row) -> str:
    head = f'<tr><th>program</th><th class="n">{row.unit}</th><th class="n">spread</th>'
    head += '<th class="n">rate</th><th class="n">ceiling</th><th>about it</th></tr>'
    lines = "".join(_line(row, program) for program in _svg.ordered(row))
    return f"<table>{head}{lines}</table>"


def _line(row: Row, program: Program) -> str:
    show = lambda value: "" if value is None else _svg.number(value)
    share = "" if program.share is None else f"{100 * program.share:.0f} %"
    rate = "" if program.rate is None else _svg.rate_text(program.rate, row.rate_unit)
    about = [program.failed, program.note, *(f"{d}: {c}" for d, c in program.config.items())]
    if row.auto == program.name:
        about.insert(0, "what auto runs")
    cells = "".join(
        f'<td class="n">{x}</td>' for x in (show(program.median), show(program.spread), rate, share)
    )
    kind = ' class="bad"' if program.failed else ""
    text = html.escape("; ".join(filter(None, about)))
    return f"<tr><td>{html.escape(program.name)}</td>{cells}<td{kind}>{text}</td></tr>"


def _bars(row: Row) -> str:
    lines = []
    for verdict in row.bars:
        ratio = "no number" if verdict.ratio is None else f"{verdict.ratio:.2f}"
        kind = "good" if verdict.kept else "bad"
        text = f"{verdict.of} beside {verdict.beside}: {ratio}, promised {verdict.least:g}"
        lines.append(f'<p class="{kind}">{html.escape(text)}</p>')
    return "".join(lines)
