"""`overlay_cache` and `policy_override`: in force inside their block and nowhere else."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from ejkernel import _settings
from ejkernel.modules import FlashAttention, flash_attention
from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    FwdParams,
    Kernel,
    overlay_cache,
    policy_override,
)
from ejkernel.ops.config import policy as policies
from ejkernel.ops.config.cache import Stored


@pytest.fixture(scope="module", autouse=True)
def arrays():
    # JAX arrays cannot be made while tests are collected: see conftest.py
    global X
    X = jax.random.normal(jax.random.key(0), (4,))


@dataclasses.dataclass(frozen=True)
class Config:
    factor: int = 1


class Scale(Kernel):
    """x times the config's factor, which shows the config that ran."""

    def run(self, x, *, cfg):
        return x * cfg.factor

    def heuristic_cfg(self, inv):
        return Config(2)


class Same(Kernel):
    """2x for every config, so that the tuner accepts all of them."""

    def run(self, x, *, cfg):
        return x * 2

    def heuristic_cfg(self, inv):
        return Config(1)

    def config_space(self, inv):
        return [Config(1), Config(2)]


class Notes(ConfigSelectorChain):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.said = []

    def choose(self, inv):
        choice = super().choose(inv)
        self.said.append(choice.source)
        return choice


@pytest.fixture
def executor():
    return Executor(ConfigSelectorChain())


@pytest.fixture
def kernel():
    return Scale()


def key_of(executor, kernel, *args, **kwargs):
    return executor.invocation(kernel, *args, **kwargs).key


# Overlays


@pytest.mark.parametrize("make", [dict, ConfigCache])
@pytest.mark.parametrize("stored", [True, False])
def test_an_overlay_holds_inside_and_not_outside(executor, kernel, make, stored):
    overlay, value = make(), Config(7)
    content = {key_of(executor, kernel, X): Stored("run/any", 1, value) if stored else value}
    for key, cfg in content.items():
        (overlay.put if make is ConfigCache else overlay.__setitem__)(key, cfg)
    assert_array_equal(executor(kernel, X), 2 * X)
    with overlay_cache(overlay):
        assert executor.choose(kernel, X).source == "overlay"
        assert_array_equal(executor(kernel, X), 7 * X)
    assert_array_equal(executor(kernel, X), 2 * X)
    assert executor.choose(kernel, X).source == "heuristics"
    assert len(executor.chooser.cache) == 0


def test_an_overlay_goes_before_memory(executor, kernel):
    key = key_of(executor, kernel, X)
    executor.chooser.cache.put(key, Stored("run/any", 1, Config(5)))
    with overlay_cache({key: Config(7)}):
        assert_array_equal(executor(kernel, X), 7 * X)
    assert_array_equal(executor(kernel, X), 5 * X)
    assert executor.chooser.cache.get(key) == Stored("run/any", 1, Config(5))


def test_one_jitted_function_has_a_config_for_each_place(executor, kernel):
    key = key_of(executor, kernel, X)
    traces = []

    @jax.jit
    def function(x):
        traces.append(1)
        return executor(kernel, x)

    for _ in range(2):
        assert_array_equal(function(X), 2 * X)
        with overlay_cache({key: Config(7)}):
            assert_array_equal(function(X), 7 * X)
        with overlay_cache({key: Config(8)}):
            assert_array_equal(function(X), 8 * X)
    assert len(traces) == 3


def test_a_function_first_jitted_inside_does_not_keep_the_overlay(executor, kernel):
    function = jax.jit(lambda x: executor(kernel, x))
    with overlay_cache({key_of(executor, kernel, X): Config(7)}):
        assert_array_equal(function(X), 7 * X)
        assert_array_equal(executor(kernel, X), 7 * X)
    assert_array_equal(function(X), 2 * X)
    assert_array_equal(executor(kernel, X), 2 * X)


def test_inner_overlays_hide_outer_ones_key_by_key(executor, kernel):
    y = jnp.ones(7)
    first, second = key_of(executor, kernel, X), key_of(executor, kernel, y)
    with overlay_cache({first: Config(7), second: Config(8)}):
        with overlay_cache({first: Config(9)}):
            assert_array_equal(executor(kernel, X), 9 * X)
            assert_array_equal(executor(kernel, y), 8 * y)
        with overlay_cache({}):
            assert_array_equal(executor(kernel, X), 7 * X)
        assert_array_equal(executor(kernel, X), 7 * X)
    assert_array_equal(executor(kernel, X), 2 * X)


@pytest.mark.parametrize("make", [dict, ConfigCache])
def test_the_content_is_taken_on_entry(executor, kernel, make):
    key, overlay = key_of(executor, kernel, X), make()
    put = overlay.put if make is ConfigCache else overlay.__setitem__
    put(key, Config(7))
    with overlay_cache(overlay):
        put(key, Config(8))
        assert_array_equal(executor(kernel, X), 7 * X)
        overlay.clear()
        assert_array_equal(jax.jit(lambda x: executor(kernel, x))(X), 7 * X)
    put(key, Config(8))
    with overlay_cache(overlay):
        assert_array_equal(executor(kernel, X), 8 * X)


def test_an_overlay_ends_with_an_error(executor, kernel):
    with (
        pytest.raises(RuntimeError, match="stop"),
        overlay_cache({key_of(executor, kernel, X): Config(7)}),
    ):
        raise RuntimeError("stop")
    assert_array_equal(executor(kernel, X), 2 * X)


def test_an_override_goes_before_an_overlay_and_is_never_stored(executor, kernel):
    with overlay_cache({key_of(executor, kernel, X): Config(7)}):
        assert_array_equal(executor(kernel, X, cfg=Config(3)), 3 * X)
        assert executor.choose(kernel, X, cfg=Config(3)).source == "override"
        assert_array_equal(executor(kernel, X), 7 * X)
    assert_array_equal(executor(kernel, X), 2 * X)
    assert len(executor.chooser.cache) == 0


def test_an_overlay_for_another_version_is_a_miss(executor, kernel):
    with overlay_cache({key_of(executor, kernel, X): Stored("run/any", 99, Config(7))}):
        assert_array_equal(executor(kernel, X), 2 * X)


def test_equal_fields_of_different_config_types_are_told_apart(executor):
    @dataclasses.dataclass(frozen=True)
    class Other:
        factor: int = 1

    class Typed(Scale):
        def run(self, x, *, cfg):
            return x * (1 if isinstance(cfg, Other) else -1) * cfg.factor

    kernel = Typed()
    key = key_of(executor, kernel, X)
    for wrap in (lambda cfg: cfg, lambda cfg: Stored("run/any", 1, cfg)):
        with overlay_cache({key: wrap(Config(7))}):
            assert_array_equal(executor(kernel, X), -7 * X)
        with overlay_cache({key: wrap(Other(7))}):
            assert_array_equal(executor(kernel, X), 7 * X)


def test_an_overlay_reaches_the_ops_of_the_library():
    keys = jax.random.split(jax.random.key(1), 3)
    q, k, v = (jax.random.normal(key, (1, 40, 2, 8)) for key in keys)
    executor = Executor()
    plain = executor(FlashAttention(), q, k, v)
    key = key_of(executor, FlashAttention(), q, k, v)
    with overlay_cache({key: FwdParams(q_blocksize=16)}):
        choice = executor.choose(FlashAttention(), q, k, v)
        assert_allclose(flash_attention(q, k, v), plain, rtol=1e-5, atol=1e-6)
    assert choice.source == "overlay"
    assert choice.cfg.block_q == 16


# Policies


def test_a_policy_holds_inside_and_not_outside():
    chain = ConfigSelectorChain(autotune=False)
    executor, kernel = Executor(chain), Same()
    assert executor.choose(kernel, X).source == "heuristics"
    with policy_override(autotune=True):
        assert executor.choose(kernel, X).source == "autotune"
        with policy_override(autotune=False):
            assert executor.choose(kernel, jnp.ones(5)).source == "heuristics"
        assert executor.choose(kernel, jnp.ones(6)).source == "autotune"
    assert executor.choose(kernel, jnp.ones(7)).source == "heuristics"
    assert executor.choose(kernel, X).source == "memory"


@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function], ids=["jit", "eager"])
def test_one_function_has_a_policy_for_each_place(wrap):
    chain = Notes(autotune=False)
    executor, kernel = Executor(chain), Same()
    function = wrap(lambda x: executor(kernel, x))
    function(X)
    assert chain.said[-1] == "heuristics"
    with policy_override(autotune=True):
        assert_array_equal(function(X), 2 * X)
    assert chain.said[-1] == "autotune"
    assert len(chain.cache) == 1


def test_what_was_tuned_inside_is_used_by_eager_calls_outside():
    class Slow(Same):
        """The guess is slow, so that the other config wins."""

        def run(self, x, *, cfg):
            steps = 200_000 if cfg.factor == 1 else 1
            burned = jax.lax.fori_loop(0, steps, lambda _, y: jnp.sin(y + 1), x)
            ran.append(cfg)
            return jnp.where(burned > 2, 0, 2 * x)

    ran = []
    executor, kernel = Executor(ConfigSelectorChain(autotune=False)), Slow()
    executor(kernel, X)
    assert ran == [Config(1)]
    with policy_override(autotune=True):
        executor(kernel, X)
    assert ran[-1] == Config(2)
    ran.clear()
    executor(kernel, X)
    assert ran == [Config(2)]  # the program of the guess is not used any more


def test_heuristics_are_never_stored_and_do_not_hide_a_later_tuning(executor):
    kernel = Same()
    with policy_override(autotune=False):
        executor(kernel, X)
    assert len(executor.chooser.cache) == 0
    with policy_override(autotune=True):
        assert executor.choose(kernel, X).source == "autotune"
    with policy_override(autotune=False):
        assert executor.choose(kernel, X).source == "memory"


def test_a_given_config_is_used_under_every_policy(executor, kernel):
    for autotune in (False, True):
        with policy_override(autotune=autotune):
            assert_array_equal(executor(kernel, X, cfg=Config(3)), 3 * X)
            assert executor.choose(kernel, X, cfg=Config(3)).source == "override"
    assert len(executor.chooser.cache) == 0


def test_a_chain_may_be_given_first():
    chain = ConfigSelectorChain(policy=AutotunePolicy(mode="heuristics", budget_s=3.0))
    with policy_override(chain, autotune=True) as policy:
        assert policy == AutotunePolicy(mode="autotune", budget_s=3.0)
        assert Executor(chain).choose(Same(), X).source == "autotune"
    assert chain.policy == AutotunePolicy(mode="heuristics", budget_s=3.0)


def test_a_chain_that_is_given_is_what_the_change_starts_from():
    chain = ConfigSelectorChain(policy=AutotunePolicy(mode="autotune", budget_s=3.0))
    with (
        policy_override(autotune=False, budget_s=9.0),
        policy_override(chain, allow_in_trace=False) as policy,
    ):
        assert policy == AutotunePolicy(mode="autotune", budget_s=3.0, allow_in_trace=False)


def test_single_fields_leave_the_others_as_they_are():
    with (
        policy_override(policy=AutotunePolicy(mode="autotune", budget_s=7.0)),
        policy_override(allow_in_trace=False) as policy,
    ):
        assert policy == AutotunePolicy(mode="autotune", budget_s=7.0, allow_in_trace=False)


@pytest.mark.parametrize("autotune", [True, False])
def test_a_field_that_is_not_named_stays_that_of_the_chain(autotune):
    chain = ConfigSelectorChain(autotune=autotune)
    other = "heuristics" if autotune else "autotune"
    with _settings.override(autotune_policy=other), policy_override(budget_s=5.0):
        source = Executor(chain).choose(Same(), X).source
    assert source == ("autotune" if autotune else "heuristics")


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="budget"), policy_override(budget=3):
        pytest.fail("entered")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "sometimes"}, "mode"),
        ({"mode": True}, "mode"),
        ({"budget_s": -1.0}, "budget_s"),
        ({"budget_s": float("nan")}, "budget_s"),
        ({"budget_s": float("inf")}, "budget_s"),
    ],
)
def test_a_bad_policy_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        AutotunePolicy(**fields)
    with pytest.raises(ValueError, match=message), policy_override(**fields):
        pytest.fail("entered")


def test_a_policy_is_filled_in_from_the_environment():
    def current(**fields):
        policy = policies.current(AutotunePolicy(**fields))
        return policy.measures, policy.budget_s

    with _settings.override(autotune_policy="autotune", autotune_budget_s=4):
        assert current() == (True, 4.0)
        assert current(mode="heuristics") == (False, 4.0)
        assert current(budget_s=2) == (True, 2.0)
        assert current(budget_s=0) == (False, 0.0)
    with _settings.override(autotune_policy="autotune", autotune_budget_s=0):
        assert not current()[0]
        assert not current(mode="autotune")[0]
        assert current(budget_s=2) == (True, 2.0)
    assert not current()[0]  # the tests' environment


@pytest.mark.parametrize(("given", "seconds"), [({}, (8, 12)), ({"autotune_budget_s": 3}, (3, 3))])
def test_the_environment_sets_the_budget_of_both_directions(given, seconds):
    with _settings.override(**given):
        policy = policies.current(AutotunePolicy())
    assert (policy.budget("forward"), policy.budget("backward")) == seconds


@pytest.mark.parametrize(
    ("mode", "answer"),
    [("autotune", (True, False)), ("always", (True, True)), ("heuristics", (False, False))],
)
@pytest.mark.parametrize("by", ["environment", "context"])
def test_a_mode_says_whether_and_where_to_measure(mode, answer, by):
    if by == "environment":
        context = _settings.override(autotune_policy=mode)
    else:
        context = policy_override(mode=mode)
    with context:
        policy = policies.current(AutotunePolicy())
    assert (policy.measures, policy.always) == answer


@pytest.mark.parametrize("value", ["no", "heuristics", 1, []])
def test_the_short_form_of_a_policy_is_a_bool(value):
    with (
        pytest.raises(TypeError, match=r"`policy_override`: `autotune` must be True, False or"),
        policy_override(autotune=value),
    ):
        pytest.fail("entered")
    with pytest.raises(TypeError, match=r"`ConfigSelectorChain`: `autotune` must be.*'always'"):
        ConfigSelectorChain(autotune=value)


def test_the_environment_decides_for_a_chain_without_a_policy():
    executor = Executor(ConfigSelectorChain(cache=ConfigCache()))
    assert executor.choose(Same(), X).source == "heuristics"
    with _settings.override(autotune_policy="autotune"):
        assert executor.choose(Same(), X).source == "autotune"


def test_a_chain_takes_one_spelling_of_its_policy():
    assert ConfigSelectorChain(autotune=True).policy.mode == "autotune"
    assert ConfigSelectorChain(autotune=False).policy.mode == "heuristics"
    with pytest.raises(ValueError, match="not both"):
        ConfigSelectorChain(autotune=True, policy=AutotunePolicy())
