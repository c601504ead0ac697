"""What a tuning run checks, where it runs, what it lets go of, and what it leaves behind."""

import dataclasses
import gc
import json
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ejkernel.kernels import Backend, Platform, kernel_registry
from ejkernel.modules import FlashAttention, flash_attention
from ejkernel.ops import (
    AutotunePolicy,
    ConfigSelectorChain,
    Executor,
    Kernel,
    PersistentCache,
    autotune_recorded,
)
from ejkernel.ops.config.cache import CUT_SHORT, Stored
from ejkernel.ops.execution import trial, tuning
from ejkernel.ops.execution.executor import default_executor


@pytest.fixture(scope="module", autouse=True)
def arrays():
    # JAX arrays cannot be made while tests are collected: see conftest.py
    global Q, X
    X = jax.random.normal(jax.random.key(0), (8, 16))
    Q = jax.random.normal(jax.random.key(1), (1, 300, 1, 16))


GRADIENTS = {"direction": "backward", "wanted": frozenset({"query", "key", "value"})}


@dataclasses.dataclass(frozen=True)
class Config:
    way: str = "right"


class Twice(Kernel):
    """2x, by one of the given functions."""

    def __init__(self, name="twice", **ways):
        super().__init__(name=name)
        self.ways = {"right": lambda x: 2 * x} | ways

    def run(self, x, *, cfg):
        return self.ways[cfg.way](x)

    def heuristic_cfg(self, inv):
        return Config()

    def config_space(self, inv):
        return [Config(way) for way in self.ways]


def chain_of(**kwargs):
    return ConfigSelectorChain(policy=AutotunePolicy(mode="autotune", budget_s=20.0), **kwargs)


def reasons(chain):
    (failures,) = chain.failures.values()
    return {json.loads(name.partition(" ")[2])["way"]: why for name, why in failures.items()}


@pytest.fixture
def entry():
    """Registers kernels of flash_attention, and takes them out again."""
    before = kernel_registry.list("flash_attention")
    yield kernel_registry.register
    for made in kernel_registry.list("flash_attention"):
        if made not in before:
            kernel_registry.unregister(made)


# What a candidate must give


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda x: (2 * x).astype(jnp.bfloat16), "bfloat16[8, 16]"),
        (lambda x: (2 * x).reshape(16, 8), "float32[16, 8]"),
        (lambda x: [2 * x], "as PyTreeDef([*])"),
    ],
)
def test_a_candidate_of_another_kind_loses(other, words):
    chain = chain_of()
    assert Executor(chain)(Twice(other=other), X).dtype == jnp.float32
    assert words in reasons(chain)["other"]


def test_a_kernel_with_outputs_of_another_dtype_loses_though_it_is_first(entry):
    @entry("flash_attention", Platform.XLA, Backend.ANY, priority=3)
    def wide(query, key, value):
        return jax.nn.dot_product_attention(*(x.astype(jnp.float32) for x in (query, key, value)))

    q, chain = Q.astype(jnp.bfloat16), chain_of()
    assert Executor(chain)(FlashAttention(), q, q, q).dtype == jnp.bfloat16
    (failures,) = chain.failures.values()
    assert "where the oracle has bfloat16" in failures["xla/any@3 null"]


@pytest.mark.slow
def test_a_backward_is_timed_on_residuals_though_jax_differentiates_the_first_kernel(entry):
    @entry("flash_attention", Platform.XLA, Backend.ANY, priority=3)
    def with_jax(query, key, value):
        return jax.nn.dot_product_attention(query, key, value)

    chain = chain_of()
    inv = Executor(chain).invocation(FlashAttention(), Q, Q, Q, **GRADIENTS)
    choice = chain.tune(inv)
    assert (choice.source, choice.implementation.name) == ("autotune", "xla/any")
    assert not chain.failures[inv.key]


def test_a_backward_that_gives_more_than_is_wanted_may_win():
    class Pair(Kernel):
        def run(self, x, y, *, cfg):
            return x * y

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            x, y = primals
            return cotangents[0] * y, None if cfg.way == "right" else cotangents[0] * x

        def heuristic_cfg(self, inv):
            return Config()

        def config_space(self, inv):
            return [Config(), Config("more")]

    chain = chain_of()
    made = {"direction": "backward", "wanted": frozenset({"0"})}
    inv = Executor(chain).invocation(Pair(name="pair"), X, X, **made)
    assert len(chain.tune(inv).times_ms) == 2


# Where it runs


def test_a_traced_call_is_measured_on_the_callers_default_device(monkeypatch):
    found, build = [], trial.Trial.__init__

    def spy(self, inv):
        build(self, inv)
        found.append(self.args.arrays()["0"].devices())

    monkeypatch.setattr(trial.Trial, "__init__", spy)
    device = jax.devices()[-1]
    assert device != jax.devices()[0]
    with jax.default_device(device):
        jax.jit(lambda x: Executor(chain_of())(Twice(also=lambda x: x + x), x))(np.asarray(X))
    assert found == [{device}]


def test_a_call_with_numpy_arrays_is_measured_on_them():
    class Chosen(Twice):
        def run(self, x, i, *, cfg):
            return self.ways[cfg.way](x)[i]

    chain = chain_of()
    Executor(chain)(Chosen(also=lambda x: x + x), np.asarray(X), np.arange(3))
    (stored,) = (value for _, value in chain.cache.items())
    assert len(stored.times_ms) == 2


# What it lets go of


def test_nothing_of_a_run_stays_alive():
    size = (3, 1000, 7)

    def alive():
        return sum(x.shape == size for x in jax.live_arrays())

    gc.collect()
    gc.disable()
    try:
        executor = Executor(chain_of())
        kernel = Twice(also=lambda x: x + x)
        jax.jit(lambda x: executor(kernel, x)).lower(jax.ShapeDtypeStruct(size, jnp.float32))
        assert len(executor.chooser.cache) == 1
        assert alive() == 0
    finally:
        gc.enable()


@pytest.fixture
def interruptible():
    """A process started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_a_run_with_the_candidate_it_is_at(interruptible, monkeypatch):
    seen, runs, measure = [], [], tuning.Tuner._measure

    def noted(tuner, run):
        runs.append(run)
        return measure(tuner, run)

    def interrupted(x):
        threading.Timer(0.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        assert runs[0].stop.wait(30.0)
        return x + x

    monkeypatch.setattr(tuning.Tuner, "_measure", noted)
    chain = chain_of()
    with pytest.raises(KeyboardInterrupt):
        Executor(chain)(Twice(first=interrupted, then=lambda x: seen.append(x) or x + x), X)
    assert seen == []
    assert len(chain.cache) == 0


# What it leaves behind


def stored_in(folder):
    (record,) = PersistentCache(folder).records()
    return record


def test_a_budget_of_zero_keeps_what_was_measured(tmp_path):
    chain = chain_of(persistent=PersistentCache(tmp_path))
    executor, kernel = Executor(chain), Twice(also=lambda x: x + x)
    executor(kernel, X)
    before = stored_in(tmp_path)
    inv = executor.invocation(kernel, X)
    choices = autotune_recorded([inv], budget_s=0, chain=chain)
    assert [choice.source for choice in choices.values()] == ["heuristics"]
    assert stored_in(tmp_path) == before


def test_a_candidate_of_an_earlier_run_that_fails_now_is_out(tmp_path):
    def fails(x):
        raise ValueError("no longer")

    chain = chain_of(persistent=PersistentCache(tmp_path))
    executor, kernel = Executor(chain), Twice(right=fails, also=lambda x: x + x)
    inv = executor.invocation(kernel, X)
    implementation = inv.kernel.implementations(inv)[0]
    times = {trial.name_of(implementation, Config()): 1e-6}
    where = {"op": kernel.name, "device": inv.device_fingerprint}
    cut = Stored(implementation.name, implementation.version, Config(), times, {}, complete=False)
    PersistentCache(tmp_path).put(inv.key, cut, **where)
    assert_allclose(executor(kernel, X), 2 * X)
    assert "no longer" in reasons(chain)["right"]


def test_a_run_cut_short_does_not_replace_a_whole_one(tmp_path):
    chain = chain_of(persistent=PersistentCache(tmp_path))
    executor, kernel = Executor(chain), Twice(also=lambda x: x + x, third=lambda x: 3 * x - x)
    executor(kernel, X)
    before = stored_in(tmp_path)
    assert len(before.times_ms) == 3
    inv = executor.invocation(kernel, X)
    choice = chain.tune(inv, budget_s=1e-9)
    assert CUT_SHORT in chain.failures[inv.key].values()
    assert choice.times_ms == before.times_ms
    assert stored_in(tmp_path) == before


def test_one_entry_and_the_op_remember_apart(monkeypatch):
    executor, keys = default_executor(), []
    choose = executor.chooser.choose
    monkeypatch.setattr(executor.chooser, "choose", lambda inv: keys.append(inv.key) or choose(inv))
    kernel_registry.get("flash_attention", "xla")(Q, Q, Q)
    flash_attention(Q, Q, Q, platform="xla")
    assert len(set(keys)) == 2
    assert executor.invocation(FlashAttention(), Q, Q, Q).key not in keys


def test_a_config_of_another_kernel_with_the_name_is_a_miss():
    @dataclasses.dataclass(frozen=True)
    class Old:
        rows: int = 1

    chain = chain_of()
    executor, kernel = Executor(chain), Twice(also=lambda x: x + x)
    key = executor.invocation(kernel, X).key
    chain.cache.put(key, Stored("run/any", 1, Old()))
    assert_allclose(executor(kernel, X), 2 * X)
    assert isinstance(chain.cache.get(key).config, Config)


def test_a_stored_config_that_no_longer_holds_is_measured_again(tmp_path):
    limit = [100]

    class NoGuess(Kernel):
        def run(self, x, *, cfg):
            return 2 * x

        def config_space(self, inv):
            return [Checked(n) for n in (1, 2) if n <= limit[0]]

    global Checked

    @dataclasses.dataclass(frozen=True)
    class Checked:
        n: int

        def __post_init__(self):
            if self.n > limit[0]:
                raise ValueError("too many")

    Checked.__qualname__ = "Checked"
    kernel = NoGuess(name="no guess")
    Executor(chain_of(persistent=PersistentCache(tmp_path)))(kernel, X)
    limit[0] = 0
    cache = PersistentCache(tmp_path)
    inv = Executor(chain_of()).invocation(kernel, X)
    with pytest.warns(UserWarning, match="too many"):
        assert chain_of(persistent=cache)._read(inv) is None


@pytest.mark.parametrize("ms", [float("nan"), -1.0, float("inf")])
def test_a_record_with_impossible_times_is_damaged(tmp_path, ms):
    cache = PersistentCache(tmp_path)
    cache.put("key", Stored("run/any", 1, None, {"run/any null": ms}, {}, complete=False))
    with pytest.warns(UserWarning, match="holds a time"):
        assert cache.read("key") is None


@dataclasses.dataclass(frozen=True)
class Exotic:
    limit: float = float("inf")
    accumulate: np.dtype = np.dtype("float32")  # noqa: RUF009 - an immutable default


def test_configs_with_dtypes_and_infinite_numbers_come_back(tmp_path):
    cache = PersistentCache(tmp_path)
    cache.put("key", Exotic())
    assert PersistentCache(tmp_path).get("key") == Exotic()
