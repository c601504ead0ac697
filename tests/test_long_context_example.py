"""`examples/long_context.py`, at a small length."""

import importlib.util
import pathlib
import re

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def example():
    file = EXAMPLES / "long_context.py"
    spec = importlib.util.spec_from_file_location("long_context_example", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_needles_are_found_and_drawn(example, capsys, tmp_path):
    file = tmp_path / "plot.png"
    assert example.main(["--lengths", "768", "--plot", str(file)]) == 0
    text = capsys.readouterr().out
    shares = dict(re.findall(r"768  (full|block-sparse|native sparse) +(\d+)%", text))
    assert shares.keys() == {"full", "block-sparse", "native sparse"}
    assert shares["full"] == shares["native sparse"] == "100"
    assert int(shares["block-sparse"]) < 100
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_method_that_misses_needles_is_noticed(example, capsys, monkeypatch):
    monkeypatch.setitem(example.METHODS, "native sparse", example.fixed_blocks)
    assert example.main(["--lengths", "768"]) == 1
    assert "native sparse missed needles at 768 tokens" in capsys.readouterr().err


def test_lengths_that_cannot_hold_the_needles_are_refused(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--lengths", "100"])
    assert "at least 544" in capsys.readouterr().err
