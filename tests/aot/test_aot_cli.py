"""`ejkernel aot` and `ejkernel tune --static`."""

import importlib.resources
import importlib.util
import json

import jax
import pytest

from ejkernel import _device, aot, cli
from ejkernel.aot import _calls, _programs, _table
from ejkernel.modules import FlashAttention
from ejkernel.ops.config import table
from ejkernel.ops.core.kernel import Invocation

SMALL = ("--shape", "1,256,1,128", "--entry", "pallas/tpu")
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install libtpu"
)


@pytest.fixture
def run(capsys):
    def run(*argv):
        code = cli.main(argv)
        done = capsys.readouterr()
        return code, done.out, done.err

    return run


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("aot",), "OP"),
        (("aot", "flash_attention"), "--target"),
        (("aot", "flash_attention", "--target", "tpu:v9"), "'tpu:v9' is not known"),
        (("aot", "flash_attention", "--target", "cuda:sm_90", "--configs", "x"), "invalid choice"),
        (("aot", "flash_attention", "--target", "tpu:v5e", "--shape", "nope=1"), "no array 'nope'"),
        (
            ("aot", "flash_attention", "--target", "tpu:v5e", "--timeout", "-1"),
            "--timeout must be positive; got -1.0",
        ),
        (("tune", "flash_attention", "--target", "tpu:v5e"), "--static"),
        (("tune", "flash_attention", "--static", "--target", "cuda:sm_90"), "no static cycles"),
        (
            (
                "tune",
                "flash_attention",
                "--static",
                "--target",
                "tpu:v5e",
                "--out",
                f"{__file__}/x",
            ),
            f"--out {__file__}/x is no folder",  # said before anything is compiled
        ),
    ],
)
def test_bad_input_is_one_line(run, argv, words):
    code, out, err = run(*argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_a_missing_compiler_is_one_line(run, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = run("aot", "flash_attention", "--target", "tpu:v5e")
    assert code == 2
    assert err.endswith("needs libtpu, which is not here: pip install libtpu\n")


def report(**changes):
    values = {"op": "flash_attention", "target": "tpu:v5e", "entry": "pallas/tpu"}
    values |= {"direction": "forward", "status": "compiled", "config": {"block_q": 128}}
    return aot.Report(**values | changes)


def kernels(cycles, exact=True):
    return (aot.KernelReport(name="k", cycles=cycles, exact=exact, mxu_share=0.5, vpu_share=0.1),)


@pytest.mark.parametrize(
    ("states", "code"),
    [(["compiled", "refused"], 0), (["compiled", "failed"], 1), (["refused"], 1)],
)
def test_exit_codes(run, monkeypatch, states, code):
    monkeypatch.setattr(aot, "compile", lambda *a, **k: [report(status=s) for s in states])
    done, out, _ = run("aot", "flash_attention", "--target", "tpu:v5e")
    assert done == code
    assert "flash_attention for tpu:v5e" in out
    done, out, _ = run("aot", "flash_attention", "--target", "tpu:v5e", "--json")
    assert (done, [r["status"] for r in json.loads(out)]) == (code, states)


@pytest.mark.parametrize(
    ("backward", "code"),
    [
        ([{"kernels": kernels(7.0)}], 0),
        ([{"kernels": kernels(7.0)}, {"status": "failed"}, {"status": "refused"}], 0),
        ([{"status": "failed"}], 1),
        ([{"status": "refused"}], 1),
        ([{"kernels": kernels(9.0)}, {"kernels": kernels(7.0, exact=False)}], 1),  # undecided
    ],
)
def test_exit_codes_of_tuning(run, monkeypatch, backward, code):
    """Tuning is done when each direction on each target has a configuration."""
    reports = [
        report(kernels=kernels(800.0)),
        *(report(direction="backward", **b) for b in backward),
    ]
    monkeypatch.setattr(aot, "compile", lambda *a, **k: reports)
    done, out, _ = run("tune", "flash_attention", "--static", "--target", "tpu:v5e")
    assert done == code
    _, _, chosen = out.partition("chosen\n")
    assert "forward" in chosen
    assert ("backward" in chosen) == (code == 0)


def test_tuning_that_compiles_nothing_fails(run, monkeypatch):
    monkeypatch.setattr(aot, "compile", lambda *a, **k: [])
    assert run("tune", "flash_attention", "--static", "--target", "tpu:v5e")[0] == 1


def test_a_lower_bound_leaves_it_undecided_when_it_may_be_the_best():
    known = report(kernels=kernels(800.0))
    assert _table.choose([known, report(kernels=kernels(700.0, exact=False))]) == []
    assert _table.choose([known, report(kernels=kernels(900.0, exact=False))]) == [known]


def test_the_least_cycles_win():
    reports = [
        report(kernels=kernels(900.0), config={"block_q": 1}),
        report(kernels=kernels(800.0), config={"block_q": 2}),
        report(kernels=kernels(800.0), config={"block_q": 3}),
        report(kernels=kernels(850.0, exact=False), config={"block_q": 4}),
        report(status="failed", config={"block_q": 5}),
        report(kernels=kernels(7.0), direction="backward"),
        report(kernels=kernels(6.0), target="tpu:v6e"),
    ]
    chosen = _table.choose(reports)
    assert [r.config["block_q"] for r in chosen] == [2, 128, 128]
    text = aot.format_table(reports)
    assert "at least 0.8k" in text


def test_a_written_table_is_found_by_a_call(tmp_path, monkeypatch):
    call = _calls.decode("flash_attention", {"arrays": {}, "options": {"causal": "True"}})
    programs = _programs.Programs(call, aot.parse("tpu:v5e"))
    (entry,) = _programs.chosen("flash_attention", ["pallas/tpu"])
    config = {"block_q": 256, "block_k": 384, "parts": 1, "stream": 2}
    made = [
        report(call=programs.document(d), direction=d, config=config, version=entry.version)
        for d in ("forward", "backward")
    ]
    made = [aot.Report.from_dict(r.as_dict() | {"kernels": []}) for r in made]
    folder = tmp_path / "data" / "tuned"
    (file,) = _table.write(folder, made)
    _table.write(folder, made)  # replaces, adds nothing
    assert file.parent.name == "tpu_v5_lite"
    assert len(json.loads(file.read_text())) == 2
    devices = json.loads((folder / "devices.json").read_text())
    assert devices == [{"kind": "tpu", "model": "TPU v5 lite", "capability": None}]
    monkeypatch.setattr(importlib.resources, "files", lambda name: tmp_path)
    table.rows.cache_clear()
    for direction in ("forward", "backward"):
        wanted = programs.wanted if direction == "backward" else frozenset()
        inv = Invocation(
            kernel=FlashAttention(),
            call=programs.args,
            target=_device.Target("tpu", "TPU v5 lite"),
            direction=direction,
            wanted=wanted,
        )
        found = table.exact(inv, inv.kernel.implementations(inv))
        assert found.config == entry.config.Config(**config)
    table.rows.cache_clear()


@needs_libtpu
def test_tuning_by_cycles(run, tmp_path):
    argv = ("--target", "tpu:v5e", *SMALL, "--out", str(tmp_path))
    code, out, err = run("tune", "flash_attention", "--static", *argv)
    assert code == 0, err
    assert "chosen" in out
    assert "pallas/tpu forward" in err
    rows = json.loads((tmp_path / "tpu_v5_lite" / "flash_attention.json").read_text())
    assert [row["call"]["direction"] for row in rows] == ["forward", "backward"]
    assert all(row["cycles"] > 0 for row in rows)
    assert jax.default_backend() == "cpu"
