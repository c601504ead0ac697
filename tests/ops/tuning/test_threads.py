"""Candidates that threads compile before the first is timed."""

import dataclasses
import gc
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ejkernel.kernels import Backend, Platform, _op_kernel, kernel_registry
from ejkernel.modules import FlashAttention
from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, Executor, Kernel, Tuner
from ejkernel.ops.config.cache import CUT_SHORT
from ejkernel.ops.config.selection import sort_out
from ejkernel.ops.execution import benchmark
from tests.ops.tuning.clock import Clock


@pytest.fixture(scope="module", autouse=True)
def arrays():
    # JAX arrays cannot be made while tests are collected: see conftest.py
    global X
    X = jax.random.normal(jax.random.key(0), (4, 8))


@dataclasses.dataclass(frozen=True)
class Config:
    way: str


class Noted(Kernel):
    """2x, forward and backward; every trace is noted."""

    def __init__(self, *ways, before=lambda way: None):
        super().__init__(name="noted")
        self.ways, self.before = ways, before
        self.events, self.contexts = [], set()

    def run(self, x, *, cfg):
        self.trace(cfg.way)
        return 2 * x

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        self.trace(cfg.way)
        return (2 * cotangents[0],)

    def trace(self, way):
        precision = jax.config.jax_default_matmul_precision
        here = threading.current_thread().name.partition("_")[0]
        self.events.append(("traced", way))
        self.contexts.add((here, precision, jax.config.jax_default_device))
        self.before(way)
        if way == "raises":
            raise ValueError("cannot be compiled")

    def heuristic_cfg(self, inv):
        return Config(self.ways[0])

    def config_space(self, inv):
        return [Config(way) for way in self.ways]


class Timed(Tuner):
    """Notes what is timed; the last candidate is the fastest."""

    def _time(self, trial, implementation, config, clock, best):
        super()._time(trial, implementation, config, clock, best)
        kernel = trial.inv.kernel
        kernel.events.append(("timed", config.way))
        return 10.0 - kernel.ways.index(config.way)

    def _time_again(self, trial, implementation, config):
        return 1.0


def chain_of(tuner=None, budget_s=20.0):
    policy = AutotunePolicy(mode="autotune", budget_s=budget_s)
    return ConfigSelectorChain(policy=policy, tuner=tuner or Timed(threads=2))


def tune(kernel, tuner=None, budget_s=20.0, **kwargs):
    inv = Executor(ConfigSelectorChain(autotune=False)).invocation(kernel, X, **kwargs)
    able, _ = sort_out(inv)
    return (tuner or Timed(threads=2)).tune(inv, able, budget_s)


def by_way(values):
    return {name.split('"')[3]: value for name, value in values.items()}


BACKWARD = {"direction": "backward", "wanted": frozenset({"0"})}


@pytest.mark.parametrize("direction", [{}, BACKWARD], ids=["forward", "backward"])
def test_every_candidate_is_compiled_before_the_first_is_timed(direction):
    ways = ("a", "b", "c")
    found = {}
    for threads in (0, 2):
        kernel = Noted(*ways, before=lambda way: time.sleep(0.1))
        found[threads] = tune(kernel, Timed(threads=threads), **direction).stored
        own = kernel.events[-6:]  # before them a backward has its forward
        if threads:
            assert sorted(own[:3]) == [("traced", way) for way in ways]
            assert own[3:] == [("timed", way) for way in ways]
        else:
            assert own == [(what, way) for way in ways for what in ("traced", "timed")]
    assert found[0] == found[2]
    assert found[2].config == Config("c")
    assert found[2].complete


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(benchmark, "time", made)
    return made


@pytest.mark.parametrize(
    ("budget_s", "timed"), [(20.0, ["a", "b", "c"]), (14.0, ["a"])], ids=["half", "all"]
)
def test_what_is_not_compiled_within_half_the_budget_comes_last(clock, budget_s, timed):
    meeting = threading.Barrier(2)  # "a" and "b" are compiled at once, and end at 14 s

    def before(way):
        clock.takes(7.0)
        if way in "ab":
            meeting.wait(30.0)

    kernel = Noted("a", "b", "c", "d", before=before)
    result = tune(kernel, budget_s=budget_s)
    assert [way for what, way in kernel.events if what == "timed"] == timed
    assert kernel.events.index(("timed", "a")) == 2
    left = [way for way in kernel.ways if way not in timed]
    assert by_way(result.failures) == dict.fromkeys(left, CUT_SHORT)
    assert list(by_way(result.stored.times_ms)) == timed
    assert not result.stored.complete


def test_a_candidate_that_does_not_compile_is_recorded_once():
    kernel = Noted("a", "raises", "b")
    result = tune(kernel)
    assert by_way(result.failures) == {"raises": "ValueError: cannot be compiled"}
    assert list(by_way(result.stored.times_ms)) == ["a", "b"]
    assert result.stored.complete
    assert kernel.events.count(("traced", "raises")) == 1


def test_threads_compile_in_the_contexts_of_a_caller_that_is_traced():
    kernel, chain, device = Noted("a", "b"), chain_of(), jax.devices()[-1]
    with jax.default_matmul_precision("highest"), jax.default_device(device):
        x = np.asarray(X)
        grad = jax.jit(jax.grad(lambda x: Executor(chain)(kernel, x).sum()))(x)
    assert_allclose(grad, jnp.full_like(X, 2.0))
    assert len(chain.cache) == 2  # forward and backward
    assert {("ejkernel-compiler", "highest", device)} <= kernel.contexts
    assert {context[1:] for context in kernel.contexts} == {("highest", device)}


def test_nothing_stays_alive_after_threads():
    size = (3, 1000, 9)
    gc.collect()
    gc.disable()
    try:
        executor, kernel = Executor(chain_of()), Noted("a", "raises", "b")
        jax.jit(lambda x: executor(kernel, x)).lower(jax.ShapeDtypeStruct(size, jnp.float32))
        assert len(executor.chooser.cache) == 1
        assert not any(x.shape == size for x in jax.live_arrays())
    finally:
        gc.enable()


@pytest.fixture
def wrong_entry():
    """A kernel of flash_attention that is off by a percent."""

    @kernel_registry.register("flash_attention", Platform.XLA, Backend.ANY, priority=3)
    def wrong(query, key, value):
        return jax.nn.dot_product_attention(query, key, value) * 1.01

    yield
    (made,) = (e for e in kernel_registry.list("flash_attention") if e.name == "xla/any@3")
    kernel_registry.unregister(made)


def test_threads_share_an_oracle_that_finds_wrong_numbers(wrong_entry, monkeypatch):
    solved, solve = [], _op_kernel._oracle.solve

    def noted(spec, args, wanted, options=None):
        solved.append(str(jax.tree.map(jnp.shape, args)))
        return solve(spec, args, wanted, options)

    monkeypatch.setattr(_op_kernel._oracle, "solve", noted)
    monkeypatch.setattr(_op_kernel, "_solved", {})
    q, k, v = (
        jax.random.normal(key, (1, 300, 1, 24)) for key in jax.random.split(jax.random.key(0), 3)
    )
    chain = chain_of(Tuner(threads=2), budget_s=60.0)
    choice = Executor(chain).choose(FlashAttention(), q, k, v)
    assert (choice.source, choice.implementation.name) == ("autotune", "xla/any")
    (failures,) = chain.failures.values()
    assert {name: why.split(",")[0] for name, why in failures.items()}.keys() == {"xla/any@3 null"}
    assert "error" in failures["xla/any@3 null"]
    assert len(solved) == len(set(solved))
