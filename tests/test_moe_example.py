"""The example of a mixture of experts learns, and equals two other forms of itself."""

import importlib.util
import pathlib
import re

import pytest

PATH = pathlib.Path(__file__).parents[1] / "examples" / "moe.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("moe_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_learns_and_equals_its_other_forms(example, capsys):
    assert example.main(["--steps", "30"]) == 0
    text = capsys.readouterr().out
    first, last = (float(x) for x in re.findall(r"loss ([0-9.]+)", text))
    assert last < first / 2
    assert "differ from a loop over the experts by" in text
    assert "differ from experts on 4 devices by" in text


@pytest.mark.slow  # the comparison that succeeds is tested above
def test_a_lost_expert_is_noticed(example):
    """The comparison can fail: a loop that leaves the last expert out differs."""
    params = example.init(example.jax.random.key(0))

    def without_the_last(params, tokens):
        kept = params["w_out"].at[-1].set(0.0)
        return example.dense({**params, "w_out": kept}, tokens)

    with pytest.raises(AssertionError, match="the grouped layer and a broken loop differ by"):
        example.check(params, {"a broken loop": without_the_last})
