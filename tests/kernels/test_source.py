"""The fingerprint of a kernel's code follows its code, and nothing else."""

import pathlib

import pytest

from ejkernel.kernels import _source, kernel_registry

TEXT = '''"""Docs."""

import x  # why


def f(a):
    """More."""

    return "# no comment" + a  # one
'''


def test_comments_docstrings_and_empty_lines_do_not_count():
    assert _source._code(TEXT) == 'import x\ndef f(a):\n    return "# no comment" + a'


def files_of(op, name, monkeypatch):
    """The files that a fingerprint reads."""
    read, code = [], _source._code
    entry = next(e for e in kernel_registry.list(op) if e.name == name)
    _source._of_modules.cache_clear()
    with monkeypatch.context() as patch:
        text = pathlib.Path.read_text
        patch.setattr(pathlib.Path, "read_text", lambda p: read.append(p) or text(p))
        assert _source.fingerprint(entry)
    assert code(TEXT)
    return {str(p).partition("/kernels/")[2] for p in read}


@pytest.mark.parametrize(
    ("op", "name", "more"),
    [
        ("flash_attention", "triton/gpu", {"_triton/flash_attention/bwd.py"}),
        ("gla", "xla/any", {"_xla/_blocks/chunks.py"}),
        ("ring_attention", "xla/any", {"_ring/schedule.py", "_xla/flash_attention/fwd.py"}),
    ],
)
def test_what_is_read(op, name, more, monkeypatch):
    found = files_of(op, name, monkeypatch)
    assert more <= found
    assert not [f for f in found if f.startswith(("_specs", "_reference", "_registry"))]


def test_a_changed_file_changes_it(monkeypatch):
    entry = kernel_registry.list("mean_pooling")[0]
    before, code = _source.fingerprint(entry), _source._code
    _source._of_modules.cache_clear()
    monkeypatch.setattr(_source, "_code", lambda text: code(text) + "\nmore")
    assert _source.fingerprint(entry) != before
    _source._of_modules.cache_clear()
