"""Runs that are cut short, resumed, or end with the process of a program."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from ejkernel import cli
from ejkernel.bench import Peer, Workload, _apart, _results, _runner
from ejkernel.bench._row import DeviceLostError
from ejkernel.kernels._specs import _work_matmul

POOL = ("mean_pooling",)
QUICK = _runner.Options(rounds=1, seconds=0.0, modes=("fwd",))
ROOT = pathlib.Path(__file__).parents[2]


def pooled(dtype, key):
    return _work_matmul._pooled(dtype, key, 1, 128, 2, 16, 64)


def means(values):
    return values["inputs"].reshape(1, -1, 64, 2, 16).mean(axis=2)


GOOD = Peer("good", POOL, means)


def workload(name, *peers):
    return Workload("mean_pooling", name, pooled, peers=peers, known_peers=False)


# One process


def test_rows_that_are_there_are_not_measured_again(tmp_path):
    first = _runner.run([workload("a", GOOD)], QUICK)
    first.rows[0].programs[0].median = 123.0
    saved = []
    second = _runner.run(
        [workload("a", GOOD), workload("b", GOOD)],
        dataclasses.replace(QUICK, resume=first),
        save=lambda document: saved.append(_results.encode(document)),
    )
    assert [row.workload for row in second.rows] == ["a", "b"]
    assert second.rows[0].programs[0].median == 123.0
    assert [len(json.loads(text)["rows"]) for text in saved] == [1, 2]


def test_results_of_another_source_are_not_resumed():
    old = _results.new([])
    old.source = "another"
    with pytest.raises(ValueError, match="of another source: another, not"):
        _results.continued(old)
    old = _results.new([])
    old.versions["jax"] = "0.0.1"
    with pytest.raises(ValueError, match=r"of other versions: jax 0\.0\.1, not"):
        _results.continued(old)


def test_no_row_begins_without_time(tmp_path, capsys):
    file = tmp_path / "w.py"
    file.write_text(
        "from tests.bench.test_apart import workload\nWORKLOADS = [workload('a'), workload('b')]\n"
    )
    out = tmp_path / "out.json"
    command = ["bench", "--workloads", str(file), "--rounds", "1", "--mode", "fwd"]
    command += ["--out", str(out), "--resume"]
    assert cli.main([*command, "--budget", "0"]) == 1
    assert (
        "2 rows are left; the same command with --resume measures them" in capsys.readouterr().err
    )
    assert _results.read(out).rows == []
    assert cli.main(command) == 0
    assert [row.workload for row in _results.read(out).rows] == ["a", "b"]


def test_resume_needs_a_file(capsys):
    assert cli.main(["bench", "mean_pooling", "--resume"]) == 2
    assert "--resume needs --out" in capsys.readouterr().err


def test_a_program_that_fails_while_it_is_timed_has_the_reason(monkeypatch):
    measured = _runner._Run._time

    def time_it(self, name, run, first):
        if name == "good":
            raise RuntimeError("out of memory")
        return measured(self, name, run, first)

    monkeypatch.setattr(_runner._Run, "_time", time_it)
    (row,) = _runner.run([workload("a", GOOD)], QUICK).rows
    assert row.program("good").failed == "RuntimeError: out of memory"
    assert row.program("good").median is None
    assert row.program("xla/any").median > 0


def test_what_ended_a_process_is_not_tried_again():
    other = Peer("other", POOL, means)
    dead = {
        ("mean_pooling", "a", "fwd", "good"): "signal 11",
        ("mean_pooling", "b", "fwd", ""): "x",
    }
    dead["mean_pooling", "", "", "other"] = "given up"
    options = dataclasses.replace(QUICK, given_up=dead)
    document = _runner.run([workload("a", GOOD, other), workload("b", GOOD)], options)
    first, second = document.rows
    assert {p.name: p.failed for p in first.programs} == {
        "xla/any": "",
        "good": "signal 11",
        "other": "given up",
    }
    assert second.programs == []
    assert document.notes == ["mean_pooling, b, fwd: x"]


def test_a_device_that_does_not_answer_ends_the_process(monkeypatch):
    lost = []

    class Progress(_runner.Progress):
        def lost(self, reason):
            lost.append(reason)

    def broken(values):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr("ejkernel.bench._row._answers", lambda: False)
    monkeypatch.setattr(_runner._Run, "_ceilings", lambda self, dtype: None)
    run = _runner._Run(QUICK, Progress(), _results.new([]), lambda document: None, kind="other")
    with pytest.raises(DeviceLostError):
        run.all([workload("a", Peer("broken", POOL, broken))])
    assert lost == ["RuntimeError: an illegal memory access"]


# Several processes

WORKER = """
import json, os, pathlib, sys, time
_, argv = json.loads(sys.argv[1])
given = dict(zip(argv[::2], argv[1::2]))
folder = pathlib.Path(given["--state"])
dead = [tuple(key) for key, _ in json.loads((folder / "given_up.json").read_text())]
journal = (folder / "journal").open("a")
def say(**facts):
    journal.write(json.dumps(facts) + chr(10)); journal.flush()
for row in ("a", "b"):
    for program in ("good", "dies", "hangs"):
        say(begin=["op", row, "fwd", program])
        if ("op", row, "fwd", program) in dead or ("op", "", "", program) in dead:
            continue
        if program == "dies":
            os._exit(7)
        if program == "hangs":
            time.sleep(60)
say(ended=True)
sys.exit(5)
"""


def test_another_process_goes_on_without_what_ended_the_first(monkeypatch, capsys):
    monkeypatch.setattr(_apart, "_START", WORKER)
    assert _apart.run([], 2.0, float("inf"), None) == 5
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "ejkernel: op, a, fwd: dies: its process ended with code 7; going on without",
        "ejkernel: op, a, fwd: hangs: took more than 2 s; going on without",
        "ejkernel: op, b, fwd: dies: its process ended with code 7; going on without",
        "ejkernel: op, b, fwd: hangs: took more than 2 s; going on without",
    ]


def test_a_process_that_never_begins_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(_apart, "_START", "import sys; sys.exit(4)")
    assert _apart.run([], 5.0, float("inf"), None) == 4
    assert "ended before it began: its process ended with code 4" in capsys.readouterr().err


FILE = """
import os, signal
from ejkernel.bench import Peer
from tests.bench.test_apart import GOOD, POOL, workload
DIES = Peer("dies", POOL, lambda values: os.kill(os.getpid(), signal.SIGSEGV))
WORKLOADS = [workload(name, GOOD, DIES) for name in ("a", "b")]
"""


@pytest.mark.slow
def test_a_peer_that_ends_the_process_is_a_reason_in_its_row(tmp_path):
    file, out = tmp_path / "w.py", tmp_path / "out.json"
    file.write_text(FILE)
    command = ["bench", "--workloads", str(file), "--rounds", "1", "--mode", "fwd"]
    assert cli.main([*command, "--timeout", "60", "--out", str(out)]) == 0
    rows = _results.read(out).rows
    assert [row.program("dies").failed for row in rows] == ["its process ended with signal 11"] * 2
    assert all(row.program("good").median > 0 for row in rows)


@pytest.mark.slow
def test_a_killed_run_leaves_a_file_that_the_next_one_completes(tmp_path):
    file, out = tmp_path / "w.py", tmp_path / "out.json"
    names = "abcdefgh"
    file.write_text(
        "from tests.bench.test_apart import GOOD, workload\n"
        f"WORKLOADS = [workload(name, GOOD) for name in {names!r}]\n"
    )
    command = ["bench", "--workloads", str(file), "--rounds", "3", "--mode", "fwd"]
    command += ["--out", str(out), "--resume"]
    start = [sys.executable, "-m", "ejkernel", *command, "--timeout", "60"]
    process = subprocess.Popen(start, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 120
    while not out.exists() or not _results.read(out).rows:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(_results.read(out).rows)
    assert 0 < done
    assert cli.main(command) == 0
    assert [row.workload for row in _results.read(out).rows] == list(names)
