"""The budget of a tuning run: what counts, when it is looked at, and what it leaves behind."""

import dataclasses

import jax
import pytest

from ejkernel.kernels import _oracle
from ejkernel.modules import FlashAttention
from ejkernel.ops import (
    AutotunePolicy,
    ConfigSelectorChain,
    Executor,
    Kernel,
    PersistentCache,
    Tuner,
)
from ejkernel.ops.config.cache import CUT_SHORT, Stored
from ejkernel.ops.execution import benchmark
from ejkernel.ops.execution.trial import name_of
from tests.ops.tuning.clock import Clock


@pytest.fixture(scope="module", autouse=True)
def arrays():
    # JAX arrays cannot be made while tests are collected: see conftest.py
    global X
    X = jax.random.normal(jax.random.key(0), (4, 8))


WAYS = ("first", "second", "third")


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(benchmark, "time", made)
    return made


@dataclasses.dataclass(frozen=True)
class Config:
    way: str


class Slow(Kernel):
    """2x, whose steps take the seconds that are given."""

    def __init__(self, clock, *, compiling=0.0, checking=0.0, fails=()):
        super().__init__(name="slow")
        self.clock, self.compiling, self.checking, self.fails = clock, compiling, checking, fails
        self.compiled = []

    def run(self, x, *, cfg):
        self.compiled.append(cfg.way)
        self.clock.takes(self.compiling)
        if cfg.way in self.fails:
            raise ValueError("cannot be compiled")
        return 2 * x

    def heuristic_cfg(self, inv):
        return Config("first")

    def config_space(self, inv):
        return [Config(way) for way in WAYS]

    def check_candidate(self, inv, implementation, config):
        self.clock.takes(self.checking)


def chain_of(cache=None, budget_s=8.0, **kwargs):
    policy = AutotunePolicy(mode="autotune", budget_s=budget_s)
    return ConfigSelectorChain(persistent=cache, policy=policy, **kwargs)


def invocation(kernel):
    return Executor(ConfigSelectorChain(autotune=False)).invocation(kernel, X)


def by_way(values):
    return {name.split('"')[3]: value for name, value in values.items()}


def test_a_run_cut_short_is_unfinished_and_goes_on_in_the_next_process(clock, tmp_path):
    kernel = Slow(clock, compiling=5.0)
    inv = invocation(kernel)
    chain = chain_of(PersistentCache(tmp_path))
    choice = chain.choose(inv)
    assert choice.source == "autotune"
    assert kernel.compiled == ["first", "second"]  # the second ended beyond the budget
    (record,) = PersistentCache(tmp_path).records()
    assert not record.complete
    assert list(by_way(record.times_ms)) == ["first", "second"]
    assert by_way(record.failures) == {"third": CUT_SHORT}
    assert chain.choose(inv).source == "memory"  # once a process

    kernel.compiled.clear()
    choice = chain_of(PersistentCache(tmp_path)).choose(inv)
    assert choice.source == "autotune"
    assert kernel.compiled == ["first", "third"]  # the first gives the numbers to compare with
    (record,) = PersistentCache(tmp_path).records()
    assert record.complete
    assert set(by_way(record.times_ms)) == set(WAYS)
    assert record.failures == {}
    assert chain_of(PersistentCache(tmp_path)).choose(inv).source == "persistent"


def test_a_run_that_goes_on_asks_the_oracle_only_about_new_candidates(clock, tmp_path):
    kernel = Slow(clock, checking=5.0)
    inv = invocation(kernel)
    for known in (1, 2, 3):  # the second check ends beyond the budget
        chain_of(PersistentCache(tmp_path)).choose(inv)
        (record,) = PersistentCache(tmp_path).records()
        assert (len(record.times_ms), record.complete) == (known, known == 3)


def test_a_candidate_that_failed_is_not_tried_again(clock, tmp_path):
    kernel = Slow(clock, compiling=5.0, fails=("second",))
    inv = invocation(kernel)
    for compiled in (["first", "second"], ["first", "third"]):
        kernel.compiled.clear()
        chain_of(PersistentCache(tmp_path)).choose(inv)
        assert kernel.compiled == compiled
    (record,) = PersistentCache(tmp_path).records()
    assert record.complete
    assert "cannot be compiled" in by_way(record.failures)["second"]


def test_checks_count_and_nothing_is_compiled_beyond_the_budget(clock, tmp_path):
    kernel = Slow(clock, checking=9.0)
    inv, chain = invocation(kernel), chain_of(PersistentCache(tmp_path))
    for _ in range(2):  # another trace in this process does not wait again
        choice = chain.choose(inv)
        assert (choice.source, choice.cfg) == ("heuristics", Config("first"))
        reason = "autotune: nothing was measured within the budget of 8 s"
        assert [said for said in choice.trail if said.startswith("autotune")] == [reason]
    assert kernel.compiled == []
    assert clock.now == 9.0
    assert list(PersistentCache(tmp_path).records()) == []


def test_making_inputs_counts(clock):
    class Inputs(Slow):
        def example_inputs(self, inv):
            self.clock.takes(9.0)
            return super().example_inputs(inv)

    kernel = Inputs(clock)
    assert chain_of().choose(invocation(kernel)).source == "heuristics"
    assert kernel.compiled == []


def test_a_slow_oracle_ends_with_the_step_under_way(clock, monkeypatch):
    steps = []

    def reference(spec, args, cotangents, wanted, options):
        steps.append(spec.name)
        clock.takes(9.0)
        return None, None

    monkeypatch.setattr(_oracle, "_reference", reference)
    q, k, v = (
        jax.random.normal(key, (1, 300, 1, 24)) for key in jax.random.split(jax.random.key(0), 3)
    )
    chain = chain_of()
    choice = Executor(chain).choose(FlashAttention(), q, k, v)
    assert steps == ["flash_attention"]  # the naive code; the oracle proper was not begun
    assert choice.source == "heuristics"
    assert set(next(iter(chain.failures.values())).values()) == {CUT_SHORT}


def test_the_budget_is_looked_at_between_repetitions(clock):
    calls = []

    def fn():
        calls.append(clock.takes(4.0))
        return X

    with benchmark.Stopwatch(10.0).counting():
        timing = benchmark.measure(fn, num_iters=10)
        assert (len(calls), timing.calls, timing.median) == (3, 2, 4000.0)
        timing = benchmark.measure(fn, num_iters=10, num_warmup=5)
        assert (len(calls), timing.calls) == (4, 1)  # one time is all that it needs


class Told(Tuner):
    """Times are given; to measure again takes seconds."""

    def __init__(self, clock, **times):
        super().__init__()
        self.clock, self.times, self.again = clock, times, []

    def _time(self, trial, implementation, config, clock, best):
        return self.times[config.way]

    def _time_again(self, trial, implementation, config):
        self.again.append(config.way)
        self.clock.takes(3.0)
        return {"first": 1.3, "second": 1.2}[config.way]


@pytest.mark.parametrize(("budget_s", "rounds", "winner"), [(7.0, 1, "second"), (2.0, 0, "first")])
def test_only_whole_rounds_of_measuring_again_count(clock, budget_s, rounds, winner):
    tuner = Told(clock, first=1.0, second=1.05, third=2.0)
    choice = chain_of(tuner=tuner, budget_s=budget_s).choose(invocation(Slow(clock)))
    assert choice.cfg == Config(winner)
    assert len(tuner.again) // 2 == rounds
    assert clock.now < budget_s + 3.0


def test_an_earlier_whole_result_stays_where_nothing_can_be_measured(clock, tmp_path):
    kernel = Slow(clock)
    inv, chain = invocation(kernel), chain_of(PersistentCache(tmp_path))
    before = chain.choose(inv)
    kernel.checking = 9.0
    again = chain.tune(inv)
    assert (again.source, again.cfg) == ("persistent", before.cfg)
    (record,) = PersistentCache(tmp_path).records()
    assert record.complete


def test_a_candidate_that_ended_a_process_is_tried_once_more(clock, tmp_path):
    kernel, cache = Slow(clock, compiling=5.0), PersistentCache(tmp_path)
    inv = invocation(kernel)
    (run,) = kernel.implementations(inv)
    first, second, third = (name_of(run, Config(way)) for way in WAYS)
    ended = "the process ended while this was measured"
    times, failures = {first: 1.0, second: 1.0}, {third: ended}
    where = {"op": kernel.name, "device": inv.device_fingerprint}
    cache.put(inv.key, Stored(run.name, 1, Config("first"), times, failures, False), **where)
    chain_of(cache, budget_s=4.0).choose(inv)  # not even begun
    assert cache.read(inv.key, **where).failures == failures
    chain_of(cache).choose(inv)
    record = cache.read(inv.key, **where)
    assert record.complete
    assert third in record.times_ms


def test_the_default_budgets_are_told(caplog, clock):
    class Both(Slow):
        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return (2 * cotangents[0],)

    executor = Executor(ConfigSelectorChain(policy=AutotunePolicy(mode="autotune")))
    with caplog.at_level("WARNING", logger="ejkernel"):
        jax.jit(jax.grad(lambda x: executor(Both(clock), x).sum())).lower(X)
    lines = [record.getMessage() for record in caplog.records]
    assert ["at most 8 s" in line for line in lines] == [True, False]
    assert ["at most 12 s" in line for line in lines] == [False, True]
