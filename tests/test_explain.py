"""`explain` says what a call then does, and leaves no trace."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import _explain, _settings
from ejkernel.kernels import Platform, kernel_registry
from ejkernel.modules import (
    FlashAttention,
    attention,
    flash_attention,
)
from ejkernel.ops import (
    ConfigSelectorChain,
    Executor,
    FwdParams,
    Kernel,
    PersistentCache,
    overlay_cache,
    policy_override,
    to_json,
)
from ejkernel.ops.config.cache import Stored
from ejkernel.ops.execution import executor as executors

B, T, S, H, G, D, E = 2, 32, 48, 4, 2, 16, 8


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


Q, K, V = shape(B, T, H, D), shape(B, S, G, D), shape(B, S, G, E)


def arrays(*structs):
    keys = jax.random.split(jax.random.key(0), len(structs))
    return [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, structs, strict=True)]


@pytest.fixture
def executor(tmp_path, monkeypatch):
    """The default executor, with a memory and a folder of its own."""
    chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path / "configs"))
    made = Executor(chain)
    monkeypatch.setattr(executors, "default_executor", lambda: made)
    return made


class Double(Kernel):
    def run_xla(self, x, *, factor=2.0, cfg):
        return x * factor

    def heuristic_cfg(self, inv):
        return {"block": 8}


class Recorder(ConfigSelectorChain):
    """A chain that remembers what it was asked and what it said."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def choose(self, inv):
        choice = super().choose(inv)
        self.seen[inv.direction] = (inv.key, choice.implementation.name, choice.cfg)
        return choice


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "sliding_window": 7, "return_lse": True},
        {"dropout_prob": 0.5, "dropout_seed": 3},
        {"fwd_params": FwdParams(q_blocksize=16)},
    ],
)
def test_it_says_what_the_call_does(options):
    recorder = Recorder()
    run = Executor(recorder)

    def loss(q, k, v):
        return jax.tree.reduce(
            jnp.add,
            jax.tree.map(jnp.sum, run(FlashAttention(), q, k, v, **options)),
        )

    jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(Q, K, V)
    made = ejkernel.explain("flash_attention", Q, K, V, **options)
    for direction, said in (("forward", made.forward), ("backward", made.backward)):
        key, entry, cfg = recorder.seen[direction]
        assert (said.key, said.entry) == (key, entry)
        assert said.config == dataclasses.asdict(cfg)
    assert made.wanted == ("query", "key", "value")


@pytest.mark.parametrize(
    "op", ["flash_attention", flash_attention, FlashAttention, FlashAttention()]
)
def test_every_spelling_of_an_op(op):
    made = ejkernel.explain(op, Q, K, V, causal=True)
    assert made.op == "flash_attention"
    assert made.options == {"causal": True}
    assert made.forward.entry == "xla/any"


def test_arrays_and_their_shapes_are_the_same_call(executor):
    made = ejkernel.explain(flash_attention, *arrays(Q, K, V))
    assert made == ejkernel.explain(flash_attention, Q, K, V)


def test_nothing_is_measured_or_stored(executor, tmp_path):
    chain = executor.chooser
    large = [shape(2, 1024, 4, 64) for _ in range(3)]  # enough for more than one block size
    with policy_override(autotune=True), _settings.override(ops_record=True):
        made = ejkernel.explain("flash_attention", *large)
        assert made == ejkernel.explain("flash_attention", *large)
    assert made.forward.source == "heuristics"
    assert made.forward.would_measure
    assert any("would measure" in said for said in made.forward.trail)
    assert len(chain.cache) == 0
    assert not chain.failures
    assert ejkernel.ops.get_invocations() == []
    assert not (tmp_path / "configs").exists()


def test_without_measuring_it_says_so(executor):
    with policy_override(autotune=False):
        made = ejkernel.explain("flash_attention", Q, K, V)
    assert not made.forward.would_measure
    assert "autotune: off (policy heuristics)" in made.forward.trail


def tuned(executor, failures=()):
    """Another config than the heuristic's, as a tuner would store it."""
    guess = executor.choose(FlashAttention(), *arrays(Q, K, V))
    config = dataclasses.replace(guess.cfg, block_q=guess.cfg.block_q // 2)
    name = guess.implementation.name
    return Stored(name, guess.implementation.version, config, {"one": 0.5}, dict(failures))


def test_a_remembered_choice_is_reported(executor):
    stored = tuned(executor, {"two": "Rejected: wrong numbers"})
    key = ejkernel.explain("flash_attention", Q, K, V).forward.key
    chain = executor.chooser
    device = ejkernel.ops.device_fingerprint()
    chain.persistent.put(key, stored, op="flash_attention", device=device)
    for _ in range(2):  # reading from disk does not put it into memory
        made = ejkernel.explain("flash_attention", Q, K, V).forward
        assert made.source == "persistent"
        assert made.config == dataclasses.asdict(stored.config)
        assert made.times_ms == {"one": 0.5}
        assert made.failures == {"two": "Rejected: wrong numbers"}
        assert made.trail[-1] == "memory: nothing stored"
    assert len(chain.cache) == 0
    chain.cache.put(key, stored)
    assert ejkernel.explain("flash_attention", Q, K, V).forward.source == "memory"
    with overlay_cache({key: stored}):
        assert ejkernel.explain("flash_attention", Q, K, V).forward.source == "overlay"


def test_failures_of_this_process_are_reported(executor):
    key = ejkernel.explain("flash_attention", Q, K, V).backward.key
    executor.chooser.failures[key] = {"three": "MemoryError: too large"}
    made = ejkernel.explain("flash_attention", Q, K, V)
    assert made.backward.failures == {"three": "MemoryError: too large"}
    assert made.forward.failures == {}
    assert "failed in tuning three: MemoryError: too large" in str(made)


def test_every_other_entry_and_platform_has_its_reason():
    @kernel_registry.register("flash_attention", "cuda", "gpu", honours={"causal"})
    def other(args, cfg):
        raise AssertionError

    (entry,) = (e for e in kernel_registry.list("flash_attention") if e.fn is other)
    try:
        made = ejkernel.explain("flash_attention", Q, K, V)
        others = {
            e.name: f"needs a {e.backend.upper()}; this call is for cpu"
            for e in kernel_registry.list("flash_attention")
            if e.backend in ("gpu", "tpu")
        }
        assert "EJKERNEL_INTERPRET=1" in made.forward.refused["cuda/gpu"]
        assert made.forward.refused.keys() == others.keys()
        assert all(text.startswith(others[n]) for n, text in made.forward.refused.items())
        asked = ejkernel.explain("flash_attention", Q, K, V, platform="xla")
        assert asked.forward.refused == dict.fromkeys(others, "not asked for (platform='xla')")
        refused = ejkernel.explain("flash_attention", Q, K, V, platform="cuda")
    finally:
        kernel_registry.unregister(entry)
    assert refused.forward.entry is None
    assert "needs a GPU" in refused.forward.problem
    assert refused.backward is None
    there = {e.platform for e in kernel_registry.list("flash_attention")} | {Platform.CUDA}
    assert set(made.forward.missing) == {p for p in Platform if p not in there}
    assert all(made.forward.missing.values())


def test_an_op_that_jax_differentiates():
    made = ejkernel.explain(attention, Q, K, V)
    assert made.backward is None
    assert "JAX differentiates" in made.note
    assert made.forward.output_bytes == 4 * (B * T * H * E + B * H * T * S)


def test_a_kernel_of_the_user():
    made = ejkernel.explain(Double(name="double"), shape(4, 4), factor=3.0)
    assert (made.op, made.forward.entry, made.forward.config) == ("double", "xla/cpu", {"block": 8})
    assert (made.forward.input_bytes, made.forward.output_bytes) == (64, 64)
    assert made.forward.flops is None
    assert made.forward.missing == {}
    assert ejkernel.explain(Double, shape(4)).op == "Double"


def test_an_op_from_outside():
    def halve(x: jax.Array, by: float = 2.0):
        return x / by

    kernel_registry.register("halve", "xla", "any")(halve)
    (entry,) = kernel_registry.list("halve")
    try:
        made = ejkernel.explain("halve", shape(8), by=4.0)
        one = ejkernel.explain(kernel_registry.get("halve"), shape(8))
    finally:
        kernel_registry.unregister(entry)
    assert (made.forward.entry, made.options) == ("xla/any", {"by": 4.0})
    assert one.forward.entry == "xla/any"


def dense_pairs(t, s, causal=False, window=(None, None)):
    i, j = np.arange(t)[:, None] + s - t, np.arange(s)[None]
    left, right = window
    seen = np.ones((t, s), bool)
    if causal:
        seen &= j <= i
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return int(seen.sum())


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, T * S),
        ({"causal": True}, dense_pairs(T, S, causal=True)),
        ({"sliding_window": (5, 3)}, dense_pairs(T, S, window=(5, 3))),
        ({"causal": True, "sliding_window": 5}, dense_pairs(T, S, True, (5, 0))),
    ],
)
def test_costs_are_counted_from_shapes(options, pairs):
    made = ejkernel.explain("flash_attention", Q, K, V, **options)
    inputs = 4 * (B * T * H * D + B * S * G * (D + E))
    out = 4 * B * T * H * E
    assert (made.forward.input_bytes, made.forward.output_bytes) == (inputs, out)
    assert (made.backward.input_bytes, made.backward.output_bytes) == (inputs + out, inputs)
    assert made.forward.flops == 2 * B * H * pairs * (D + E)
    assert made.backward.flops == 2 * B * H * pairs * (3 * D + 2 * E)


def test_more_queries_than_keys_see_nothing_before_the_first_key():
    long, short = shape(1, 8, 1, 4), shape(1, 3, 1, 4)
    made = ejkernel.explain("flash_attention", long, short, short, causal=True)
    assert made.forward.flops == 2 * dense_pairs(8, 3, causal=True) * 8


def test_lengths_move_positions_so_every_pair_counts():
    q, k = shape(1, 16, 2, 8), shape(1, 16, 2, 8)
    lengths = shape(3, dtype=jnp.int32)
    made = ejkernel.explain("flash_attention", q, k, k, causal=True, cum_seqlens_q=lengths)
    assert made.forward.flops == 2 * 2 * 16 * 16 * 16


def test_a_call_over_a_mesh_is_explained_for_one_device():
    spec = jax.sharding.PartitionSpec("x")
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    where = {"mesh": mesh, "in_specs": (spec,) * 3, "out_specs": spec}
    made = ejkernel.explain("flash_attention", Q, K, V, **where)
    assert made.arrays["query"] == f"float32{[B // 2, T, H, D]}"


def test_it_can_be_written_down():
    made = ejkernel.explain("flash_attention", Q, K, V, causal=True)
    document = json.loads(made.to_json())
    assert document["forward"]["entry"] == "xla/any"
    assert json.loads(to_json(made)) == document
    text = str(made)
    assert text == made.to_text()
    for part in ("forward: xla/any, said by heuristics", "causal=True", "dense count", "backward"):
        assert part in text
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.op = "other"


@pytest.mark.parametrize(
    ("op", "args", "error", "words"),
    [
        ("nope", (Q, K, V), ValueError, "known are"),
        (3, (), ValueError, "no op 3"),
        ("flash_attention", (Q, K), TypeError, "value"),
        ("flash_attention", (Q, V, K), ValueError, "`key`"),
        ("flash_attention", (shape(2, 3), K, V), ValueError, "4 axes"),
        ("flash_attention", (shape(B, T, H, D, dtype=jnp.int32), K, V), TypeError, "dtype"),
    ],
)
def test_wrong_arguments_are_refused_as_in_a_call(op, args, error, words):
    with pytest.raises(error, match=words):
        ejkernel.explain(op, *args)


def test_a_dtype_that_jax_would_not_keep():
    wide = shape(B, T, H, D, dtype=np.dtype("float64"))
    with pytest.raises(ValueError, match="jax_enable_x64"):
        ejkernel.explain("flash_attention", wide, K, V)


def test_a_kernel_that_cannot_be_traced_is_still_explained(caplog):
    class Broken(Double):
        def run_xla(self, x, *, cfg):
            raise RuntimeError("no luck")

    made = ejkernel.explain(Broken, shape(4))
    assert (made.forward.entry, made.forward.output_bytes) == ("xla/cpu", None)
    assert "no luck" in caplog.text


def test_sizes_read_well():
    assert [_explain._size(n) for n in (0, 1023, 1024, 3 << 20)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "3 MiB",
    ]


def test_the_package_has_it_without_importing_it():
    assert "explain" in dir(ejkernel)
    assert ejkernel.explain is _explain.explain
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = ejkernel.nope
