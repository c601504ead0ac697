"""Tables of measured numbers, from benchmarks/results/*.json.

Each op's page gets the rows that concern it; docs/measured.md gets one line for each comparison.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from ejkernel.kernels import _support_docs

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MODES = {"fwd": "forward", "fwd+bwd": "forward + backward"}
MODELS = {"d128": "16 heads of 128", "d64": "32 heads of 64", "gqa": "32 heads of 128, 8 key heads"}
# Columns of the GPU benchmark: its name there, and in our table.
GPU_COLUMNS = {
    "auto": '`platform="auto"`',
    "triton": "Triton kernel",
    "jax.nn cuDNN": "`jax.nn` with cuDNN",
    "torch FA2": "torch FlashAttention 2",
    "torch cuDNN": "torch with cuDNN",
}


@dataclasses.dataclass(frozen=True)
class Source:
    """A result file, what its `peer` is, and the rows of it that belong to an op."""

    topic: str
    op: str
    file: str
    peer: str
    rows: str = ""  # a pattern that the label of a row must match


DENSE = "`jax.nn.dot_product_attention` (XLA) on contiguous keys"
SCAN = "plain `lax.scan`, differentiated by JAX"
LATENT = "plain JAX that makes the keys and values of all heads"
SOURCES = (
    Source(
        "Attention",
        "flash_attention",
        "cpu_attention",
        "`jax.nn.dot_product_attention` (XLA)",
    ),
    Source("Attention", "ring_attention", "cpu_ring", "`flash_attention` on one device"),
    Source("Attention", "mla_attention", "cpu_mla", LATENT, "^(?!.*pages)"),
    Source("Pages", "page_attention", "cpu_paged", DENSE, "^page_attention"),
    Source("Pages", "page_attention", "cpu_paged", "two einsums on transposed keys", "^einsums"),
    Source("Pages", "ragged_page_attention", "cpu_paged", DENSE, "^ragged"),
    Source("Pages", "mla_page_attention", "cpu_mla", "plain JAX over gathered pages", "pages"),
    Source("Sparse", "blocksparse_attention", "cpu_sparse", "`flash_attention` over all blocks"),
    Source("Sparse", "native_sparse_attention", "cpu_nsa", "causal `flash_attention`"),
    Source("Recurrences", "gla", "cpu_linear", SCAN, "^gla"),
    Source("Recurrences", "lightning_attention", "cpu_linear", SCAN, "^lightning"),
    Source("Recurrences", "recurrent", "cpu_recurrent", SCAN),
    Source("Matrix products", "grouped_matmul", "cpu_grouped", "`jax.lax.ragged_dot`"),
)


def files() -> dict[pathlib.Path, str]:
    """The pages with measured numbers, and what they should hold."""
    overview = ROOT / "docs" / "measured.md"
    made = {overview: _support_docs.render(overview.read_text(), summary(), "measured", "")}
    for op in dict.fromkeys(source.op for source in SOURCES):
        page = ROOT / "docs" / "ops" / f"{op}.md"
        made[page] = _support_docs.render(page.read_text(), numbers(op), "measured", "## Measured")
    return made


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def label(row: dict[str, Any]) -> str:
    """What was called; some files spell it as one text, some as fields."""
    if "label" in row:
        return row["label"]
    mask = {True: ", causal", False: ", no mask"}.get(row.get("causal"), "")
    return f"{row['tokens']} tokens{mask}, {MODES[row['mode']]}"


def chosen(source: Source) -> list[dict[str, Any]]:
    rows = read(source.file)["rows"]
    return [row for row in rows if re.search(source.rows, label(row))]


def device(result: dict[str, Any]) -> str:
    """The device in words: "cpu|AMD EPYC x2" is 2 cores of an AMD EPYC."""
    name = result["device"].split("|")[1]
    return re.sub(r"^(.*) x(\d+)$", r"\2 cores of an \1", name)


def where(result: dict[str, Any], name: str, depth: str) -> str:
    """Device, versions, date and a link, for the line under a table."""
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items() if k != "ejkernel")
    link = f"[{name}.json]({depth}benchmarks/results/{name}.json)"
    return f"{device(result)}, {versions}, {result['date']}; {link}"


def numbers(op: str) -> str:
    """All tables of an op's page."""
    tables = [cpu_table(source) for source in SOURCES if source.op == op]
    if op == "flash_attention":
        tables = [gpu_table(), *tables, tpu_table()]
    return "\n\n".join(tables)


def cpu_table(source: Source) -> str:
    result = read(source.file)
    lines = [
        f"Beside {source.peer}; {result['shape'].replace('; ms', '; milliseconds')}.",
        "",
        "| call | ejkernel | other | times as fast |",
        "|---|---:|---:|---:|",
    ]
    for row in chosen(source):
        times = f"{number(row['ours'])} | {number(row['peer'])}"
        lines.append(f"| {label(row)} | {times} | {number(row['ratio'])} |")
    return "\n".join([*lines, "", f"({where(result, source.file, '../../')})"])


def gpu_table() -> str:
    result = read("gpu_attention")
    lines = [
        "16,384 tokens in rows of the given length, bfloat16; milliseconds, less is better.",
        "",
        "| call | " + " | ".join(GPU_COLUMNS.values()) + " |",
        "|---|" + "---:|" * len(GPU_COLUMNS),
    ]
    order = {name: i for i, name in enumerate(MODELS)}
    for row in sorted(result["rows"], key=lambda r: (r["mode"], order[r["model"]], r["length"])):
        mask = "causal" if row["causal"] else "no mask"
        call = f"{MODELS[row['model']]}, {row['length']} tokens, {mask}, {MODES[row['mode']]}"
        times = (number(row[name]) if name in row else "-" for name in GPU_COLUMNS)
        lines.append(f"| {call} | " + " | ".join(times) + " |")
    return "\n".join([*lines, "", f"({where(result, 'gpu_attention', '../../')})"])


def tpu_table() -> str:
    result = read("tpu_static")
    lines = [
        "Cycles of the schedules that libtpu compiles, without running them. A row `a / b`",
        f"compares two calls or kernels; {result['shape'].removesuffix('; cycles')}.",
        "",
        "| TPU, a / b | cycles of a | cycles of b | a / b |",
        "|---|---:|---:|---:|",
    ]
    for row in result["rows"]:
        cycles = f"{row['cycles']:,} | {row['beside']:,}"
        lines.append(f"| {row['label']} | {cycles} | {number(row['ratio'])} |")
    return "\n".join([*lines, "", f"({where(result, 'tpu_static', '../../')})"])


def number(value: float) -> str:
    """About three digits, and all of those before the point."""
    if value < 0.1:
        return f"{value:.2g}"
    return f"{value:,.{max(0, 3 - len(str(int(value))))}f}"


def summary() -> str:
    """The tables of docs/measured.md: one line for each comparison, by topic."""
    lines: list[str] = []
    for topic, rows in by_topic().items():
        lines += [
            f"### {topic}",
            "",
            "| operation | beside | times as fast | calls | measured on |",
        ]
        lines += ["|---|---|---|---:|---|", *rows, ""]
    return "\n".join(lines).rstrip()


def by_topic() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {source.topic: [] for source in SOURCES}
    found["Attention"] += [*gpu_lines(), tpu_line()]
    for source in SOURCES:
        ratios = [row["ratio"] for row in chosen(source)]
        found[source.topic].append(line(source.op, source.peer, ratios, source.file))
    return found


def gpu_lines() -> Iterator[str]:
    rows = read("gpu_attention")["rows"]
    for name in ("jax.nn cuDNN", "torch FA2", "torch cuDNN"):
        for mode, words in MODES.items():
            ratios = [r[name] / r["auto"] for r in rows if r["mode"] == mode and name in r]
            yield line("flash_attention", f"{GPU_COLUMNS[name]}, {words}", ratios, "gpu_attention")


def tpu_line() -> str:
    rows = read("tpu_static")["rows"]
    ratios = [1 / row["ratio"] for row in rows if row["label"].endswith(("/ splash", "/ flash"))]
    beside = "JAX's splash and flash attention for TPUs, by the cycles of compiled programs"
    return line("flash_attention", beside, ratios, "tpu_static", "compiled, not run")


def line(op: str, beside: str, ratios: list[float], name: str, place: str = "") -> str:
    result = read(name)
    link = f"[{place or device(result)}, {result['date']}](../benchmarks/results/{name}.json)"
    first = f"[`{op}`](ops/{op}.md#measured)"
    return f"| {first} | {beside} | {span(ratios)} | {len(ratios)} | {link} |"


def span(ratios: list[float]) -> str:
    low, high = number(min(ratios)), number(max(ratios))
    return low if low == high else f"{low} \u2013 {high}"
