"""Programs compiled for devices that are not here, in processes of their own."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from ejkernel import _settings, aot
from ejkernel.aot import _calls, _gpu, _programs
from ejkernel.kernels import kernel_registry

CACHE = pathlib.Path(__file__).parents[2] / ".cache"
SMALL = dict.fromkeys(("query", "key", "value"), jax.ShapeDtypeStruct((1, 256, 2, 64), "bfloat16"))
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install libtpu"
)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)


@pytest.fixture(autouse=True)
def _kept():
    with _settings.override(cache_dir=str(CACHE)):
        yield


def by_name(reports):
    return {(r.entry, r.direction): r for r in reports}


@needs_triton
def test_a_gpu():
    lines = []
    reports = aot.compile(
        "flash_attention",
        targets=["cuda:sm_80"],
        call=SMALL | {"causal": True},
        progress=lambda target, text: lines.append((target, text)),
    )
    made = by_name(reports)
    # forward: with a fixed reference, and careful for what it flags; backward: over queries, keys
    for direction in ("forward", "backward"):
        report = made["triton/gpu", direction]
        assert (report.status, len(report.kernels)) == ("compiled", 2)
        for kernel in report.kernels:
            assert 16 < kernel.registers <= 255
            assert 0 < kernel.shared_bytes <= 227 * 1024
            assert kernel.spill_bytes >= 0
            assert kernel.cycles is None
    flops = [k.flops for d in ("forward", "backward") for k in made["triton/gpu", d].kernels]
    assert flops[1] is None  # it depends on the numbers
    assert flops[2:] == [1.5 * flops[0], 2 * flops[0]]
    assert "needs a TPU" in made["pallas/tpu", "forward"].reason
    assert "cuda:sm_90 alone" in made["xla/any", "forward"].reason
    assert {r.status for r in reports} == {"compiled", "refused"}
    assert sorted(text.partition(" ")[2] for _, text in lines) == [
        "triton/gpu backward",
        "triton/gpu forward",
    ]
    text = aot.format_table(reports)
    assert "flash_attention for cuda:sm_80" in text
    assert "registers" in text
    again = [aot.Report.from_dict(plain) for plain in json.loads(aot.to_json(reports))]
    assert again == reports


@needs_libtpu
def test_a_tpu():
    reports = aot.compile("flash_attention", targets=["tpu:v5e"], call=SMALL)
    made = by_name(reports)
    for direction in ("forward", "backward"):  # one pass each: dq of a short call fits into VMEM
        report = made["pallas/tpu", direction]
        assert (report.status, len(report.kernels)) == ("compiled", 1), report.reason
        assert report.exact
        for kernel in report.kernels:
            assert kernel.cycles > 100
            assert kernel.vmem_bytes > 0
            assert 0 < kernel.mxu_share < 1
            assert 0 < kernel.vpu_share < 1
            assert 0 < kernel.peak_share <= 1
        plain = made["xla/any", direction]
        assert (plain.status, plain.kernels, plain.cycles) == ("compiled", (), None)
        assert plain.bytes_accessed > 0
    assert "needs a GPU" in made["triton/gpu", "forward"].reason
    assert "at least" not in aot.format_table(reports)


@needs_libtpu
def test_a_slice_of_tpus():
    (report,) = aot.compile(
        "flash_attention",
        targets=["tpu:v5e:4x4"],
        call=SMALL,
        entries=["pallas/tpu"],
        directions=["forward"],
    )
    assert report.status == "compiled", report.reason
    assert report.kernels[0].cycles > 100


@needs_libtpu
def test_two_targets_and_one_that_fails():
    reports = aot.compile(
        "flash_attention",
        targets=["tpu:v5e:3x5", "tpu:v6e"],
        call=SMALL,
        entries=["pallas/tpu"],
        directions=["forward"],
    )
    assert [r.target for r in reports] == ["tpu:v5e:3x5", "tpu:v6e"]
    assert [r.status for r in reports] == ["failed", "compiled"]


@needs_triton
@pytest.mark.parametrize(
    ("source", "timeout", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 60, "ended with signal 11"),
        ("import sys; sys.stderr.write('no room'); sys.exit(3)", 60, "ended with code 3: no room"),
        ("import time; time.sleep(60)", 5, "stopped after 5 s"),
        ("print('noise on the standard output'); import nothing_here", 60, "No module named"),
    ],
)
def test_a_process_that_breaks_is_a_report(source, timeout, words, tmp_path, monkeypatch):
    (tmp_path / "breaks.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    reports = aot.compile(
        "flash_attention",
        targets=["cuda:sm_90"],
        call=SMALL,
        imports=["breaks"],
        timeout=timeout,
    )
    assert {r.status for r in reports} == {"failed"}
    assert all(words in r.reason for r in reports)
    assert "FAILED" in aot.format_table(reports)


@needs_triton
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_ends_all_processes(error, tmp_path, monkeypatch):
    """Also the one that would go on for ten minutes, which is longer than a test may take."""
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "try:\n"
        "    (folder / 'first').mkdir()\n"
        "except FileExistsError:\n"
        "    (folder / 'new').write_text(str(os.getpid()))\n"
        "    (folder / 'new').rename(folder / 'second')\n"
        "    time.sleep(600)\n"
        "while not (folder / 'second').exists():\n"
        "    time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def interrupt(target, text):
        raise error

    with pytest.raises(error):
        aot.compile(
            "flash_attention",
            targets=["cuda:sm_90", "cuda:sm_80"],
            call=SMALL,
            imports=["slow"],
            progress=interrupt,
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "second").read_text()), 0)


@needs_triton
@pytest.mark.parametrize(
    ("op", "options", "words"),
    [
        ("nope", {}, "no op 'nope'"),
        ("flash_attention", {"entries": ["nope"]}, "no entry 'nope'; it has .*xla/any"),
        ("flash_attention", {"call": {"nope": 3}}, "no argument 'nope'"),
        ("flash_attention", {"call": {"query": SMALL["query"]}}, "`key` is missing"),
        ("flash_attention", {"call": SMALL | {"causal": 17}}, "`causal` must be"),
        ("flash_attention", {"call": {"causal": object()}}, "must be an array or a plain value"),
        ("flash_attention", {"configs": "some"}, "`configs` must be"),
        ("flash_attention", {"directions": ["sideways"]}, "`directions`"),
    ],
)
def test_what_makes_no_sense_is_raised_here(op, options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        aot.compile(op, targets=["cuda:sm_90"], **options)


@pytest.mark.slow
def test_every_op_has_an_example():
    for op in kernel_registry.ops():
        call = _calls.decode(op, {"arrays": {}, "options": {}})
        programs = _programs.Programs(call, aot.parse("tpu:v5e"))
        entries = _programs.chosen(op, ["xla"]) if op != "attention" else _programs.chosen(op, None)
        jobs = list(programs.jobs(entries, ["forward"], False, lambda entry: None))
        assert jobs, op
        assert programs.args.arrays()


def test_jobs_are_shared_by_entry_and_each_is_done_once():
    call = _calls.decode("flash_attention", {"arrays": {}, "options": {}})
    programs = _programs.Programs(call, aot.parse("tpu:v5e"))
    entries = _programs.chosen("flash_attention", None)
    jobs = list(programs.jobs(entries, ["forward", "backward"], False, lambda entry: None))
    parts = [_programs.share(jobs, number, 2) for number in range(2)]
    assert sorted(place for part in parts for place, _ in part) == list(range(len(jobs)))
    able = [{job.entry.name for _, job in part if job.refusal is None} for part in parts]
    assert able[0].isdisjoint(able[1])
    alone = [job for job in jobs if job.entry.name == "xla/any"]
    assert [len(_programs.share(alone, number, 2)) for number in range(2)] == [1, 1]


def test_a_call_is_what_a_table_knows():
    call = _calls.decode("flash_attention", _calls.encode(SMALL | {"sliding_window": (16, 0)}))
    document = _programs.Programs(call, aot.parse("tpu:v5e")).document("backward")
    assert document["statics"]["sliding_window"] == [16, 0]
    assert document["wanted"] == ["key", "query", "value"]
    assert "device" not in document


def test_resource_usage_of_gpus():
    text = (
        "Resource usage:\n Common:\n  GLOBAL:0\n Function one:\n  REG:40 STACK:0 SHARED:0 LOCAL:0"
        "\n Function two:\n  REG:255 STACK:112 SHARED:0 LOCAL:0 CONSTANT[0]:592 TEXTURE:0\n"
    )
    assert _gpu.nvidia_usage(text, "two") == {"registers": 255, "spill_bytes": 112}
    assert _gpu.nvidia_usage(text, "three") == {}
    amd = "    .vgpr_count:     256\n    .vgpr_spill_count: 187\n"
    assert _gpu.amd_usage(amd) == {"registers": 256, "spill_bytes": 748}


def test_export_checks_name_our_calls():
    checks = aot.export_checks()
    assert any(check.is_custom_call() == "triton_kernel_call" for check in checks)
    assert any(check.is_custom_call() == "__cudnn$fmhaSoftmaxBackward" for check in checks)
    exported = jax.export.export(jax.jit(jnp.sin), disabled_checks=checks)(1.0)
    assert exported.platforms == ("cpu",)


@needs_libtpu
def test_the_caller_does_not_load_libtpu():
    # in a process of its own: other tests load it
    program = """
import pathlib
import jax
from ejkernel import aot

aot.compile("flash_attention", targets=["tpu:v5e"], entries=["triton"])
maps = pathlib.Path("/proc/self/maps")
loaded = maps.exists() and "libtpu.so" in maps.read_text()
print(jax.default_backend(), loaded)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.split() == ["cpu", "False"]
