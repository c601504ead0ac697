"""The tuner: right before fast, within a budget, never fatal, and what it leaves behind."""

import contextlib
import dataclasses
import io
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from ejkernel import _settings
from ejkernel._device import Target
from ejkernel.errors import EjkernelWarning
from ejkernel.modules import FlashAttention, attention
from ejkernel.ops import (
    AutotunePolicy,
    Autotuner,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    Tuner,
    autotune,
    policy_override,
)
from ejkernel.ops.config import table
from ejkernel.ops.config.cache import Stored
from ejkernel.ops.execution import benchmark, trial
from ejkernel.ops.execution.trial import name_of
from tests.ops.tuning.clock import Clock

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def arrays():
    # JAX arrays cannot be made while tests are collected: see conftest.py
    global X, INDEX
    X = jax.random.normal(jax.random.key(0), (4, 8))
    INDEX = jnp.arange(6, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Config:
    way: str


CLOCK = Clock(tick=1e-6)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(benchmark, "time", CLOCK)


def slow(x):
    """Right and quick to trace; each run takes 15 ms."""

    def run():
        CLOCK.takes(0.015)
        return np.float32(0.0)

    zero = jax.pure_callback(run, jax.ShapeDtypeStruct((), jnp.float32))
    return 2 * x + zero.astype(x.dtype)


def sleepy(x):
    """Right and quick to run; a trace takes 150 ms."""
    CLOCK.takes(0.15)
    return x + x


def fails(error):
    def way(x):
        raise error

    return way


WAYS = {
    "good": lambda x: 2 * x,
    "fine": lambda x: x + x,
    "third": lambda x: 3 * x - x,
    "slow": slow,
    "sleepy": sleepy,
    "raises": fails(ValueError("cannot be compiled")),
    "memory": fails(MemoryError("not enough")),
    "exhausted": fails(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")),
    "wrong": lambda x: 2.01 * x,
    "nan": lambda x: jnp.where(x > 0, jnp.nan, 2 * x),
    "other shape": lambda x: 2 * x[:, :1],
    "other outputs": lambda x: (2 * x, x),
}
BAD = ["raises", "memory", "exhausted", "wrong", "nan", "other shape", "other outputs"]


class Double(Kernel):
    """2x, computed in the way that the config names."""

    def __init__(self, *ways, name="double"):
        super().__init__(name=name)
        self.ways = ways

    def run(self, x, *, cfg):
        return WAYS[cfg.way](x)

    def heuristic_cfg(self, inv):
        return Config(self.ways[0])

    def config_space(self, inv):
        return [Config(way) for way in self.ways]


class OwnGradient(Double):
    """The gradient has ways too: "wrong" is wrong backward only."""

    def run(self, x, *, cfg):
        return WAYS["good" if cfg.way == "wrong" else cfg.way](x)

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (WAYS[cfg.way](cotangents[0]),)


class Notes(ConfigSelectorChain):
    """A chain that tunes, and keeps what it said."""

    def __init__(self, budget_s=20.0, **kwargs):
        super().__init__(policy=AutotunePolicy(mode="autotune", budget_s=budget_s), **kwargs)
        self.said = []

    def choose(self, inv):
        choice = super().choose(inv)
        self.said.append((inv, choice))
        return choice

    @property
    def last(self):
        return self.said[-1][1]

    def failed(self):
        """The reasons of the last call, by the way that failed."""
        reasons = self.failures[self.said[-1][0].key]
        return {json.loads(name.partition(" ")[2])["way"]: why for name, why in reasons.items()}


@pytest.fixture
def chain():
    return Notes()


# Candidates that must not win


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_candidate_never_wins_and_never_kills_the_call(chain, bad):
    # without the gate, the quick one would win
    assert_allclose(Executor(chain)(Double("slow", bad), X), 2 * X, rtol=1e-6)
    assert (chain.last.source, chain.last.cfg) == ("autotune", Config("slow"))
    assert list(chain.failed()) == [bad]
    assert chain.failed()[bad]


@pytest.mark.parametrize("bad", ["raises", "memory", "exhausted", "nan"])
def test_a_guess_that_fails_is_replaced(chain, bad):
    assert_allclose(Executor(chain)(Double(bad, "good"), X), 2 * X, rtol=1e-6)
    assert (chain.last.source, chain.last.cfg) == ("autotune", Config("good"))


def test_reasons_are_told(chain):
    Executor(chain)(Double("good", "raises", "exhausted", "nan"), X)
    reasons = chain.failed()
    assert "cannot be compiled" in reasons["raises"]
    assert "RESOURCE_EXHAUSTED" in reasons["exhausted"]
    assert "nan" in reasons["nan"]


def test_a_slow_candidate_does_not_win(chain):
    assert_allclose(Executor(chain)(Double("slow", "good"), X), 2 * X, rtol=1e-6)
    assert chain.last.cfg == Config("good")
    assert len(chain.last.times_ms) == 2
    assert min(chain.last.times_ms.values()) > 0


def test_a_wrong_gradient_loses_though_its_forward_is_right(chain):
    executor, kernel = Executor(chain), OwnGradient("slow", "wrong")
    grad = jax.grad(lambda x: executor(kernel, x).sum())(X)
    assert_allclose(grad, jnp.full_like(X, 2.0), rtol=1e-6)
    chosen = {inv.direction: choice.cfg for inv, choice in chain.said}
    assert chosen == {"forward": Config("wrong"), "backward": Config("slow")}
    assert "disagrees" in chain.failed()["wrong"]


def test_forward_and_backward_are_tuned_apart(chain):
    executor, kernel = Executor(chain), OwnGradient("good", "fine")
    jax.jit(jax.grad(lambda x: executor(kernel, x).sum()))(X)
    (forward, _), (backward, _) = chain.said
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert forward.key != backward.key
    assert {forward.key, backward.key} == {key for key, _ in chain.cache.items()}
    assert all(choice.source == "autotune" for _, choice in chain.said)


def test_when_all_fail_heuristics_run(chain):
    class Distrusted(Double):
        def check_candidate(self, inv, implementation, config):
            return "not today"

    assert_allclose(Executor(chain)(Distrusted("good", "fine"), X), 2 * X)
    assert (chain.last.source, chain.last.cfg) == ("heuristics", Config("good"))
    assert set(chain.failed()) == {"good", "fine"}
    assert all("not today" in reason for reason in chain.failed().values())
    assert any("all 2 candidates failed" in said for said in chain.last.trail)
    assert len(chain.cache) == 0


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 1e6), ("bfloat16", 1e-9), ("float16", 1)])
def test_wrong_numbers_of_any_size_lose_in_half_precision(chain, dtype, size):
    class Scaled(Double):
        def run(self, x, *, cfg):
            return (size * super().run(x.astype(jnp.float32), cfg=cfg)).astype(dtype)

    WAYS["far off"] = lambda x: 5 * x
    try:
        Executor(chain)(Scaled("slow", "far off"), X.astype(dtype))
    finally:
        del WAYS["far off"]
    assert (chain.last.source, chain.last.cfg) == ("autotune", Config("slow"))


def test_candidates_that_differ_by_rounding_are_all_accepted(chain):
    class Half(Double):
        def run(self, x, *, cfg):
            late = {"good": (x.astype(jnp.float32) * 2.1).astype(x.dtype)}
            return late.get(cfg.way, x * jnp.asarray(2.1, x.dtype))

    Executor(chain)(Half("good", "fine"), X.astype(jnp.bfloat16))
    assert chain.failed() == {}
    assert len(chain.last.times_ms) == 2


def test_fewer_than_two_candidates_are_not_tuned(chain):
    tuner = chain._get_tuner()
    for kernel in (Double("good"), Double("good", "good", name="twice the same")):
        assert_allclose(Executor(chain)(kernel, X), 2 * X)
        assert chain.last.source == "heuristics"
        assert any("fewer than two" in said for said in chain.last.trail)
    assert tuner.measured == 0
    assert len(chain.cache) == 0


def test_a_kernel_without_a_heuristic_is_tuned(chain):
    class NoGuess(Double):
        def heuristic_cfg(self, inv):
            raise NotImplementedError("no idea")

    assert_allclose(Executor(chain)(NoGuess("slow", "good"), X), 2 * X)
    assert (chain.last.source, chain.last.cfg) == ("autotune", Config("good"))


def test_at_most_four_candidates_on_a_cpu(chain):
    ways = ("good", "fine", "third", "sleepy", "slow", "wrong")
    Executor(chain)(Double(*ways), X)
    assert chain._get_tuner().measured == 4
    assert len(chain.last.times_ms) == 4


def test_a_tuner_may_be_told_how_many(chain):
    chain._tuner = Tuner(max_candidates=5, num_iters=2)
    Executor(chain)(Double("good", "fine", "third", "sleepy", "slow", "wrong"), X)
    assert chain._get_tuner().measured == 5


# Budget, order, log


def test_the_budget_is_kept_and_reported():
    class Sleeps(Double):
        def run(self, x, *, cfg):
            CLOCK.takes(0.1)
            return super().run(x, cfg=cfg)

    chain = Notes(budget_s=0.05)
    Executor(chain)(Sleeps("good", "fine", "third"), X)
    assert (chain.last.source, chain.last.cfg) == ("autotune", Config("good"))
    assert chain._get_tuner().measured == 1
    unmeasured = "not measured: the budget was used up"
    assert chain.failed() == {"fine": unmeasured, "third": unmeasured}


def test_candidates_that_fail_use_up_the_budget_too():
    tried = []

    class Slowly(Double):
        def check_candidate(self, inv, implementation, config):
            tried.append(config)
            CLOCK.takes(0.1)
            return "wrong, found out slowly"

    chain = Notes(budget_s=0.05)
    Executor(chain)(Slowly("good", "fine", "third", "slow"), X)
    assert (chain.last.source, chain.last.cfg) == ("heuristics", Config("good"))
    assert len(tried) < 4


def test_a_budget_of_zero_is_heuristics():
    chain = Notes(budget_s=0)
    Executor(chain)(Double("good", "fine"), X)
    assert chain.last.source == "heuristics"


class Told(Tuner):
    """Times are given instead of measured."""

    def __init__(self, **times):
        super().__init__()
        self.times = times

    def _time(self, trial, implementation, config, clock, best):
        return self.times[config.way]

    def _time_again(self, trial, implementation, config):
        return self.times[config.way]


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({"good": 1.009, "fine": 1.0, "third": 1.01}, "good"),
        ({"good": 1.03, "fine": 1.008, "third": 1.0}, "fine"),
        ({"good": 1.03, "fine": 1.015, "third": 1.0}, "third"),
        ({"good": 1.0, "fine": 1.0, "third": 1.0}, "good"),
    ],
)
def test_ties_go_to_the_first_in_the_fixed_order(times, winner):
    chain = Notes(tuner=Told(**times))
    Executor(chain)(Double("good", "fine", "third"), X)
    assert chain.last.cfg == Config(winner)


class Second(Told):
    """Other times in the rounds that follow."""

    def __init__(self, later, **times):
        super().__init__(**times)
        self.later, self.again = later, []

    def _time_again(self, trial, implementation, config):
        self.again.append(config.way)
        return self.later[config.way][self.again.count(config.way) - 1]


def test_the_closest_are_measured_again_in_turns():
    later = {"good": [1.3, 1.2, 1.2], "fine": [1.1, 9.0, 1.1]}  # one slow moment
    tuner = Second(later, good=1.0, fine=1.05, third=1.2)
    chain = Notes(tuner=tuner)
    Executor(chain)(Double("good", "fine", "third"), X)
    assert tuner.again == ["good", "fine", "fine", "good", "good", "fine"]
    assert chain.last.cfg == Config("fine")
    assert sorted(chain.last.times_ms.values()) == [1.1, 1.2, 1.2]


def test_a_short_budget_is_not_spent_on_measuring_again():
    tuner = Second({}, good=5000.0, fine=5050.0)
    chain = Notes(tuner=tuner, budget_s=2)
    Executor(chain)(Double("fine", "good"), X)
    assert tuner.again == []
    assert chain.last.cfg == Config("fine")


def test_a_candidate_that_fails_when_measured_again_is_out():
    tuner = Second({"good": [1.0] * 3}, good=1.05, fine=1.0)  # "fine" raises a KeyError
    chain = Notes(tuner=tuner)
    assert_allclose(Executor(chain)(Double("fine", "good"), X), 2 * X, rtol=1e-6)
    assert chain.last.cfg == Config("good")
    assert tuner.again == ["fine", "good", "good", "good"]
    assert "when measured again: KeyError" in chain.failed()["fine"]


def test_measuring_again_never_stops_a_call():
    chain = Notes(tuner=Second({}, good=1.0, fine=1.05))
    assert_allclose(Executor(chain)(Double("fine", "good"), X), 2 * X, rtol=1e-6)
    assert (chain.last.source, chain.last.cfg) == ("heuristics", Config("fine"))


def test_times_of_the_first_round_do_not_compete_with_later_ones():
    ways = ("good", "fine", "third", "sleepy", "slow")
    first = dict(zip(ways, (1.0, 1.01, 1.02, 1.03, 1.04), strict=True))
    later = {way: [first[way] * 1.2] * 3 for way in ways[:4]}  # the device has become warm
    tuner = Second(later, **first)
    tuner.max_candidates = 5
    chain = Notes(tuner=tuner)
    Executor(chain)(Double(*ways), X)
    assert "slow" not in tuner.again
    assert chain.last.cfg == Config("good")


def test_the_guess_comes_first_wherever_it_stands_in_the_space():
    class LastGuess(Double):
        def heuristic_cfg(self, inv):
            return Config(self.ways[-1])

    chain = Notes(tuner=Told(good=1.0, fine=1.0, third=1.0))
    Executor(chain)(LastGuess("good", "fine", "third"), X)
    assert chain.last.cfg == Config("third")


def test_the_nearest_shipped_row_is_measured_first(monkeypatch):
    near = Stored("run/any", 1, Config("third"))
    monkeypatch.setattr(table, "guess", lambda inv, able: near)
    chain = Notes()
    inv = Executor(chain).invocation(Double("good", "fine", "third"), X)
    made = chain._get_tuner().candidates(inv, inv.kernel.implementations(inv))
    assert [config.way for _, config in made] == ["third", "good", "fine"]


def test_one_line_is_logged_for_a_key(chain, caplog):
    executor, kernel = Executor(chain), Double("good", "fine")
    with caplog.at_level(logging.INFO, logger="ejkernel"):
        for _ in range(3):
            executor(kernel, X)
        jax.jit(lambda x: executor(kernel, x))(X)
    lines = [record.getMessage() for record in caplog.records if record.name == "ejkernel"]
    (line,) = [line for line in lines if line.startswith("tuning")]
    for part in (
        "double",
        "forward",
        "2 candidates",
        "20 s",
        "EJKERNEL_AUTOTUNE_POLICY=heuristics",
    ):
        assert part in line


@pytest.mark.parametrize("by", ["environment", "context"])
def test_every_candidate_is_logged_on_request(chain, caplog, monkeypatch, by):
    logged = _settings.read({"EJKERNEL_LOG_AUTOTUNE": "1"})
    with contextlib.ExitStack() as stack:
        stack.enter_context(caplog.at_level(logging.INFO, logger="ejkernel"))
        if by == "environment":
            monkeypatch.setattr(_settings, "_from_environment", lambda: logged)
        else:
            stack.enter_context(_settings.override(log_autotune=True))
        Executor(chain)(Double("good", "fine", "raises"), X)
    lines = [record.getMessage() for record in caplog.records if record.name == "ejkernel"]
    for way in ("good", "fine", "raises"):
        assert sum(f'"{way}"' in line for line in lines) == 1
    assert any("cannot be compiled" in line for line in lines)


class Closed:
    def isatty(self):
        raise ValueError("I/O operation on closed file")


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [type(None), object, Closed, Screen], ids=lambda x: x.__name__)
def test_tuning_needs_no_stderr(chain, monkeypatch, kind):
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    assert_allclose(Executor(chain)(Double("good", "fine"), X), 2 * X)
    assert chain.last.source == "autotune"
    if isinstance(stream, Screen):
        assert stream.getvalue().count("tuning double (forward) [") == 3
        assert stream.getvalue().endswith("\n")


# What is measured, where


def in_jit(call):
    return jax.jit(call)(X)


def in_scan(call):
    return jax.lax.scan(lambda x, _: (x, call(x)), X, length=2)[1][0]


def in_grad(call):
    return jax.grad(lambda x: call(x).sum())(X) * X


def in_vmap(call):
    return jax.vmap(call)(X[None])[0]


def in_shard_map(call):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), axis_types=auto, devices=jax.devices()[:2])
    spec = PartitionSpec("x")
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec))(X)


@pytest.mark.parametrize("place", [in_jit, in_scan, in_grad, in_vmap, in_shard_map])
@pytest.mark.parametrize("ways", [("slow", "sleepy"), ("sleepy", "slow")])
def test_run_time_counts_and_tracing_time_does_not(chain, place, ways):
    executor, kernel = Executor(chain), Double(*ways)
    assert_allclose(place(lambda x: executor(kernel, x)), 2 * X, rtol=1e-6)
    assert [choice.cfg for _, choice in chain.said] == [Config("sleepy")] * len(chain.said)
    assert chain.said[0][1].source == "autotune"


def test_run_time_of_a_backward_counts(chain):
    executor, kernel = Executor(chain), OwnGradient("slow", "sleepy")
    in_jit(lambda x: jax.grad(lambda x: executor(kernel, x).sum())(x))
    assert {i.direction: c.cfg for i, c in chain.said} == {
        "forward": Config("sleepy"),
        "backward": Config("sleepy"),
    }


class Spy(Kernel):
    """Keeps the inputs that it is measured on."""

    def __init__(self):
        super().__init__(name="spy")
        self.inputs = []

    def run(self, *xs, cfg):
        return sum(x.astype(jnp.float32).sum() for x in xs) + 0.0 * cfg.way.count("x")

    def heuristic_cfg(self, inv):
        return Config("a")

    def config_space(self, inv):
        return [Config("a"), Config("b")]

    def example_inputs(self, inv):
        made = super().example_inputs(inv)
        self.inputs.append(list(made.arrays().values()))
        return made


def test_made_up_inputs_are_never_zeros_and_independent(chain):
    kernel = Spy()
    zeros = (jnp.zeros((4, 5)), jnp.zeros((4, 5)), jnp.zeros((3,), jnp.bfloat16), jnp.zeros(()))
    jax.jit(lambda *xs: Executor(chain)(kernel, *xs))(*zeros)
    assert chain.last.source == "autotune"
    (made,) = kernel.inputs
    assert [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in zeros]
    assert all(np.asarray(x, np.float32).all() for x in made)
    assert not np.array_equal(made[0], made[1])


def test_an_eager_call_is_measured_on_its_own_arguments(chain):
    kernel = Spy()
    Executor(chain)(kernel, X, X + 1)
    (made,) = kernel.inputs
    assert_array_equal(made[0], X)
    assert_array_equal(made[1], X + 1)


def test_lengths_and_ids_made_up_for_attention_are_not_zeros(chain):
    q, k, v = (
        jax.random.normal(key, (1, 40, 2, 8)) for key in jax.random.split(jax.random.key(3), 3)
    )
    lengths = jnp.zeros(4, jnp.int32)
    chain.policy = AutotunePolicy(mode="heuristics")
    run = lambda *xs, n: Executor(chain)(FlashAttention(), *xs, cum_seqlens_q=n, cum_seqlens_k=n)
    jax.jit(run).lower(q, k, v, n=lengths)
    inv, _ = chain.said[0]
    made = inv.kernel.example_inputs(inv).arrays()
    assert {n: (x.shape, x.dtype) for n, x in made.items()} == {
        n: (x.shape, x.dtype) for n, x in inv.call.arrays().items()
    }
    assert all(np.asarray(x).any() for x in made.values())
    assert (np.diff(made["cum_seqlens_q"]) >= 0).all()


def test_integers_without_examples_are_not_tuned_while_tracing(chain):
    kernel = Spy()
    jax.jit(lambda x: Executor(chain)(kernel, x))(INDEX)
    assert chain.last.source == "heuristics"
    (said,) = [said for said in chain.last.trail if said.startswith("autotune")]
    assert "int32" in said
    assert "example_inputs" in said


def test_integers_are_tuned_on_the_arguments_of_an_eager_call(chain):
    kernel = Spy()
    Executor(chain)(kernel, INDEX)
    assert chain.last.source == "autotune"
    assert_array_equal(kernel.inputs[0][0], INDEX)


def test_each_shape_of_an_eager_call_is_tuned_on_its_arguments(chain):
    kernel, executor = Spy(), Executor(chain)
    for length in (6, 9):
        executor(kernel, jnp.arange(length, dtype=jnp.int32))
        assert chain.last.source == "autotune"
    assert_array_equal(kernel.inputs[-1][0], jnp.arange(9))


def test_an_eager_call_known_before_tuning_was_on_is_tuned_on_its_arguments():
    chain, kernel = ConfigSelectorChain(autotune=False), Spy()
    executor = Executor(chain)
    executor(kernel, INDEX)
    with policy_override(autotune=True):
        executor(kernel, INDEX)
    assert len(chain.cache) == 1
    assert_array_equal(kernel.inputs[0][0], INDEX)


def test_several_processes_do_not_measure_while_tracing(chain, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert_allclose(Executor(chain)(Double("slow", "good"), X), 2 * X, rtol=1e-6)
    assert chain.last.source == "heuristics"
    assert any("several processes" in said for said in chain.last.trail)
    assert chain._get_tuner().measured == 0


def test_another_device_is_not_measured(chain):
    target = Target("gpu", "NVIDIA H200", "9.0")
    inv = Invocation(kernel=Double("slow", "good"), args=(X,), target=target)
    choice = chain.choose(inv)
    assert (choice.source, choice.cfg) == ("heuristics", Config("slow"))
    assert any("NVIDIA H200" in said for said in choice.trail)
    assert chain._get_tuner().measured == 0


def test_a_policy_may_forbid_measuring_during_calls(chain):
    chain.policy = dataclasses.replace(chain.policy, allow_in_trace=False)
    kernel = Double("slow", "good")
    Executor(chain)(kernel, X)
    assert chain.last.source == "heuristics"
    assert Autotuner(chain).tune(kernel, X).cfg == Config("good")
    Executor(chain)(kernel, X)
    assert (chain.last.source, chain.last.cfg) == ("memory", Config("good"))


class Seen(Double):
    """Notes the JAX settings under which candidates are traced."""

    def __init__(self):
        super().__init__("good", "fine", name="seen")
        self.seen = []

    def run(self, x, *, cfg):
        self.seen.append((jax.config.jax_default_matmul_precision, jnp.arange(1.0).dtype, x.dtype))
        return super().run(x, cfg=cfg)


def test_candidates_are_measured_at_the_callers_precision(chain):
    kernel = Seen()
    with jax.default_matmul_precision("highest"):
        Executor(chain)(kernel, X)
    assert chain.last.source == "autotune"
    assert {precision for precision, _, _ in kernel.seen} == {"highest"}


@pytest.mark.parametrize("eager", [True, False])
def test_candidates_are_measured_in_the_callers_dtypes(chain, eager):
    kernel = Seen()
    run = lambda x: Executor(chain)(kernel, x)
    with jax.enable_x64(True):
        x = jnp.arange(1.0, 5.0, dtype=jnp.float64)
        assert_array_equal((run if eager else jax.jit(run))(x), 2 * x)
    assert chain.last.source == "autotune"
    assert {(weak, dtype) for _, weak, dtype in kernel.seen} == {(np.dtype("float64"),) * 2}


# What is kept


def test_what_was_tuned_is_remembered(chain):
    executor, kernel = Executor(chain), Double("slow", "good")
    executor(kernel, X)
    measured = chain._get_tuner().measured
    Executor(chain)(kernel, X)
    assert (chain.last.source, chain.last.cfg) == ("memory", Config("good"))
    jax.jit(lambda x: executor(kernel, x))(X)
    assert chain.last.source == "memory"
    assert chain._get_tuner().measured == measured == 2


def test_a_second_chain_reads_what_the_first_measured(tmp_path):
    kernel = Double("slow", "good", "raises")
    for source, measured in (("autotune", 2), ("persistent", 0)):
        chain = Notes(persistent=PersistentCache(tmp_path))
        assert_allclose(Executor(chain)(kernel, X), 2 * X, rtol=1e-6)
        assert (chain.last.source, chain.last.cfg) == (source, Config("good"))
        assert chain._get_tuner().measured == measured
    (record,) = PersistentCache(tmp_path).records()
    assert record.complete
    assert len(record.times_ms) == 2
    assert len(record.failures) == 1


def test_what_was_measured_against_another_version_is_measured_again(tmp_path):
    kernel, cache = Double("good", "fine"), PersistentCache(tmp_path)
    Executor(Notes(persistent=cache))(kernel, X)
    (record,) = cache.records()
    (rival,) = record.rivals
    cache.add(msgspec.structs.replace(record, rivals={rival: record.version, "new": 1}))
    chain = Notes(persistent=cache)
    Executor(chain)(kernel, X)
    assert chain.last.source == "persistent"  # a rival that is gone does not matter
    cache.add(msgspec.structs.replace(record, rivals={"another": 1}))
    chain = Notes(persistent=cache)
    Executor(chain)(kernel, X)
    assert (chain.last.source, chain._get_tuner().measured) == ("autotune", 2)
    (now,) = cache.records()
    assert now.rivals == record.rivals


def test_a_kernel_without_a_heuristic_reads_what_was_measured(tmp_path):
    class NoGuess(Double):
        def heuristic_cfg(self, inv):
            raise NotImplementedError("no idea")

    kernel = NoGuess("slow", "good")
    for source in ("autotune", "persistent"):
        chain = Notes(persistent=PersistentCache(tmp_path))
        assert_allclose(Executor(chain)(kernel, X), 2 * X)
        assert (chain.last.source, chain.last.cfg) == (source, Config("good"))


def test_a_config_that_has_no_json_stays_in_memory(tmp_path):
    class Plain:
        def __init__(self, way):
            self.way = way

        def __repr__(self):
            return f"Plain({self.way})"

    class PlainConfigs(Double):
        def heuristic_cfg(self, inv):
            return Plain(self.ways[0])

        def config_space(self, inv):
            return [Plain(way) for way in self.ways]

    chain = Notes(persistent=PersistentCache(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EjkernelWarning)
        assert_allclose(Executor(chain)(PlainConfigs("slow", "good"), X), 2 * X, rtol=1e-6)
    assert (chain.last.source, chain.last.cfg.way) == ("autotune", "good")


def cut_short(cache, kernel, *known):
    """A record as a process leaves it that died after some candidates."""
    inv = Executor(ConfigSelectorChain(autotune=False)).invocation(kernel, X)
    (implementation,) = kernel.implementations(inv)
    times = {name_of(implementation, Config(way)): ms for way, ms in known}
    best = min(known, key=lambda item: item[1])[0]
    stored = Stored(implementation.name, implementation.version, Config(best), times, {}, False)
    cache.put(inv.key, stored, op=kernel.name, device=inv.device_fingerprint)


def test_a_tuning_that_was_cut_short_goes_on(tmp_path):
    kernel = Double("good", "fine", "third")
    cut_short(PersistentCache(tmp_path), kernel, ("good", 77.0))
    chain = Notes(persistent=PersistentCache(tmp_path))
    Executor(chain)(kernel, X)
    assert chain.last.source == "autotune"
    assert chain.last.cfg != Config("good")
    assert chain._get_tuner().measured == 2
    (record,) = PersistentCache(tmp_path).records()
    assert record.complete
    assert sorted(record.times_ms.values())[-1] == 77.0


def test_the_best_of_a_tuning_that_was_cut_short_is_used_where_it_cannot_go_on(tmp_path):
    kernel = Double("good", "fine")
    cut_short(PersistentCache(tmp_path), kernel, ("fine", 0.1))
    chain = Notes(persistent=PersistentCache(tmp_path))
    with policy_override(autotune=False):
        Executor(chain)(kernel, X)
    assert (chain.last.source, chain.last.cfg) == ("persistent", Config("fine"))
    assert any("cut short" in said for said in chain.last.trail)
    Executor(chain)(kernel, X)  # measuring is allowed again
    assert chain.last.source == "autotune"


def test_wrong_numbers_lose_in_a_tuning_that_goes_on(tmp_path):
    kernel = Double("good", "wrong")
    cut_short(PersistentCache(tmp_path), kernel, ("good", 1e3))
    chain = Notes(persistent=PersistentCache(tmp_path))
    assert_allclose(Executor(chain)(kernel, X), 2 * X, rtol=1e-6)
    assert chain.last.cfg == Config("good")


PROGRAM = """
import dataclasses, json, os, signal, sys
import jax.numpy as jnp
from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, Executor, Kernel, PersistentCache

@dataclasses.dataclass(frozen=True)
class Config:
    block: int

class Dies(Kernel):
    def run(self, x, *, cfg):
        if cfg.block == 2 and sys.argv[2] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return x * 2

    def heuristic_cfg(self, inv):
        return Config(1)

    def config_space(self, inv):
        return [Config(1), Config(2), Config(3)]

policy = AutotunePolicy(mode="autotune")
chain = ConfigSelectorChain(persistent=PersistentCache(sys.argv[1]), policy=policy)
x = jnp.arange(4.0)
choice = Executor(chain).choose(Dies(), x)
print(json.dumps([choice.source, chain._get_tuner().measured, choice.times_ms]))
"""


def python(program, *arguments, **environment):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_a_killed_process_leaves_what_it_measured(tmp_path):
    assert python(PROGRAM, tmp_path, "die").returncode == -signal.SIGKILL
    (record,) = PersistentCache(tmp_path).records()
    assert not record.complete
    (first,) = record.times_ms
    done = python(PROGRAM, tmp_path, "live")
    assert done.returncode == 0, done.stderr
    source, measured, times = json.loads(done.stdout)
    assert (source, measured) == ("autotune", 2)
    assert len(times) == 3
    assert first in times
    (record,) = PersistentCache(tmp_path).records()
    assert record.complete


@pytest.mark.slow
def test_a_candidate_that_ends_the_process_twice_is_not_tried_again(tmp_path):
    codes = [python(PROGRAM, tmp_path, "die").returncode for _ in range(3)]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    (record,) = PersistentCache(tmp_path).records()
    assert record.complete
    assert len(record.times_ms) == 2
    (why,) = record.failures.values()
    assert why == "the process ended while this was measured, twice"


# The function that tunes one call


def test_autotune_gives_the_fastest_right_config():
    assert autotune(Double("slow", "wrong", "good"), X, num_warmup=1, num_iters=2) == Config("good")
    configs = [Config("slow"), Config("fine")]
    assert autotune(Double("good"), X, configs=configs, num_warmup=1) == Config("fine")


def test_autotune_tells_when_nothing_works():
    with pytest.raises(RuntimeError, match=r"double.*cannot be compiled"):
        autotune(Double("raises", "memory"), X)
    with pytest.raises(ValueError, match="empty"):
        autotune(Double("good"), X, configs=[])


# An op of the library


FLASH = """
import json, sys
import jax
from ejkernel.modules import FlashAttention
from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, Executor, PersistentCache

keys = jax.random.split(jax.random.key(2), 3)
q, k, v = (jax.random.normal(key, (1, 300, 1, 16)) for key in keys)
policy = AutotunePolicy(mode="autotune")
chain = ConfigSelectorChain(persistent=PersistentCache(), policy=policy)
executor = Executor(chain)
source = executor.choose(FlashAttention(), q, k, v, causal=True).source
out = executor(FlashAttention(), q, k, v, causal=True)
print(json.dumps([source, chain._get_tuner().measured, float(out.sum())]))
"""


def test_flash_attention_is_tuned_and_known_to_the_next_process(tmp_path):
    keys = jax.random.split(jax.random.key(2), 3)
    q, k, v = (jax.random.normal(key, (1, 300, 1, 16)) for key in keys)
    chain = Notes(persistent=PersistentCache(tmp_path))
    out = Executor(chain)(FlashAttention(), q, k, v, causal=True)
    expected, _ = attention(q, k, v, causal=True)
    assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert chain.last.source == "autotune"
    assert chain.failures[chain.said[-1][0].key] == {}
    assert 2 <= chain._get_tuner().measured == len(chain.last.times_ms) <= 4
    Executor(chain)(FlashAttention(), q, k, v, causal=True)
    assert chain.last.source == "memory"
    done = python(FLASH, EJKERNEL_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    source, measured, total = json.loads(done.stdout)
    assert (source, measured) == ("persistent", 0)
    assert_allclose(total, float(out.sum()), rtol=1e-4, atol=1e-3)


def test_a_config_that_would_fill_the_memory_is_skipped_before_it_is_compiled(monkeypatch):
    monkeypatch.setattr(trial, "free_memory", lambda: 1 << 20)
    q, k, v = (
        jax.random.normal(key, (1, 300, 1, 16)) for key in jax.random.split(jax.random.key(1), 3)
    )
    chain = ConfigSelectorChain(policy=AutotunePolicy(mode="autotune"))
    choice = Executor(chain).choose(FlashAttention(), q, k, v)
    (reasons,) = chain.failures.values()
    skipped = [name for name, why in reasons.items() if "skipped: its temporaries" in why]
    assert skipped
    assert choice.source == "autotune"
    assert not any(name in choice.times_ms for name in skipped)
