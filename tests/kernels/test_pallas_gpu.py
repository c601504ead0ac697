"""Attention for Hopper: on its GPU; elsewhere in Mosaic's interpreter.

There, twins of the inlined steps share all other code.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import _settings
from ejkernel._device import Target
from ejkernel.kernels import _oracle, kernel_registry
from ejkernel.kernels._pallas.gpu._blocks import probe
from ejkernel.kernels._pallas.gpu.flash_attention import config
from ejkernel.modules import flash_attention
from tests.backend import BACKEND
from tests.kernels import harness

OP = "flash_attention"
SPEC = kernel_registry.spec(OP)
ENTRY = harness.find_entry(OP, "pallas/gpu")
H200, A100 = Target("gpu", "NVIDIA H200", "9.0"), Target("gpu", "NVIDIA A100", "8.0")
SMALL = config.Config(block_q=128, block_k=64, num_programs=2)

WHY_NOT = probe.why_not() if BACKEND == "gpu" else probe.why_not_interpreted()
runs_kernels = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def interpreted(test):
    """A wrong barrier makes a kernel wait for ever."""
    return runs_kernels(pytest.mark.timeout(150)(test))


pytestmark = pytest.mark.usefixtures("usable_mosaic_interpreter")


def arrays(t, s, heads=1, groups=1, d=64, e=64, batch=1, factor=1.0) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(3), 3)
    normal = lambda key, *shape: jax.random.normal(key, shape, jnp.float32).astype(jnp.bfloat16)
    return {
        "query": normal(keys[0], batch, t, heads, d) * jnp.bfloat16(factor),
        "key": normal(keys[1], batch, s, groups, d),
        "value": normal(keys[2], batch, s, groups, e),
        "return_lse": True,
    }


def make(values):
    return SPEC.canonicalize(SPEC.unpack(SPEC.complete(values)))


def assert_matches(values, cfg=SMALL):
    args = make(values)
    made = _oracle.solve(SPEC, args, (), harness.QUICK)
    with jax.numpy_rank_promotion("raise"):
        outputs, residuals = jax.jit(lambda args: ENTRY.fn(args, cfg))(args)
    harness.assert_close_to_oracle(_oracle.answer(SPEC, args, outputs, {}), made)
    assert residuals[0].shape == (args.query.shape[0], args.query.shape[2], args.query.shape[1])
    return outputs


# Numbers

CASES = {
    # odd lengths, grouped heads, several tiles a program, more queries than keys: empty rows
    "causal": (arrays, (130, 70, 2, 1), {"causal": True, "sinks": 2.0}),
    # two masked blocks of keys, whose maximum is the reference
    "offset_and_window": (arrays, (70, 203), {"causal": True, "sliding_window": 70}),
}
MORE = {
    "full": (arrays, (128, 128, 2, 2), {}),
    "odd": (arrays, (100, 77, 2, 1), {}),
    "causal_equal": (arrays, (256, 256, 2, 1), {"causal": True}),
    "both_sides": (arrays, (200, 250), {"sliding_window": (70, 30)}),
    "cap": (arrays, (128, 128), {"causal": True, "logits_soft_cap": 5.0}),
    "batch": (arrays, (65, 65, 1, 1, 64, 64, 3), {"causal": True}),
    "d128": (arrays, (128, 192, 2, 1, 128, 128), {"causal": True}),
    "d192": (arrays, (128, 192, 1, 1, 192, 128), {"causal": True}),
    "one": (arrays, (1, 1), {"causal": True}),
    "one_query": (arrays, (1, 130), {"causal": True}),
    "scale": (arrays, (64, 64), {"softmax_scale": 0.3}),
}


def values_of(case):
    make_arrays, sizes, options = case
    made = make_arrays(*sizes) | options
    if (sink := made.pop("sinks", None)) is not None:
        heads = made["query"].shape[2]
        made["softmax_aux"] = jnp.full((heads, 1), sink) + jnp.arange(heads)[:, None]
    return made


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_numbers(case):
    assert_matches(values_of(CASES[case]))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_more_numbers(case):
    assert_matches(values_of(MORE[case]))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    "cfg",
    [
        config.Config(block_q=64, block_k=64, num_programs=1, turns=False),
        config.Config(block_q=128, block_k=128, num_stages=3, num_programs=3),
        config.Config(block_q=128, block_k=64, turns=False, num_programs=2),
        config.Config(block_q=192, registers=160, load_registers=32, num_programs=2),
        config.Config(block_q=192, block_k=64, registers=160, load_registers=32, num_programs=1),
    ],
)
def test_every_kind_of_config(cfg):
    assert_matches(values_of((arrays, (330, 330, 2, 1), {"causal": True})), cfg)


@interpreted
def test_sums_that_overflow_are_computed_again(monkeypatch):
    """Scores that grow away from the reference overflow; without the second launch nan stays."""
    values = arrays(64, 192)
    # of the last block of keys, which the kernel sees first, scores are near zero
    growing = jnp.where(jnp.arange(192) < 128, 40.0, 0.01)[None, :, None, None]
    values["key"] = (values["key"] * growing).astype(jnp.bfloat16)
    values["query"] = values["query"] * jnp.bfloat16(8.0)
    assert_matches(values)
    from ejkernel.kernels._pallas.gpu.flash_attention import call

    monkeypatch.setattr(call.Call, "launch_again", lambda self, kernel, flags, *out: out)
    with pytest.raises(AssertionError):
        assert_matches(values)


@interpreted
@pytest.mark.slow
def test_many_rows_out_of_range():
    assert_matches(arrays(128, 256, factor=60.0))
    assert_matches(arrays(128, 256, factor=60.0) | {"causal": True, "sliding_window": 100})


@interpreted
@pytest.mark.slow
def test_values_whose_sums_overflow():
    values = arrays(64, 128)
    values["value"] = values["value"] * jnp.bfloat16(1e35)
    assert_matches(values)


def one_hot_call(size, s, t=64):
    """A call with scores of about `size`, and the key that has all the weight of each row.

    Products of small whole numbers are exact, and so is a factor that is a power of two.
    """
    rng = np.random.default_rng(5)
    q, k = rng.integers(-7, 8, (t, 64)), rng.integers(-63, 64, (s, 64))
    v = rng.integers(-127, 128, (s, 64)) / 64
    scale = np.float32(0.1)  # no power of two: a product with it is rounded
    x = q @ k.T
    first, second = np.sort(x, axis=1)[:, [-1, -2]].T
    assert (first > second).all()
    factor = 2.0 ** round(np.log2(size / (np.abs(x).max() * scale)))
    values = {"query": q, "key": k * factor, "value": v}
    made: dict[str, Any] = {
        name: jnp.asarray(array, jnp.bfloat16)[None, :, None] for name, array in values.items()
    }
    top = (x.max(axis=1) * factor).astype(np.float32) * scale
    return made | {"softmax_scale": float(scale), "return_lse": True}, x.argmax(axis=1), top


@interpreted
@pytest.mark.parametrize(
    ("size", "s"),
    [
        (1e7, 64),  # one block of keys: no sum leaves its range
        (1e9, 128),
        pytest.param(1e12, 128, marks=pytest.mark.slow),
    ],
)
def test_large_scores(size, s):
    """lse is in the units of scores, in which backward subtracts it: any rounding would be seen."""
    values, best, top = one_hot_call(size, s)
    assert size / 4 < np.abs(top).max() < 2 * size
    args, wanted = make(values), frozenset({"query", "key", "value"})
    (out, lse), residuals = jax.jit(lambda args: ENTRY.fn(args, SMALL))(args)
    cfg = config.testing(args, "backward")
    cotangents = (jnp.ones_like(out), jnp.zeros_like(lse))
    backward = lambda args, *rest: ENTRY.backward(args, cfg, *rest, wanted)
    found = jax.jit(backward)(args, (out, lse), residuals, cotangents)
    np.testing.assert_array_equal(out[0, :, 0], values["value"][0, best, 0])
    np.testing.assert_array_equal(lse[0, 0], top)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in found.values())
    counts = np.bincount(best, minlength=s).astype(np.float32)
    expected = np.repeat(counts[:, None], 64, axis=1)
    np.testing.assert_array_equal(found["value"][0, :, 0], expected)


@interpreted
@pytest.mark.slow
@pytest.mark.skipif(BACKEND == "gpu", reason="the interpreter finds races")
def test_no_races():
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    from ejkernel.callib import _pallas

    with _pallas.detect_races():
        assert_matches(values_of((arrays, (192, 192, 2, 1), {"causal": True})))
    assert not gpu_callbacks.get_races().races_found


@interpreted
def test_the_registry_gives_it_by_name():
    values: dict[str, Any] = {**arrays(65, 65), "causal": True}
    with _settings.override(interpret=True):
        found, _ = kernel_registry.get(OP, "pallas", "gpu")(**values)
        expected, _ = flash_attention(**values, platform="xla")
    found, expected = (x.astype(jnp.float32) for x in (found, expected))
    np.testing.assert_allclose(found, expected, atol=0.03)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("sinks", [None, "shared", "mapped"])
def test_vmap(sinks):
    values = {n: x for n, x in arrays(65, 65, batch=4).items() if n != "return_lse"}
    split = [x.reshape(2, 2, *x.shape[1:]) for x in values.values()]
    given = jnp.asarray([[[0.5]], [[2.0]]])
    axis = 0 if sinks == "mapped" else None
    extra = None if sinks is None else given if axis == 0 else given[0]

    def attend(platform):
        def one(query, key, value, sink):
            attention = kernel_registry.get(OP, *platform)
            return attention(query, key, value, softmax_aux=sink, causal=True)

        query, key, value = split
        return jax.vmap(one, in_axes=(0, 0, None, axis))(query, key, value[0], extra)

    with _settings.override(interpret=True):
        found, expected = (attend(p).astype(jnp.float32) for p in (("pallas", "gpu"), ("xla",)))
    np.testing.assert_allclose(found, expected, atol=0.03)


# What is refused


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_mask": np.ones((1, 1, 64, 64), bool)}, "does not honour"),
        ({"bias": np.zeros((1, 1, 64, 64), np.float32)}, "does not honour"),
        ({"alibi_slopes": np.ones(1, np.float32)}, "does not honour"),
        ({"dropout_prob": 0.1, "dropout_seed": 1}, "does not honour"),
        ({"softmax_scale": -1.0}, "positive softmax_scale"),
    ],
)
def test_refused_options(options, reason):
    args = make(arrays(64, 64) | options)
    assert reason in (ENTRY.why_not(args, H200) or "")


def test_refused_types_and_sizes():
    values = arrays(64, 64)
    halves = {n: x.astype(jnp.float16) for n, x in values.items() if n != "return_lse"}
    assert "needs bfloat16" in ENTRY.why_not(make(halves), H200)
    assert "head sizes" in ENTRY.why_not(make(arrays(64, 64, d=96, e=96)), H200)
    assert "not empty" in ENTRY.why_not(make(arrays(0, 64)), H200)


@pytest.mark.parametrize("target", [A100, Target("gpu", "NVIDIA B200", "10.0"),
                                    Target("gpu", "AMD Instinct MI300X", "gfx942")])  # fmt: skip
def test_refused_architectures(target):
    reason = ENTRY.why_not(make(arrays(64, 64)), target)
    assert "compute capability 9.0" in reason
    assert target.capability in reason


def test_old_versions_of_jax_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "needs JAX 0.11 or newer" in str(probe.why_not.__wrapped__())


# Configurations


def test_configs_check_themselves():
    wrongs: tuple[dict[str, Any], ...] = (
        {"block_q": 100},
        {"block_q": 48},
        {"block_q": 128, "block_k": 96},
        {"block_q": 128, "num_stages": 4},
        {"block_q": 192},  # 240 registers are too many for three warpgroups
        {"block_q": 128, "registers": 100},
        {"block_q": 128, "registers": 160},  # fewer than it starts with
        {"block_q": 128, "load_registers": 32},  # more than its warpgroups have together
        {"block_q": 128, "section": 0},
    )
    for wrong in wrongs:
        with pytest.raises(ValueError, match="Config"):
            config.Config(**wrong)


@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (192, 128)])
def test_candidates_fit(d, e):
    args = make(arrays(256, 256, d=d, e=e))
    found = ENTRY.candidates(args, "forward", H200)
    assert len(found) >= 2
    assert all(config.shared_bytes(args, "forward", cfg) <= 227 << 10 for cfg in found)
    assert {cfg.num_programs for cfg in found} == {132}
    assert found[0] == ENTRY.heuristic(args, "forward", H200)


# Only by its name


@pytest.mark.parametrize("platform", ["auto", "pallas"])
def test_it_is_one_of_the_kernels_to_choose_from(platform):
    kernel = flash_attention_kernel()
    inv = invocation(kernel, platform)
    (mine,) = (i for i in kernel.implementations(inv) if i.name == "pallas/gpu")
    assert mine.why_not(inv.call, "forward") == probe.why_not()


@pytest.mark.skipif(probe.why_not() is not None, reason=str(probe.why_not()))
def test_the_shipped_table_takes_it_where_it_is_fastest():
    from ejkernel.ops.execution.executor import default_executor

    options = {"causal": True, "return_lse": False}
    values = lambda: make(arrays(4096, 4096, 16, 16, 128, 128, 4) | options)
    inv = invocation(flash_attention_kernel(), "auto", values)
    chosen = default_executor().chooser.choose(inv)
    assert (chosen.implementation.name, chosen.cfg.block_q) == ("pallas/gpu", 128)


@pytest.mark.skipif(probe.why_not() is not None, reason=str(probe.why_not()))
def test_gradients_by_name():
    from ejkernel.ops.config import selection

    inv = dataclasses.replace(invocation(flash_attention_kernel(), "pallas"), direction="backward")
    able, _ = selection.sort_out(inv)
    assert "pallas/gpu" in {i.name for i in able}
    same_bits = dataclasses.replace(inv, call=dataclasses.replace(inv.call, deterministic=True))
    able, _ = selection.sort_out(same_bits)
    assert "pallas/gpu" in {i.name for i in able}


def flash_attention_kernel():
    from ejkernel.kernels import _op_kernel

    return _op_kernel.RegisteredKernel(OP)


def invocation(kernel, platform, values=lambda: make(arrays(64, 64))):
    from ejkernel.ops.core.kernel import Invocation

    args = jax.eval_shape(values)
    return Invocation(kernel=kernel, call=args, target=H200, platform=platform)


def test_other_kernels_may_be_run_by_name_too():
    """A call takes such a kernel with its platform; `get` takes it with a platform as well."""

    @kernel_registry.register(OP, "cuda", "any", by_name="is new")
    def new(args, cfg):
        return (args.query,), (jnp.zeros(args.query.shape[:1]),)

    (entry,) = (e for e in kernel_registry.list(OP) if e.fn is new)
    try:
        q = jnp.ones((1, 2, 1, 4))
        np.testing.assert_array_equal(np.asarray(flash_attention(q, q, 2 * q)), 2.0)
        out = flash_attention(q, q, 2 * q, platform="cuda")
        np.testing.assert_array_equal(np.asarray(out), 1.0)
        assert vars(kernel_registry.get(OP))["entry"] is not entry
        assert vars(kernel_registry.get(OP, "cuda"))["entry"] is entry
        derived = next(e for e in kernel_registry.list("mla_attention") if e.name == "cuda/any")
        assert derived.by_name == "is new"
    finally:
        kernel_registry.unregister(entry)
