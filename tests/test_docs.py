"""Every Python block of the documents runs; the blocks of one file share a namespace."""

import pathlib
import re
import sys
import types

import pytest

from ejkernel.kernels import kernel_registry

ROOT = pathlib.Path(__file__).parents[1]
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")]
FILES += sorted((ROOT / "docs").rglob("*.md"))


def blocks(path):
    """(first line, source) of each block."""
    text = path.read_text()
    return [(text.count("\n", 0, m.start(1)), m[1]) for m in BLOCK.finditer(text)]


def name(path):
    return str(path.relative_to(ROOT))


@pytest.fixture
def registry_restored():
    """Takes out again what a document registers, ops included."""
    before, ops = kernel_registry.list(), kernel_registry.ops()
    yield
    for entry in kernel_registry.list():
        if entry not in before and entry.base is None:
            kernel_registry.unregister(entry)
    for op in {*kernel_registry.ops()} - {*ops}:
        del kernel_registry._specs[op]


@pytest.mark.usefixtures("registry_restored")
@pytest.mark.parametrize("path", FILES, ids=name)
def test_blocks_run(path, monkeypatch):
    found = blocks(path)
    fences = path.read_text().count("```python")
    assert len(found) == fences, f"{name(path)} has a block that is not closed"
    # classes and dataclasses of a block look their module up
    module = types.ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)
    for line, source in found:
        # the lines before the block are blank, so that a traceback has the line of the file
        exec(compile("\n" * line + source, str(path), "exec"), vars(module))


def test_readme_has_an_example():
    assert blocks(ROOT / "README.md")


def test_pages_of_operations_check_what_they_show():
    pages = sorted((ROOT / "docs" / "ops").glob("*.md"))
    assert pages
    for page in pages:
        sources = "\n".join(source for _, source in blocks(page))
        assert re.search(r"^\s*assert ", sources, re.MULTILINE), f"{name(page)} has no assert"


def test_links_between_documents_lead_somewhere():
    for path in FILES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{name(path)} links to {target}"
