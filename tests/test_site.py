"""The documentation site: what is generated is current, what exists is listed, and it builds."""

import collections
import difflib
import importlib
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from ejkernel.bench import _charts
from ejkernel.kernels import kernel_registry
from ejkernel.modules import flash_attention
from tools import measured, pictures

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
# public packages, by the page that documents them
API = {"modules": "modules", "types": "types", "ops": "ops", "kernels": "kernels"} | {
    name: name for name in ("callib", "xla_utils", "aot")
}
# aliases and type variables, which need no entry of their own
UNLISTED = {"gla_attention", "flash_mla", "lightning_attn", "block_mask", "Cfg", "Out"}


@pytest.mark.parametrize("generator", [measured, pictures], ids=lambda module: module.__name__)
def test_generated_documents_are_up_to_date(generator):
    made = generator.files()
    assert made
    for path, text in made.items():
        assert path.exists(), f"run `make matrix`: {path} is missing"
        current = path.read_text()
        difference = difflib.unified_diff(current.splitlines(), text.splitlines(), lineterm="")
        assert current == text, "run `make matrix`:\n" + "\n".join(difference)


def test_pictures_are_of_what_the_operation_computes():
    causal = pictures.seen(lambda *xs: flash_attention(*xs, causal=True), 3, 5)
    assert np.array_equal(causal > 0, np.tril(np.ones((3, 5)), 2) > 0)
    drawn = pictures.draw([pictures.Panel("one & two", causal)])
    assert drawn.count("<path ") == 2
    assert drawn.count("h11v11") == causal.size
    assert "one &amp; two" in drawn


def test_numbers_have_about_three_digits():
    shown = {x: measured.number(x) for x in (0.0174, 0.997, 1.931, 12.84, 434.3, 3289.2)}
    assert list(shown.values()) == ["0.017", "1.00", "1.93", "12.8", "434", "3,289"]


def test_every_number_of_a_result_file_reaches_its_page():
    documents = {path.stem: found for path, found in _charts.results().items()}
    page = (DOCS / "ops" / "ring_attention.md").read_text()
    for row in documents["cpu_ring"].rows:
        values = " | ".join(measured.number(p.median) for p in row.programs)
        assert f"| {row.workload}, {measured.MODES[row.mode]} | {values} |" in page


def test_navigation_lists_every_page_once():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = collections.Counter(re.findall(r"[\w/-]+\.md", nav))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    copied = {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
    assert set(listed) == pages | copied
    assert set(listed.values()) == {1}


def test_every_operation_has_a_page_with_a_formula_and_a_picture():
    index = (DOCS / "ops" / "index.md").read_text()
    for op in kernel_registry.ops():
        page = (DOCS / "ops" / f"{op}.md").read_text()
        assert f"({op}.md)" in index, op
        assert "![" in page or "```text" in page, f"docs/ops/{op}.md has no picture"


@pytest.mark.parametrize("package", API)
def test_api_pages_list_every_public_name(package):
    module = importlib.import_module(f"ejkernel.{package}")
    page = (DOCS / "api" / f"{API[package]}.md").read_text()
    for name in set(module.__all__) - UNLISTED:
        # classes and configurations of operations stand in a table
        assert re.search(rf"\.{name}$|`{name}`", page, re.MULTILINE), name


def test_readme_is_short_and_begins_with_the_two_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert (
        lines.index(
            "make demo   # set up, run attention forward and backward, show what ran and why"
        )
        < 10
    )
    assert any(line.startswith("make test ") for line in lines[:10])


def test_pages_load_nothing_from_another_host():
    config = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in config
    assert not re.search(r"https?://", config)
    for path in [*DOCS.rglob("*.md"), *DOCS.rglob("*.svg"), *DOCS.rglob("*.css")]:
        text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"<script|<img|<link|!\[[^\]]*\]\(http|@import|url\(", text), path


def test_formulas_of_docstrings_become_code():
    pytest.importorskip("griffe")
    from tools import griffe_formulas

    text = "A sum.\n\nout[t] = a[t] +\nb[t]\n\nThe sum = all.\n\nArgs:\n  a: One = two."
    made = griffe_formulas.with_code(text)
    assert made == text.replace("out[t] = a[t] +\nb[t]", "    out[t] = a[t] +\n    b[t]")


def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("material")  # of the `docs` extra
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    html = (tmp_path / "ops" / "ring_attention" / "index.html").read_text()
    assert "benchmarks/results/cpu_ring.json" in html
    assert (tmp_path / "benchmarks" / "results" / "cpu_ring.json").exists()
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text()
        )
        assert not loaded, page
    shutil.rmtree(tmp_path)
