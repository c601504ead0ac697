"""The harness: numbers before times, peers that fail, bars, and the command."""

import dataclasses
import functools
import importlib.util
import json
import pathlib
import runpy
import subprocess
import sys

import jax
import jax.experimental
import jax.numpy as jnp
import pytest

from ejkernel import _folders, cli
from ejkernel.bench import (
    Bar,
    Peer,
    Workload,
    _bars,
    _programs,
    _results,
    _runner,
)
from ejkernel.bench._results import OURS, Program, Row
from ejkernel.bench._workloads import CEILING, TFLOPS
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._specs import (
    _work_attention,
    _work_matmul,
)
from tests.kernels import harness

ROOT = pathlib.Path(__file__).parents[2]
POOL = ("mean_pooling",)
QUICK = _runner.Options(rounds=2, seconds=0.0)


def pooled(dtype, key):
    return _work_matmul._pooled(dtype, key, 1, 150, 2, 16, 64)


def means(values):
    """Right numbers, by another way than ours."""
    x, size = values["inputs"], values["chunk_size"]
    parts = [x[:, i : i + size].mean(axis=1) for i in range(0, x.shape[1], size)]
    return jnp.stack(parts, axis=1)


def broken(values):
    raise RuntimeError("no such kernel\nfor this device")


RIGHT = Peer("right", POOL, means)
WRONG = Peer("wrong", POOL, lambda values: means(values) * 1.01)
BROKEN = Peer("broken", POOL, broken)
OTHER = Peer("other", POOL, lambda values: 2 * means(values), agrees=False)
ABSENT = Peer("absent", POOL, means, why_not=lambda values: "it is not for this call")


def workload(*peers, **more):
    more = {"modes": ("fwd",), "known_peers": False} | more
    return Workload("mean_pooling", "T150", pooled, peers=peers, **more)


def measure(*workloads, options=QUICK):
    return _runner.run(workloads, options)


def test_every_program_is_checked_before_it_is_timed():
    document = measure(workload(RIGHT, WRONG, BROKEN, OTHER, ABSENT, modes=("fwd", "fwd+bwd")))
    assert [row.mode for row in document.rows] == ["fwd", "fwd+bwd"]
    for row in document.rows:
        assert [p.name for p in row.programs] == ["xla/any", "right", "wrong", "broken", "other"]
        timed = {p.name for p in row.programs if p.median is not None}
        assert timed == {"xla/any", "right", "other"}
        assert row.program("wrong").failed.startswith("disagrees with ours: result 0 is off by")
        assert row.program("broken").failed == "RuntimeError: no such kernel for this device"
        assert row.program("xla/any").kind == OURS
        assert row.program("xla/any").version == kernel_registry.list("mean_pooling")[-1].version
        assert row.auto == "xla/any"
        assert all(p.rounds == 2 and p.spread is not None for p in row.programs if p.median)
    assert {c.name: c.unit for c in document.ceilings} == {"matmul": "TFLOP/s", "copy": "GB/s"}
    row = document.rows[0]
    ours = row.program("xla/any")
    work, scale = (row.bytes, 1e6) if row.bound == "memory" else (row.flops, 1e9)
    assert ours.rate == pytest.approx(work / ours.median / scale)
    assert ours.share == pytest.approx(ours.rate / document.ceiling(row.bound, "float32"))


def test_a_kernel_of_ours_that_is_wrong_has_no_number(tmp_path, capsys):
    entry = harness.find_entry("mean_pooling", "xla/any")

    def off(args, cfg):
        outputs, residuals = entry.fn(args, cfg)
        return tuple(1.001 * x for x in outputs), residuals

    kernel_registry.register("mean_pooling", "xla", "any", priority=1, config=entry.config)(off)
    wrong = harness.find_entry("mean_pooling", "xla/any@1")
    try:
        document = measure(workload())
        file = tmp_path / "w.py"
        file.write_text("from tests.bench.test_bench import workload\nWORKLOADS = [workload()]\n")
        code = cli.main(["bench", "--workloads", str(file), "--rounds", "1"])
    finally:
        kernel_registry.unregister(wrong)
    (row,) = document.rows
    assert row.program(wrong.name).median is None
    assert row.program(wrong.name).failed.startswith("wrong: out: ")
    assert row.program("xla/any").median > 0
    assert code == 1
    assert "xla/any@1: wrong: out" in capsys.readouterr().err


def test_calls_in_a_loop_are_all_made_and_timed_as_one():
    counted = []

    def counting(values):
        out = means(values)
        return jax.experimental.io_callback(
            lambda x: (counted.append(1), x)[1], jax.ShapeDtypeStruct(out.shape, out.dtype), out
        )

    call = _programs.Call.of(workload())
    expected = _programs.pure(call, means, "fwd")()
    assert jnp.allclose(_programs.looped(call, counting, 5)(), expected)
    assert len(counted) == 5
    (row,) = measure(workload(RIGHT, repeats=3)).rows
    assert row.program("right").median > 0
    assert row.program("xla/any").median > 0


def test_an_op_that_writes_into_its_arguments_is_measured_in_place():
    spec = kernel_registry.spec("update_paged_cache")
    case = next(c for c in spec.cases() if c.name == "plain")
    made = Workload("update_paged_cache", "plain", case.values, modes=("fwd",))
    call = _programs.Call.of(made)
    before = {name: jnp.array(call.values[name]) for name in spec.written}
    entry = harness.find_entry("update_paged_cache", "xla/any")
    run = _programs.in_place(call, _programs.of_entry(call, entry, "fwd").fn, "fwd")
    first, second = run(), run()
    assert first["key_cache"].is_deleted() or first is not second
    for name in spec.written:  # the arrays of the call stay as they are
        assert (call.values[name] == before[name]).all()
    (row,) = measure(made).rows
    assert row.program("xla/any").median > 0


@pytest.mark.parametrize(("runs", "repeats"), [(2, 1), (1, 2)])
def test_a_step_of_decoding_takes_the_state_of_the_step_before(runs, repeats):
    module = runpy.run_path(str(ROOT / "benchmarks" / "gpu_linear.py"))
    made = module["decode"]((2, 8), batch=3, repeats=repeats)
    call = _programs.Call.of(made)
    step = kernel_registry.get("gla", platform="xla")
    run = _programs.in_place(call, lambda values: step(**values), "fwd", repeats)
    *_, second = (run() for _ in range(runs))
    first = step(**call.values)
    expected = step(**call.values | {"initial_state": first[1]})
    for name, value in zip(("out", "state"), expected, strict=True):
        near = float(jnp.finfo(value.dtype).eps) * 8  # two compilations of one formula
        assert jnp.allclose(second[name], value, rtol=near, atol=near)
        if name == "state":  # and it is another than after the first step, far beyond rounding
            assert not jnp.allclose(second[name], first[1], rtol=1e-2, atol=1e-2)
    (row,) = measure(made).rows
    assert row.program("xla/any").median > 0
    assert row.program("copy of the states").median > 0
    names = [w.name for w in module["WORKLOADS"]]
    assert len(names) == 14
    assert "B4 T4096 H16 d128" in names


def test_memory_and_eager_calls_are_quantities_of_their_own():
    small = functools.partial(_work_attention.qkv, b=1, t=64, h=1, g=1, d=16, options={})
    more = {"modes": ("fwd+bwd",), "known_peers": False}
    memory = Workload("flash_attention", "m", small, quantity="bytes", bars=(Bar(1.0),), **more)
    (row,) = measure(memory).rows
    assert (row.unit, len(row.programs)) == ("bytes", 1)
    assert row.programs[0].median > 1
    assert not row.bars[0].kept
    eager = dataclasses.replace(memory, quantity="us", modes=("fwd",), bars=(Bar(1e9),))
    (row,) = measure(eager).rows
    assert row.unit == "us"
    assert abs(row.programs[0].median) < 1e6
    assert row.bars[0].kept


# Bars


def row(times, **more):
    programs = [Program(name, OURS if "/" in name else "peer", ms) for name, ms in times.items()]
    return Row("mean_pooling", "T150", "fwd", "float32", programs, auto="xla/any", **more)


@pytest.mark.parametrize(("least", "kept"), [(2.0, True), (2.1, False)])
def test_a_bar_compares_ours_with_a_peer(least, kept):
    made = row({"xla/any": 1.0, "peer": 2.0})
    _bars.within(made, workload(bars=(Bar(least, "peer"),)))
    (verdict,) = made.bars
    assert (verdict.ratio, verdict.kept) == (2.0, kept)


def test_a_missed_bar_is_measured_again_in_pairs():
    made, asked = row({"xla/any": 1.0, "peer": 1.0}), []

    def again(names):
        asked.extend(names)
        return {"xla/any": [1.0, 1.0, 4.0], "peer": [2.0, 2.0, 2.0]}

    _bars.within(made, workload(bars=(Bar(1.5, "peer"),)), again)
    assert asked == ["xla/any", "peer"]
    assert made.bars[0].ratio == 2.0


def test_auto_is_compared_with_the_best_of_ours_and_a_missing_peer_breaks_nothing():
    made = row({"xla/any": 1.0, "triton/gpu": 0.5})
    _bars.within(made, workload(bars=(Bar(0.98, "the best of ours"), Bar(1.0, "not here"))))
    assert [v.ratio for v in made.bars] == [0.5, None]
    assert [v.kept for v in made.bars] == [False, True]


def test_a_bar_may_ask_for_a_share_of_the_ceiling_or_for_a_rate():
    made = row({"xla/any": 2.0}, flops=300 * 10**9, bytes=10**9)
    bars = (Bar(0.5, CEILING), Bar(100.0, TFLOPS), Bar(200.0, TFLOPS), Bar(0.5, CEILING, of="x/y"))
    _bars.within(made, workload(bars=bars))
    assert [(v.beside, v.ratio) for v in made.bars] == [("100 TFLOP/s", 1.5), ("200 TFLOP/s", 0.75)]
    document = _results.new([made])
    document.ceilings = [_results.Ceiling("copy", "float32", 2000.0, "GB/s")]
    made.bound = "memory"
    _results.fill_rates(document)
    _bars.across(document, workload(bars=bars), made)
    assert made.bars[2].ratio == 0.25  # 500 GB/s of 2000
    assert made.bars[3].ratio is None
    assert [line.rpartition(": ")[2] for line in _bars.missed(document)] == [
        "auto is 0.75 times as fast as 200 TFLOP/s, at least 1 is promised",
        "auto is 0.25 times as fast as its ceiling, at least 0.5 is promised",
    ]


def test_an_option_may_cost_only_so_much_of_the_rate_of_another_row():
    base, mine = row({"xla/any": 1.0}), row({"xla/any": 2.0})
    base.workload = "plain"
    base.programs[0].rate, mine.programs[0].rate = 10.0, 5.0
    document = _results.new([base, mine])
    _bars.across(document, workload(bars=(Bar(0.9, workload="plain"),)), mine)
    assert (mine.bars[0].ratio, mine.bars[0].kept) == (0.5, False)
    said = _bars.missed(document)
    assert said == [
        "mean_pooling, T150, fwd: auto is 0.50 times as fast as its rate in plain, at least 0.9 is "
        "promised"
    ]


# The command


@pytest.fixture
def suite(tmp_path):
    file = tmp_path / "suite.py"
    file.write_text(
        "from tests.bench.test_bench import RIGHT, workload\nfrom ejkernel.bench import Bar\n"
        "WORKLOADS = [workload(RIGHT, bars=(Bar(1e9, 'right'),))]\n"
    )
    return str(file)


def test_the_command_writes_results_and_a_report(suite, tmp_path, capsys):
    out, report = tmp_path / "new.json", tmp_path / "r.html"
    argv = ["bench", "--workloads", suite, "--rounds", "1", "--out", str(out)]
    code = cli.main([*argv, "--report", str(report), "--json"])
    said = capsys.readouterr()
    assert code == 0  # a bar counts only when --bars asks for it
    assert json.loads(said.out) == json.loads(out.read_text())
    assert "[1/1] mean_pooling, T150, fwd: " in said.err
    document = _results.read(out)
    assert document.source == _results.source_hash()
    assert document.rows[0].program("right").median > 0
    assert report.read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.json", "r.html", "suite.py"]


def test_a_missed_promise_is_an_exit_code(suite, capsys):
    assert cli.main(["bench", "--workloads", suite, "--rounds", "1", "--bars"]) == 1
    said = capsys.readouterr()
    assert "at least 1e+09 is promised" in said.err
    assert "ceiling of float32: copy" in said.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("nope",), "There is no op 'nope'"),
        (("--rounds", "0"), "--rounds must be at least 1"),
        (("--rounds", "x"), "invalid int value"),
        (("--seconds", "-1"), "--seconds must be a number of seconds"),
        (("--out", "/nowhere/x.json"), "--out /nowhere/x.json is no file"),
        (("--report", "."), "--report . is no file"),
        (("mean_pooling", "--only", "zzz"), "no workload has 'zzz'"),
        (("mean_pooling", "--entry", "cudnn/gpu"), "--entry 'cudnn/gpu' is none of "),
        (("mean_pooling", "--peer", "cuBLAS"), "--peer 'cuBLAS' is not here"),
        (("mean_pooling", "--dtype", "floaty"), "'floaty' is no dtype"),
        (("--workloads", "/nowhere.py"), "/nowhere.py is no Python file"),
        (("--public", "/nowhere", "mean_pooling"), "holds no package"),
        (("--compare", "/nowhere/a.json", "/nowhere/b.json"), "No such file"),
    ],
)
def test_bad_input_is_one_line(argv, words, capsys):
    assert cli.main(["bench", *argv]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if not line.startswith("measuring")]
    assert len(lines) == 1
    assert words in lines[0]


def test_a_file_of_workloads_must_define_them(tmp_path, capsys):
    file = tmp_path / "w.py"
    for text, words in (("x = 1\n", "must define `WORKLOADS`"), ("1/0\n", "ZeroDivisionError")):
        file.write_text(text)
        assert cli.main(["bench", "--workloads", str(file)]) == 2
        assert words in capsys.readouterr().err


def test_list_and_help_measure_nothing(capsys):
    assert cli.main(["bench", "mean_pooling", "--list"]) == 0
    assert "T8192 H8 d64 chunk 64" in capsys.readouterr().out
    for command in ("bench", "tune"):
        assert cli.main([command, "--help"]) == 0
        assert f"ejkernel {command} " in capsys.readouterr().out.partition("examples:")[2]


def test_a_file_that_cannot_be_written_whole_is_not_written(tmp_path, monkeypatch):
    file = tmp_path / "x.json"
    file.write_text("before")
    monkeypatch.setattr(_folders.os, "replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        _folders.write_whole(file, "after")
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_committed_workloads_load():
    # in a process of its own: one of them sets the number of devices
    program = (
        "import glob; from ejkernel.bench import _workloads; "
        "files = sorted(glob.glob('benchmarks/[cg]pu_*.py'), key=lambda f: 'ring' not in f); "
        "others = ('memcheck.py', 'soak.py'); "
        "print([len(_workloads.load(f)) for f in files if not f.endswith(others)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    counts = json.loads(done.stdout)
    assert len(counts) >= 11
    assert all(counts)


@pytest.fixture(scope="module")
def serving():
    """The calls of `benchmarks/gpu_serving.py`, 64 times smaller."""
    spec = importlib.util.spec_from_file_location("serving", ROOT / "benchmarks" / "gpu_serving.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.workloads(scale=64)


def test_calls_of_serving_are_those_that_bars_are_for(serving):
    names = {(made.op, made.name) for made in serving}
    assert len(names) == len(serving)
    for made in serving:
        call = _programs.Call.of(made)
        flops, size = call.work("fwd")
        assert flops > 0
        assert size > 0
        for bar in made.bars:
            assert bar.of == "triton/gpu"
            assert not bar.workload or (made.op, bar.workload) in names


@pytest.mark.slow
def test_calls_of_serving_run_on_a_cpu(serving):
    document = measure(*{made.op: made for made in serving}.values())  # one of each op
    assert len(document.rows) == 4
    for row in document.rows:
        assert row.program("xla/any").median > 0, row.workload
        assert [p.failed for p in row.programs if p.failed] == []


@pytest.mark.slow
def test_two_ops_on_a_cpu_as_a_user_starts_it(tmp_path):
    report = tmp_path / "r.html"
    command = [sys.executable, "-m", "ejkernel", "bench", "mean_pooling", "flash_attention"]
    done = subprocess.run(
        [*command, "--report", str(report)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "flash_attention" in done.stdout
    assert "[10/10]" in done.stderr
    assert report.read_text().count("<svg") == 10
