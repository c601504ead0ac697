"""The cache of oracles' answers."""

import numpy as np
import pytest

from tests.kernels import harness, oracles


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(oracles, "FOLDER", tmp_path)
    return tmp_path


def test_a_problem_is_made_once_and_comes_back_equal(folder):
    made = harness.problem.__wrapped__("mean_pooling", "plain", "bfloat16")
    again = oracles.remember(("mean_pooling", "plain", "bfloat16", 11), "cpu", lambda: 1 / 0)
    assert len(list(folder.iterdir())) == 1
    assert made.args.inputs.dtype == again.args.inputs.dtype == "bfloat16"
    assert type(made.args) is type(again.args)
    for kind in ("outputs", "gradients"):
        for name, value in getattr(made.oracle, kind).items():
            assert value.dtype == np.float64
            np.testing.assert_array_equal(value, getattr(again.oracle, kind)[name])


def test_a_damaged_file_is_made_again(folder):
    made = harness.problem.__wrapped__("mean_pooling", "plain", "float32")
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:50])
    again = harness.problem.__wrapped__("mean_pooling", "plain", "float32")
    np.testing.assert_array_equal(made.oracle.outputs["out"], again.oracle.outputs["out"])
    assert len(path.read_bytes()) > 50


def test_what_the_oracle_is_made_of_is_in_the_key(folder, monkeypatch):
    harness.problem.__wrapped__("mean_pooling", "plain", "float32")
    monkeypatch.setattr(oracles, "_fingerprint", lambda: "another source")
    harness.problem.__wrapped__("mean_pooling", "plain", "float32")
    assert len(list(folder.iterdir())) == 2


def test_a_gpu_takes_what_a_cpu_made_unless_its_own_is_asked_for(folder, monkeypatch):
    made = harness.problem.__wrapped__("mean_pooling", "plain", "float32")
    monkeypatch.setattr(harness, "BACKEND", "gpu")
    again = harness.problem.__wrapped__("mean_pooling", "plain", "float32")
    np.testing.assert_array_equal(made.args.inputs, again.args.inputs)
    assert len(list(folder.iterdir())) == 1
    harness.problem.__wrapped__("mean_pooling", "plain", "float32", here=True)
    harness.problem.__wrapped__("mean_pooling", "plain", "float32", seed=3)  # on the CPU
    assert len(list(folder.iterdir())) == 3
