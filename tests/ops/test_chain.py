"""The configuration chain: override, memory, heuristics, error; and what it stores."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from numpy.testing import assert_array_equal

from ejkernel import _settings
from ejkernel.errors import SelectionError, UnsupportedError
from ejkernel.modules import FlashAttention, FlashAttentionConfig
from ejkernel.ops import (
    BwdParams,
    Choice,
    ConfigCache,
    ConfigChooser,
    ConfigSelectorChain,
    Executor,
    FwdParams,
    Implementation,
    Invocation,
    Kernel,
)
from ejkernel.ops.config.selection import Stored


@pytest.fixture(scope="module", autouse=True)
def arrays():
    # JAX arrays cannot be made while tests are collected: see conftest.py
    global X
    X = jax.random.normal(jax.random.key(0), (4,))


@dataclasses.dataclass(frozen=True)
class Config:
    factor: int = 1


class Scale(Kernel):
    """x times the config's factor."""

    def run(self, x, *, cfg):
        return x * cfg.factor

    def heuristic_cfg(self, inv):
        return Config(2)


class NoHeuristic(Kernel):
    def run(self, x, *, cfg):
        return x


class Versioned(Kernel):
    """A kernel whose implementations are given."""

    def __init__(self, *implementations):
        super().__init__(name="versioned")
        self.given = implementations

    def implementations(self, inv):
        return self.given


def implementation(name, version=1, reason=None, heuristic=None):
    return Implementation(
        name=name,
        version=version,
        forward=lambda args, cfg: ((args.arrays()["0"],), ()),
        why_not=lambda args, direction: reason,
        heuristic=lambda args, direction: heuristic,
    )


@pytest.fixture
def chain():
    return ConfigSelectorChain(cache=ConfigCache())


def test_cache_is_a_mapping():
    cache = ConfigCache()
    assert cache.get("key") is None
    assert "key" not in cache
    before = cache.generation
    cache.put("key", Config(3))
    assert cache.get("key") == Config(3)
    assert "key" in cache
    assert len(cache) == 1
    assert cache.generation != before
    cache.clear()
    assert "key" not in cache
    assert len(cache) == 0


def test_heuristics_answer_and_are_never_stored(chain):
    choice = chain.choose(Invocation(kernel=Scale(), args=(X,)))
    assert (choice.source, choice.cfg) == ("heuristics", Config(2))
    assert len(chain.cache) == 0


def test_an_override_goes_first_and_is_never_stored(chain):
    inv = Invocation(kernel=Scale(), args=(X,), override=Config(9))
    chain.cache.put(inv.key, Stored("run/any", 1, Config(5)))
    choice = chain.choose(inv)
    assert (choice.source, choice.cfg) == ("override", Config(9))
    assert chain.cache.get(inv.key) == Stored("run/any", 1, Config(5))
    assert len(chain.cache) == 1


def test_an_override_is_not_part_of_the_key():
    plain = Invocation(kernel=Scale(), args=(X,))
    assert dataclasses.replace(plain, override=Config(9)).key == plain.key


def test_memory_goes_before_heuristics(chain):
    inv = Invocation(kernel=Scale(), args=(X,))
    chain.cache.put(inv.key, Stored("run/any", 1, Config(5)))
    choice = chain.choose(inv)
    assert (choice.source, choice.cfg) == ("memory", Config(5))
    other = chain.choose(Invocation(kernel=Scale(), args=(jnp.zeros(5),)))
    assert other.source == "heuristics"


@pytest.mark.parametrize(
    ("stored", "source"),
    [
        (Stored("b", 3, "stored"), "memory"),
        (Stored("b", 2, "stored"), "heuristics"),  # another version of the kernel
        (Stored("gone", 3, "stored"), "heuristics"),
        (Stored("refuses", 1, "stored"), "heuristics"),  # cannot serve this call
    ],
)
def test_memory_counts_only_for_the_kernel_it_was_measured_with(chain, stored, source):
    kernel = Versioned(
        implementation("refuses", reason="too long"),
        implementation("a", heuristic="guess of a"),
        implementation("b", version=3, heuristic="guess of b"),
    )
    inv = Invocation(kernel=kernel, args=(X,))
    chain.cache.put(inv.key, stored)
    choice = chain.choose(inv)
    assert choice.source == source
    expected = ("b", "stored") if source == "memory" else ("a", "guess of a")
    assert (choice.implementation.name, choice.cfg) == expected
    assert choice.refused == {"refuses": "too long"}


RIVALS = {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("rivals", "source"),
    [
        (RIVALS, "memory"),
        (RIVALS | {"gone": 7}, "memory"),
        (RIVALS | {"a": 2}, "heuristics"),  # a rival is another now
        ({"b": 3}, "heuristics"),  # a rival is new
    ],
)
def test_a_choice_among_other_versions_is_outdated(chain, rivals, source):
    """It is measured again where that is possible, and better than a guess where it is not."""
    kernel = Versioned(
        implementation("a", heuristic="guess of a"),
        implementation("b", version=3, heuristic="guess of b"),
    )
    inv = Invocation(kernel=kernel, args=(X,))
    chain.cache.put(inv.key, Stored("b", 3, "stored", rivals=rivals))
    choice = chain.choose(inv)
    assert (choice.source, choice.implementation.name, choice.cfg) == (source, "b", "stored")
    assert any("other versions" in said for said in choice.trail) == (source == "heuristics")


def test_the_first_implementation_with_a_heuristic_answers(chain):
    def unknown(args, direction):
        raise NotImplementedError("nothing known")

    first = dataclasses.replace(implementation("first"), heuristic=unknown)
    kernel = Versioned(first, implementation("second", heuristic="guess"))
    choice = chain.choose(Invocation(kernel=kernel, args=(X,)))
    assert (choice.implementation.name, choice.cfg) == ("second", "guess")


def test_error_names_op_shapes_and_tiers(chain):
    with pytest.raises(SelectionError) as caught:
        chain.choose(Invocation(kernel=NoHeuristic(), args=(X,)))
    message = str(caught.value)
    for part in ("`NoHeuristic`", "float32[4]", "override", "memory", "heuristics of run/any"):
        assert part in message


def test_one_refusal_is_one_error(chain):
    kernel = Versioned(implementation("only", reason="needs a longer query"))
    with pytest.raises(UnsupportedError, match=r"versioned.*only: needs a longer query"):
        chain.choose(Invocation(kernel=kernel, args=(X,)))


def test_several_refusals_are_a_group(chain):
    kernel = Versioned(implementation("a", reason="first"), implementation("b", reason="second"))
    with pytest.raises(ExceptionGroup) as caught:
        chain.choose(Invocation(kernel=kernel, args=(X,)))
    assert "versioned" in str(caught.value)
    assert all(isinstance(error, UnsupportedError) for error in caught.value.exceptions)
    assert [str(error)[-6:] for error in caught.value.exceptions] == [" first", "second"]


def test_backward_refuses_an_implementation_without_one(chain):
    kernel = Versioned(implementation("forward only"))
    with pytest.raises(UnsupportedError, match="no backward kernel"):
        chain.choose(Invocation(kernel=kernel, args=(X,), direction="backward"))


def test_what_is_learned_later_reaches_eager_calls(chain):
    executor, kernel = Executor(chain), Scale()
    assert_array_equal(executor(kernel, X), 2 * X)
    inv = Invocation(kernel=kernel, args=(X,))
    chain.cache.put(inv.key, Stored("run/any", 1, Config(5)))
    assert_array_equal(executor(kernel, X), 5 * X)
    chain.cache.clear()
    assert_array_equal(executor(kernel, X), 2 * X)


def test_a_users_own_chooser_decides():
    class Always(ConfigChooser):
        def choose(self, inv):
            return Choice(inv.kernel.implementations(inv)[0], Config(11), "mine", {})

    assert_array_equal(Executor(Always())(Scale(), X), 11 * X)


@pytest.fixture
def qkv():
    keys = jax.random.split(jax.random.key(1), 3)
    return tuple(jax.random.normal(key, (1, 40, 2, 8)) for key in keys)


def test_overrides_of_forward_and_backward_are_apart(qkv):
    class Notes(ConfigSelectorChain):
        def __init__(self):
            super().__init__()
            self.said = {}

        def choose(self, inv):
            choice = self.said[inv.direction] = super().choose(inv)
            return choice

    notes = Notes()
    executor = Executor(notes)

    def lower(**options):  # the chain is asked while lowering; nothing needs to run
        run = lambda *xs: executor(FlashAttention(), *xs, **options).sum()
        jax.jit(jax.grad(run)).lower(*qkv)

    lower(fwd_params=FwdParams(q_blocksize=16))
    assert {d: c.source for d, c in notes.said.items()} == {
        "forward": "override",
        "backward": "heuristics",
    }
    assert notes.said["forward"].cfg.block_q == 16
    cfg = FlashAttentionConfig(bwd_params=BwdParams(kv_blocksize=8))
    lower(cfg=cfg)
    assert {d: c.source for d, c in notes.said.items()} == {
        "forward": "heuristics",
        "backward": "override",
    }
    assert notes.said["backward"].cfg.block_k == 8
    assert len(executor.chooser.cache) == 0


def test_a_bad_configuration_of_the_backward_is_refused_by_the_forward(qkv):
    bad = BwdParams(kv_blocksize=24)
    run = lambda: Executor()(FlashAttention(), *qkv, platform="triton", bwd_params=bad)
    with _settings.override(interpret=True), pytest.raises(ValueError, match="power of two"):
        run()
    same = Executor()(FlashAttention(), *qkv, platform="xla", bwd_params=bad)  # which takes it
    assert_array_equal(same, Executor()(FlashAttention(), *qkv, platform="xla"))


def test_a_backward_that_jax_makes_has_nothing_to_configure(qkv):
    kernel, made = FlashAttention(), FlashAttention.implementations
    by_jax = lambda inv: [dataclasses.replace(x, derivative="jax") for x in made(kernel, inv)]
    kernel.implementations = by_jax
    Executor()(kernel, *qkv, platform="xla")
    with pytest.raises(UnsupportedError, match="xla/any has no backward to configure"):
        Executor()(kernel, *qkv, platform="xla", bwd_params=BwdParams(kv_blocksize=8))


def test_params_keep_the_heuristic_where_they_say_nothing(qkv):
    executor = Executor()
    guess = executor.choose(FlashAttention(), *qkv).cfg
    chosen = executor.choose(FlashAttention(), *qkv, fwd_params=FwdParams(q_blocksize=16)).cfg
    assert chosen == dataclasses.replace(guess, block_q=16)


def test_choose_tells_what_a_call_would_run_with(qkv):
    choice = Executor().choose(FlashAttention(), *qkv, causal=True)
    assert choice.implementation.name.startswith("xla/")
    assert choice.source == "heuristics"
    with pytest.raises(UnsupportedError, match="triton"):
        Executor().choose(FlashAttention(), *qkv, platform="triton")
