"""Programs that are compiled in threads, before the first row is measured."""

import contextlib
import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from ejkernel import _contexts, cli
from ejkernel.bench import Peer, Workload, _ahead, _apart, _check, _programs, _runner
from ejkernel.kernels import kernel_registry
from tests.bench.test_bench import ABSENT, BROKEN, POOL, QUICK, RIGHT, WRONG, workload

THREADS = dataclasses.replace(QUICK, threads=2)
COMPILED = "/jax/core/compile/backend_compile_duration"


def numbered(values):
    return None if float(values["inputs"].sum()) != 0 else "it wants numbers"


class Watched(_runner.Progress):
    """Keeps what a run tells, and counts compilations before the rows and in those of an op."""

    def __init__(self):
        self.begun, self.counts, self.steps = [], None, []
        self.ahead_of_rows, self.compiled = 0, {}

    def begin(self, op, workload, mode, program):
        self.begun.append((op, workload, mode, program))

    def step(self, text):
        self.steps.append(text)

    def ahead(self, compiled, failed):
        self.counts = (compiled, failed)

    @contextlib.contextmanager
    def counting(self):
        def count(event, duration_secs, **more):
            if event == COMPILED:
                op = self.begun[-1][0]  # "" of ceilings
                self.compiled[op] = self.compiled.get(op, 0) + (self.counts is not None)
                self.ahead_of_rows += self.counts is None

        jax.monitoring.register_event_duration_secs_listener(count)
        try:
            yield self
        finally:
            jax.monitoring.unregister_event_duration_listener(count)


def is_timed(row, name):
    return (row.program(name).median or 0.0) > 0


def programs(document):
    return [
        (row.workload, row.mode, row.auto, p.name, p.config, p.failed, p.median is None)
        for row in document.rows
        for p in row.programs
    ]


def writing(name="plain"):
    spec = kernel_registry.spec("update_paged_cache")
    case = next(c for c in spec.cases() if c.name == name)
    return Workload("update_paged_cache", name, case.values, modes=("fwd",))


def test_nothing_is_compiled_while_rows_are_measured():
    def made():
        first = workload(RIGHT, WRONG, ABSENT, modes=("fwd", "fwd+bwd"))
        return [first, workload(RIGHT, repeats=2), writing()]

    usual = _runner.run(made(), QUICK)  # draws inputs and ceilings, whose compilations JAX keeps
    watched = Watched()
    with watched.counting():
        document = _runner.run(made(), THREADS, watched)
    assert programs(document) == programs(usual)
    # a program of a row with `repeats`, or that writes in place, is compared in a simple form
    assert watched.counts == (3 * 2 + 2 * 2 + 2, 0)
    assert watched.ahead_of_rows >= watched.counts[0]
    assert sum(count for op, count in watched.compiled.items() if op) == 0
    assert watched.begun[0] == _apart.AHEAD
    assert any(text.startswith("compiling: ") for text in watched.steps)
    row = document.rows[0]
    assert is_timed(row, "right")
    assert row.program("wrong").failed.startswith("disagrees with ours")


def test_what_fails_in_a_thread_fails_in_its_row_with_the_reason():
    late = Peer("late", POOL, RIGHT.run, why_not=numbered)
    watched = Watched()
    (row,) = _runner.run([workload(BROKEN, RIGHT, late)], THREADS, watched).rows
    assert watched.counts == (2, 1)  # `late` is asked when there are numbers
    assert row.program("broken").failed == "RuntimeError: no such kernel for this device"
    assert is_timed(row, "right")
    assert is_timed(row, "late")


def test_a_program_in_place_keeps_the_arrays_of_its_call():
    made = writing()
    bare, call = _programs.Call.of_shapes(made), _programs.Call.of(made)
    assert list(bare.traced) == list(call.traced)
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves((bare.traced, bare.args)))
    public = _programs.of_auto(call, "fwd").fn
    bare.with_cotangent(public)
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(bare.cotangent))
    run = _programs.program(call, public, "fwd", _programs.IN_PLACE)
    run.compiled = _programs.program(bare, public, "fwd", _programs.IN_PLACE).compile()
    before = {name: jnp.array(call.traced[name]) for name in run.follows}
    first = run()
    second = run()
    for name, out in run.follows.items():
        assert first[out].is_deleted()  # donated to the second call
        assert not second[out].is_deleted()
        assert (call.traced[name] == before[name]).all()


def test_threads_compute_in_the_contexts_of_the_caller():
    seen = []

    def precise(values):
        precision, policy = jax.config.jax_default_matmul_precision, _contexts.policy.value
        seen.append((threading.current_thread().name, precision, policy))
        return RIGHT.run(values)

    with jax.default_matmul_precision("float32"):
        _runner.run([workload(Peer("precise", POOL, precise))], THREADS)
    assert any(name.startswith("ejkernel-ahead") for name, *_ in seen)
    assert {tuple(how) for _, *how in seen} == {("float32", (("mode", "heuristics"),))}


def test_rows_that_are_kept_or_have_no_time_are_not_compiled():
    first = _runner.run([workload(RIGHT)], QUICK)
    watched = Watched()
    kept = dataclasses.replace(THREADS, resume=first)
    assert len(_runner.run([workload(RIGHT)], kept, watched).rows) == 1
    assert watched.counts == (0, 0)
    watched = Watched()
    late = dataclasses.replace(THREADS, budget_s=0.0)
    assert _runner.run([workload(RIGHT)], late, watched).rows == []
    assert watched.counts is None
    dead = {_apart.AHEAD: "signal 11", ("mean_pooling", "T150", "fwd", "right"): "signal 11"}
    (row,) = _runner.run([workload(RIGHT)], dataclasses.replace(THREADS, given_up=dead)).rows
    assert row.program("right").failed == "signal 11"
    assert is_timed(row, "xla/any")


def test_a_part_of_the_budget_is_left_for_rows(monkeypatch):
    def slow(values):
        if threading.current_thread().name.startswith("ejkernel-ahead"):
            time.sleep(0.3)
        return RIGHT.run(values)

    monkeypatch.setattr(_ahead, "_SAY_S", 0.01)
    monkeypatch.setattr(_ahead, "_SHARE", 0.004)  # 0.4 s
    peers = [Peer(f"slow {i}", POOL, slow) for i in range(6)]
    options = dataclasses.replace(QUICK, threads=1, budget_s=100.0)
    watched = Watched()
    (row,) = _runner.run([workload(*peers)], options, watched).rows
    assert watched.counts in [(compiled, 0) for compiled in range(5)]
    assert all(is_timed(row, peer.name) for peer in peers)
    assert sum(text.startswith("compiling: ") for text in watched.steps) > 10


def test_a_process_that_ends_while_it_compiles_is_followed_by_one_without_threads(tmp_path):
    supervisor = _apart._Supervisor([], 1.0, 1.0, None, tmp_path)
    lines = [{"begin": list(_apart.AHEAD)}, {"step": "compiling: 1 of 2 are ready"}]
    assert supervisor._learn(lines, "signal 11")
    assert supervisor.dead == {_apart.AHEAD: "signal 11"}
    assert not supervisor._learn(lines, "signal 11")


def test_the_oracle_is_asked_once_by_threads(monkeypatch):
    solved = []
    solve = _check._oracle.solve
    monkeypatch.setattr(_check, "_said", {})
    monkeypatch.setattr(_check, "_begun", set())
    monkeypatch.setattr(
        _check._oracle,
        "solve",
        lambda *some: (solved.append(threading.get_ident()), solve(*some))[1],
    )
    made = [workload(modes=("fwd",)), workload(modes=("fwd",))]
    document = _runner.run(made, THREADS)
    assert [row.program("xla/any").failed for row in document.rows] == ["", ""]
    assert len(solved) == 1
    assert solved[0] != threading.get_ident()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--threads", "2", "--tune", "5"), "--threads compiles before --tune chooses"),
        (("--threads", "-1"), "--threads must be at least 0"),
    ],
)
def test_threads_are_refused(argv, words, capsys):
    assert cli.main(["bench", "mean_pooling", *argv]) == 2
    assert words in capsys.readouterr().err
    with pytest.raises(ValueError, match="compiles before tuning chooses"):
        _runner.Options(threads=2, tune_s=1.0)
