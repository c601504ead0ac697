"""The example of a language model with `gla` trains, and generates what it computes at once."""

import importlib.util
import pathlib

import pytest

PATH = pathlib.Path(__file__).parents[1] / "examples" / "linear_lm.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("linear_lm", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_learns_and_generates(example, capsys):
    assert example.main(["--steps", "25"]) == 0
    shown = capsys.readouterr().out
    assert "step   25" in shown
    assert shown.splitlines()[-1] != example.TEXT[:16]


@pytest.mark.slow  # the way out of a failure; the success is tested above
def test_it_fails_when_the_loss_does_not_fall(example):
    with pytest.raises(AssertionError, match="the loss fell"):
        example.main(["--steps", "1"])
