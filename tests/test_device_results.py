"""Which kernel a generated test is about, and what a run leaves behind."""

import json
import types

import pytest

from ejkernel.kernels import kernel_registry
from tests import device_results


@pytest.mark.parametrize(
    ("nodeid", "name"),
    [
        ("tests/kernels/test_conformance.py::test_a[gla-xla/any-plain]", "gla xla/any"),
        (
            "tests/kernels/test_edges.py::test_b[nan-extra0-triton/gpu]",
            "flash_attention triton/gpu",
        ),
        (
            "tests/kernels/test_conformance.py::test_c[flash_attention-cudnn/gpu@-1-causal]",
            "flash_attention cudnn/gpu@-1",
        ),
        ("tests/kernels/test_edges.py::test_f[no_key-triton/gpu]", "flash_attention triton/gpu"),
        (
            "tests/kernels/test_cudnn.py::test_d[odd-float16-cudnn/gpu]",
            "flash_attention cudnn/gpu",
        ),
        ("tests/kernels/test_cudnn.py::test_d[odd-float16]", None),
        ("tests/ops/test_chain.py::test_e", None),
    ],
)
def test_names(nodeid, name):
    assert device_results.entry_of(nodeid) == name


def report(when, outcome, properties, nodeid="t.py::t[gla-xla/any-plain]"):
    return types.SimpleNamespace(
        when=when, outcome=outcome, skipped=False, nodeid=nodeid, user_properties=properties
    )


def test_counts(tmp_path):
    recorder = device_results.Recorder(str(tmp_path / "results.json"))
    for when, outcome, properties in (
        ("setup", "passed", []),
        ("call", "passed", []),
        ("call", "passed", [("refused", True)]),
        ("call", "failed", []),
        ("setup", "failed", []),
    ):
        recorder.pytest_runtest_logreport(report(when, outcome, properties))
    recorder.pytest_sessionfinish()
    content = json.loads((tmp_path / "results.json").read_text())
    version = kernel_registry.list("gla")[0].version
    counts = {"version": version, "failed": 2, "passed": 1, "refused": 1}
    assert content["entries"] == {"gla xla/any": counts}
    assert content["backend"] == "cpu"


def run_with(path, nodeid):
    recorder = device_results.Recorder(str(path))
    recorder.pytest_runtest_logreport(report("call", "passed", [], nodeid))
    recorder.pytest_sessionfinish()
    return json.loads(path.read_text())


def test_a_second_run_keeps_the_other_entries(tmp_path):
    path = tmp_path / "results.json"
    run_with(path, "t.py::t[gla-xla/any-plain]")
    content = run_with(path, "t.py::t[attention-xla/any-plain]")
    assert set(content["entries"]) == {"gla xla/any", "attention xla/any"}
    path.write_text(json.dumps(content | {"device": "another"}))
    content = run_with(path, "t.py::t[gla-xla/any-plain]")
    assert set(content["entries"]) == {"gla xla/any"}
