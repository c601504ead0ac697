"""Recorded calls, labels in programs, tuning from both, and batched calls with one config."""

import base64
import dataclasses
import gc
import json
import os
import pathlib
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from ejkernel import _settings
from ejkernel.modules import FlashAttention, flash_attention
from ejkernel.ops import (
    AutotunePolicy,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    autotune_recorded,
    clear_invocations,
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    get_invocations,
    label,
    labels_to_configs,
    pmap_with_config,
    record_invocation,
    vmap_with_config,
)

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def arrays():
    # JAX arrays cannot be made while tests are collected: see conftest.py
    global X
    X = jax.random.normal(jax.random.key(0), (4, 8))


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int = 1


class Double(Kernel):
    """2x; the config of one step is the quickest. Counts how often a guess is asked for."""

    def __init__(self, name="double"):
        super().__init__(name=name)
        self.asked = 0

    def run(self, x, *, cfg, scale=2.0):
        burned = jax.lax.fori_loop(0, cfg.steps, lambda _, y: jnp.sin(y + 1), x)
        return jnp.where(burned > 2, 0, scale * x)

    def heuristic_cfg(self, inv):
        self.asked += 1
        return Config(200_000)

    def config_space(self, inv):
        return [Config(200_000), Config(1)]


class OwnGradient(Double):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (self.run(cotangents[0], cfg=cfg),)


# JAX's cache leaves names out of its key and hands back those of earlier runs.
pytestmark = pytest.mark.usefixtures("without_jax_cache")


@pytest.fixture(autouse=True)
def nothing_recorded():
    clear_invocations()
    yield
    clear_invocations()


@pytest.fixture
def chain():
    return ConfigSelectorChain(autotune=False)


def qkv(length=40):
    keys = jax.random.split(jax.random.key(1), 3)
    return tuple(jax.random.normal(key, (1, length, 2, 8)) for key in keys)


# Recording


def test_a_call_is_recorded_and_forgotten():
    kernel = Double()
    inv = Invocation(kernel=kernel, args=(X,), kwargs={"scale": 3.0})
    record_invocation(kernel, inv)
    (found,) = get_invocations()
    assert found.kernel is kernel
    assert found.key == inv.key
    assert found.abstract_args == (jax.ShapeDtypeStruct(X.shape, X.dtype),)
    assert found.kwargs == {"scale": 3.0}
    clear_invocations()
    assert get_invocations() == []


def test_a_call_is_recorded_for_its_own_kernel():
    with pytest.raises(ValueError, match=r"double.*other"):
        record_invocation(Double("other"), Invocation(kernel=Double(), args=(X,)))


def test_nothing_is_recorded_unless_asked(chain):
    Executor(chain)(Double(), X)
    assert get_invocations() == []


def test_every_kind_of_call_is_recorded_once_in_order(chain):
    executor, kernel = Executor(chain), Double()
    with _settings.override(ops_record=True):
        executor(kernel, X)
        executor(kernel, X + 1)
        jax.jit(lambda x: executor(kernel, x))(X)
        executor(kernel, X[:2])
        executor(kernel, X, scale=3.0)
        Executor(chain)(kernel, X)
    found = [(inv.abstract_args[0].shape, inv.kwargs.get("scale")) for inv in get_invocations()]
    assert found == [((4, 8), None), ((2, 8), None), ((4, 8), 3.0)]
    assert len({inv.key for inv in get_invocations()}) == 3


def test_forward_and_backward_are_recorded(chain):
    executor, kernel = Executor(chain), OwnGradient()
    with _settings.override(ops_record=True):
        jax.grad(lambda x: executor(kernel, x).sum())(X)
    assert [(inv.direction, sorted(inv.wanted)) for inv in get_invocations()] == [
        ("forward", []),
        ("backward", ["0"]),
    ]


@pytest.mark.parametrize("make", [Double, FlashAttention])
def test_a_record_keeps_no_array_alive(chain, make):
    x = qkv() if make is FlashAttention else (X + 1,)
    refs = [weakref.ref(array) for array in x]
    with _settings.override(ops_record=True):
        Executor(chain)(make(), *x).block_until_ready()
    del x
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
    (inv,) = get_invocations()
    assert all(isinstance(a, jax.ShapeDtypeStruct) for a in inv.call.arrays().values())


def test_recorded_calls_are_tuned_and_used(chain):
    executor, kernel = Executor(chain), OwnGradient()
    gradient = jax.grad(lambda x: executor(kernel, x).sum())
    with _settings.override(ops_record=True):
        assert_allclose(gradient(X), jnp.full_like(X, 2.0))
        assert executor.choose(kernel, X).cfg == Config(200_000)
    choices = autotune_recorded(chain=chain)
    assert set(choices) == {inv.key for inv in get_invocations()}
    assert {choice.source for choice in choices.values()} == {"autotune"}
    assert {choice.cfg for choice in choices.values()} == {Config(1)}
    later = executor.choose(kernel, X)
    assert (later.source, later.cfg) == ("memory", Config(1))
    assert_allclose(gradient(X), jnp.full_like(X, 2.0))


def test_given_calls_are_tuned(chain):
    kernel = Double()
    inv = Executor(chain).invocation(kernel, X)
    choices = autotune_recorded([inv], chain=chain, budget_s=5.0)
    assert choices[inv.key].cfg == Config(1)
    assert get_invocations() == []
    assert autotune_recorded(chain=chain) == {}


@pytest.mark.parametrize("kept", [False, True])
def test_a_call_is_measured_again_on_request(chain, tmp_path, kept):
    chain.persistent = PersistentCache(tmp_path) if kept else None
    kernel = Double()
    inv = Executor(chain).invocation(kernel, X)
    for count in (2, 4):
        autotune_recorded([inv], chain=chain)
        assert chain._get_tuner().measured == count


def test_recorded_calls_of_an_op_are_tuned(chain):
    executor = Executor(chain)
    with _settings.override(ops_record=True):
        expected = executor(FlashAttention(), *qkv(300), causal=True)
    (inv,) = get_invocations()
    (choice,) = autotune_recorded(chain=chain).values()
    assert choice.source == "autotune"
    assert len(choice.times_ms) > 1
    assert executor.choose(FlashAttention(), *qkv(300), causal=True).source == "memory"
    actual = executor(FlashAttention(), *qkv(300), causal=True)
    assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert inv.key in chain.cache


# Labels


def labelled(x):
    with label("first / of “two”"):
        x = jnp.sin(x)

    @label("second")
    def function(x):
        return jnp.cos(x) * 3

    return function(x)


NAMES = [("first / of “two”", "label"), ("second", "label")]


def names(labels):
    return [(item.name, item.kind) for item in labels]


def test_labels_are_found_in_lowered_and_compiled_programs():
    lowered = jax.jit(labelled).lower(X)
    compiled = lowered.compile()
    assert names(find_labels_in_lowered(lowered)) == NAMES
    assert sorted(names(find_labels_in_lowered(compiled))) == sorted(NAMES)
    assert sorted(names(extract_labels_from_hlo_text(compiled.as_text()))) == sorted(NAMES)


def test_labels_survive_transforms():
    def loss(x):
        return labelled(x).sum()

    for program in (jax.grad(loss), jax.vmap(labelled), jax.checkpoint(labelled)):
        found = names(find_labels_in_lowered(jax.jit(program).lower(X)))
        assert sorted(found) == sorted(NAMES)


def test_labels_nest_and_one_object_serves_twice():
    outer = label("outer")

    def function(x):
        with outer:
            x = jnp.sin(x)
            with label("inner"), outer:
                x = jnp.cos(x)
        return jnp.tan(x)

    equations = jax.make_jaxpr(function)(X).eqns
    stacks = {eqn.primitive.name: str(eqn.source_info.name_stack) for eqn in equations}
    found = {name: names(extract_labels_from_hlo_text(text)) for name, text in stacks.items()}
    assert found == {
        "sin": [("outer", "label")],
        "cos": [("outer", "label"), ("inner", "label")],
        "tan": [],
    }


def test_a_decorated_function_keeps_its_name_and_results():
    @label("name")
    def function(x, *, y=1):
        """Adds."""
        return x + y

    assert (function.__name__, function.__doc__) == ("function", "Adds.")
    assert function(1, y=2) == 3


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_label_needs_a_name(name):
    with pytest.raises(ValueError, match="label"):
        label(name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing here",
        "ejk.label.",
        "ejk.json.!!!",
        "ejk.json.AAAA",
        "ejk.hash._w",
        "ejk.json." + base64.urlsafe_b64encode(b"{}").decode().rstrip("="),
        "ejk.json." + base64.urlsafe_b64encode(b"[1]").decode().rstrip("="),
        "ejk.json." + base64.urlsafe_b64encode(b'{"call": {}}').decode().rstrip("="),
    ],
)
def test_text_that_only_looks_like_a_label_is_no_error(text):
    assert [item for item in extract_labels_from_hlo_text(text) if item.kind != "hash"] == []


def lower(mode, executor, kernel, *args, **kwargs):
    with _settings.override(ops_stamp=mode):
        return jax.jit(lambda *xs: executor(kernel, *xs, **kwargs)).lower(*args)


def test_calls_are_not_stamped_by_default(chain):
    kernel = Double()
    assert find_labels_in_lowered(lower("none", Executor(chain), kernel, X)) == []
    plain = jax.jit(lambda x: Executor(chain)(kernel, x)).lower(X)
    assert find_labels_in_lowered(plain) == []


@pytest.mark.parametrize("mode", ["hash", "json"])
def test_calls_are_stamped_on_request(chain, mode):
    executor, kernel = Executor(chain), Double()
    lowered = lower(mode, executor, kernel, X, scale=2.5)
    key = executor.invocation(kernel, X, scale=2.5).key
    for found in (
        find_labels_in_lowered(lowered),
        extract_labels_from_hlo_text(lowered.compile().as_text()),
    ):
        (item,) = found
        assert (item.name, item.kind, item.key) == ("double", mode, key)
        assert (item.document is None) == (mode == "hash")


def test_stamps_of_forward_and_backward(chain):
    executor, kernel = Executor(chain), OwnGradient()
    with _settings.override(ops_stamp="json"):
        lowered = jax.jit(jax.grad(lambda x: executor(kernel, x).sum())).lower(X)
    found = find_labels_in_lowered(lowered)
    assert {item.document["call"]["direction"] for item in found} >= {"backward"}
    assert len({item.key for item in found}) == len(found)


def test_labels_tell_the_configs_of_a_program(chain):
    executor, kernel = Executor(chain), Double()
    lowered = lower("json", executor, kernel, X)
    assert labels_to_configs(find_labels_in_lowered(lowered)) == {
        executor.invocation(kernel, X).key: {
            "implementation": "run/any",
            "version": 1,
            "config": {"steps": 200_000},
            "source": "heuristics",
        }
    }
    assert labels_to_configs(find_labels_in_lowered(lower("hash", executor, kernel, X))) == {}
    assert labels_to_configs(find_labels_in_lowered(jax.jit(labelled).lower(X))) == {}


@pytest.mark.parametrize("form", ["lowered", "text"])
def test_what_a_program_contains_is_tuned(chain, form):
    executor, kernel = Executor(chain), FlashAttention()
    lowered = lower("json", executor, kernel, *qkv(300), causal=True, sliding_window=(20, 0))
    (item,) = find_labels_in_lowered(lowered)
    given = lowered if form == "lowered" else lowered.compile().as_text()
    choices = autotune_recorded(given, chain=chain)
    assert set(choices) == {item.key}
    assert choices[item.key].source == "autotune"
    later = executor.choose(kernel, *qkv(300), causal=True, sliding_window=(20, 0))
    assert (later.source, later.cfg) == ("memory", choices[item.key].cfg)


def test_the_precision_of_a_program_is_kept(chain):
    kernel = FlashAttention()
    with jax.default_matmul_precision("highest"):
        lowered = lower("json", Executor(chain), kernel, *qkv())
    (item,) = find_labels_in_lowered(lowered)
    assert set(autotune_recorded(lowered, chain=chain)) == {item.key}


PROGRAM = """
import json, sys
import ejkernel.modules
from ejkernel.ops import ConfigSelectorChain, autotune_recorded

chain = ConfigSelectorChain(autotune=False)
print(json.dumps(sorted(autotune_recorded(sys.stdin.read(), chain=chain))))
"""


def test_a_dump_is_tuned_by_a_process_that_never_called_the_op(chain):
    lowered = lower("json", Executor(chain), FlashAttention(), *qkv(40))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=lowered.compile().as_text(),
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [item.key for item in find_labels_in_lowered(lowered)]


# Batched calls


def test_vmap_gives_the_plain_results_and_chooses_once(chain):
    kernel = Double()
    batched = vmap_with_config(kernel, executor=Executor(chain), scale=2.0)
    assert_allclose(batched(X), 2 * X)
    assert kernel.asked == 1
    batched(X)
    assert kernel.asked <= 2


def test_vmap_takes_axes_and_a_config(chain):
    class Add(Double):
        def run(self, x, y, *, cfg):
            return (x + y) * cfg.steps

        def heuristic_cfg(self, inv):
            assert [a.shape for a in inv.abstract_args] == [(8,), (8,)]
            return Config(1)

    row = jnp.arange(8.0)
    executor = Executor(chain)
    assert_allclose(vmap_with_config(Add(), (0, None), executor=executor)(X, row), X + row)
    assert_allclose(vmap_with_config(Add(), (1, None), 1, executor=executor)(X.T, row), (X + row).T)
    with_config = vmap_with_config(Add(), (0, None), executor=executor, cfg=Config(3))
    assert_allclose(with_config(X, row), 3 * (X + row), rtol=1e-6)
    assert len(chain.cache) == 0


def test_vmap_tunes_for_one_element():
    chain, kernel = ConfigSelectorChain(policy=AutotunePolicy(mode="autotune")), Double()
    executor = Executor(chain)
    assert_allclose(vmap_with_config(kernel, executor=executor)(X), 2 * X)
    assert executor.choose(kernel, X[0]).source == "memory"


def test_vmap_and_pmap_use_the_default_executor():
    assert_allclose(vmap_with_config(Double())(X), 2 * X)
    assert_allclose(pmap_with_config(Double())(X), 2 * X)


def test_pmap_gives_the_plain_results_and_chooses_once(chain):
    kernel = Double()
    x = jnp.stack([X + i for i in range(len(jax.devices()))])
    mapped = pmap_with_config(kernel, axis_name="d", executor=Executor(chain), scale=2.0)
    out = mapped(x)
    assert_allclose(out, 2 * x)
    assert kernel.asked == 1
    assert len(out.sharding.device_set) == len(jax.devices())


def test_pmap_on_fewer_devices_with_a_config(chain):
    devices = jax.devices()[::-1][:4]
    out = pmap_with_config(Double(), executor=Executor(chain), devices=devices, cfg=Config(1))(X)
    assert_array_equal(out, 2 * X)
    assert out.sharding.device_set == set(devices)


def test_pmap_refuses_what_it_cannot_split(chain):
    mapped = pmap_with_config(Double(), executor=Executor(chain))
    with pytest.raises(ValueError, match=r"pmap_with_config.*devices"):
        mapped(jnp.ones((len(jax.devices()) + 1, 2)))
    with pytest.raises(ValueError, match=r"pmap_with_config.*leading"):
        pmap_with_config(Double())(jnp.ones((2, 2)), jnp.ones((3, 2)))


def test_flash_attention_batched_and_parallel_equal_the_plain_call(chain):
    keys = jax.random.split(jax.random.key(4), 3)
    q, k, v = (jax.random.normal(key, (2, 1, 12, 2, 4)) for key in keys)
    expected = np.stack([flash_attention(*xs, causal=True) for xs in zip(q, k, v, strict=True)])
    for batch in (vmap_with_config, pmap_with_config):
        run = batch(FlashAttention(), executor=Executor(chain), causal=True)
        assert_allclose(run(q, k, v), expected, rtol=1e-5, atol=1e-6)
