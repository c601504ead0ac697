"""Which kernel a generated test is about, and what a run leaves behind."""

import json
import types

import pytest

from ejkernel.kernels import _source, _support, kernel_registry
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
        ("tests/kernels/test_pallas_gpu.py::test_numbers[causal]", "flash_attention pallas/gpu"),
        (
            "tests/kernels/test_pallas_gpu_backward.py::test_gradients_in_order[odd]",
            "flash_attention pallas/gpu",
        ),
        (
            "tests/kernels/test_pallas_gpu_segments.py::test_numbers_as_users_get_them[packed]",
            "flash_attention pallas/gpu",
        ),
        (
            "tests/kernels/test_pallas_gpu_backward.py::test_exact_weights_bear_large_scores[True]",
            "flash_attention pallas/gpu",
        ),
        ("tests/kernels/test_pallas_gpu.py::test_refused_options[fp16]", None),
        (
            "tests/kernels/test_pallas_gpu_grouped.py::test_more_numbers[batched]",
            "grouped_matmul pallas/gpu",
        ),
    ],
)
def test_names(nodeid, name):
    assert device_results.entry_of(nodeid) == name


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        ("gla-xla/any-plain", "run"),
        ("flash_attention-triton/gpu-plain", "interpreted"),
        ("flash_attention-triton/gpu-forward-example-hip:gfx942", "compiled for hip:gfx942"),
        ("flash_attention-pallas/tpu-forward-example-tpu:v5e", "compiled for tpu:v5e"),
        ("flash_attention-cudnn/gpu-plain", None),  # not on a CPU
    ],
)
def test_kinds(parameters, kind):
    nodeid = f"t.py::t[{parameters}]"
    assert device_results.kind_of(nodeid, device_results.entry_of(nodeid)) == kind


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
    assert list(content["entries"]) == ["gla xla/any"]
    entry = next(e for e in kernel_registry.list("gla") if e.name == "xla/any")
    found = content["entries"]["gla xla/any"]
    assert found["checks"] == {"run": {"failed": 2, "passed": 1, "refused": 1}}
    assert (found["version"], found["source"]) == (entry.version, _source.fingerprint(entry))
    assert content["backend"] == "cpu"


def run_with(path, nodeid):
    recorder = device_results.Recorder(str(path))
    recorder.pytest_runtest_logreport(report("call", "passed", [], nodeid))
    recorder.pytest_sessionfinish()
    return json.loads(path.read_text())


def test_a_run_that_is_cut_short_leaves_the_entries_that_it_ended(tmp_path):
    path = tmp_path / "results.json"
    recorder = device_results.Recorder(str(path))
    ids = [f"t.py::t[{x}]" for x in ("gla-xla/any-a", "gla-xla/any-b", "attention-xla/any-c")]
    recorder.pytest_xdist_node_collection_finished(None, ids)

    def run(nodeid):
        for when in ("setup", "call", "teardown"):
            recorder.pytest_runtest_logreport(report(when, "passed", [], nodeid))

    run(ids[0])
    run(ids[2])
    assert set(json.loads(path.read_text())["entries"]) == {"attention xla/any"}
    run(ids[1])
    found = json.loads(path.read_text())["entries"]
    assert found["gla xla/any"]["checks"] == {"run": {"passed": 2}}


def test_a_second_run_keeps_the_other_entries(tmp_path):
    path = tmp_path / "results.json"
    run_with(path, "t.py::t[gla-xla/any-plain]")
    content = run_with(path, "t.py::t[attention-xla/any-plain]")
    assert set(content["entries"]) == {"gla xla/any", "attention xla/any"}
    path.write_text(json.dumps(content | {"device": "another"}))
    content = run_with(path, "t.py::t[gla-xla/any-plain]")
    assert set(content["entries"]) == {"gla xla/any"}


def test_kernels_that_passed_need_no_second_run(tmp_path):
    path = tmp_path / "results.json"
    assert device_results.tested(path) == {}
    run_with(path, "t.py::t[gla-xla/any-plain]")
    content = run_with(path, "t.py::t[attention-xla/any-plain]")
    assert set(device_results.tested(path)) == {"gla xla/any", "attention xla/any"}
    path.write_text(json.dumps(content | {"device": "another"}))
    assert device_results.tested(path) == {}
    entries = content["entries"]
    entries["gla xla/any"]["checks"]["compiled for cuda:sm_90"] = {"failed": 1}
    entries["attention xla/any"]["source"] = "of other code"
    path.write_text(json.dumps(content))
    assert device_results.tested(path) == {}


def test_what_the_support_table_says(tmp_path, monkeypatch):
    monkeypatch.setattr(_support, "_RESULTS", tmp_path)
    entry = next(e for e in kernel_registry.list("flash_attention") if e.name == "triton/gpu")
    assert _support._checks(entry) == ["not tested"]
    path = tmp_path / "cpu_matrix.json"
    call = "t.py::t[flash_attention-triton/gpu-"
    run_with(path, f"{call}plain]")
    assert _support._checks(entry) == ["interpreted"]
    content = json.loads(path.read_text())
    found = content["entries"]["flash_attention triton/gpu"]
    found["checks"] |= {"compiled for cuda:sm_90": {"passed": 2}, "run": {"passed": 1, "failed": 1}}
    found["checks"]["compiled for hip:gfx942"] = {"passed": 1, "refused": 1}
    path.write_text(json.dumps(content))
    assert _support._checks(entry) == ["interpreted", "compiled for sm_90, gfx942"]
    found["checks"]["run"] = {"passed": 3}
    path.write_text(json.dumps(content | {"device": "NVIDIA H200"}))
    assert _support._checks(entry)[-1] == "tests passed on NVIDIA H200"
    found["source"] = "of other code"
    path.write_text(json.dumps(content))
    assert _support._checks(entry) == [
        "interpreted (stale)",
        "compiled for sm_90 (stale), gfx942 (stale)",
        "tests passed on cpu (stale)",
    ]
