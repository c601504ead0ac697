"""Mean pooling in CUDA beyond the generated tests: slices, threads, columns, configs, refusals."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import _settings
from ejkernel._device import Target
from ejkernel.callib import _cuda_build, _cuda_call, reversed_threads
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._cuda import mean_pooling
from ejkernel.kernels._cuda.mean_pooling import config, fwd, spans
from ejkernel.modules import mean_pooling as pool
from tests.backend import BACKEND
from tests.kernels import harness, pooling_calls
from tests.kernels.pooling_calls import CALLS, call

H200 = Target(kind="gpu", model="NVIDIA H200", capability="9.0")
MI300 = Target(kind="gpu", model="MI300X", capability="gfx942")
on_host = pytest.mark.skipif(
    BACKEND != "cpu" or _cuda_build.why_not(_cuda_build.HOST) is not None,
    reason="threads take turns on a CPU, with a C++ compiler",
)


def tile(**more):
    return config.Config(**{"num_warps": 1, "block_w": 8, "slice_t": 8} | more)


@on_host
@pytest.mark.parametrize("name", CALLS)
def test_rows_in_slices(name):
    pooling_calls.assert_right(mean_pooling, call(**CALLS[name]), tile())


@on_host
@pytest.mark.parametrize(
    ("width", "more"),
    [
        (1, {}),
        (16, {"block_w": 4}),  # one thread across, 32 along tokens
        (24, {"num_warps": 4, "block_w": 16}),  # two blocks of columns, the second half full
        (36, {"num_warps": 2, "block_w": 64}),  # more threads than columns
    ],
)
def test_threads_over_tokens_and_columns(width, more):
    pooling_calls.assert_right(mean_pooling, call((2, 40, width)), tile(**more))


@on_host
@pytest.mark.parametrize("name", ["masked", "packed"])
def test_the_order_of_threads_changes_no_bit(name):
    args, cfg = call(**CALLS[name]), tile(num_warps=2)
    first, _ = pooling_calls.run(mean_pooling, args, cfg)
    with reversed_threads(fwd.SOURCE):
        second, _ = pooling_calls.run(mean_pooling, args, cfg)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@on_host
def test_cuts_that_make_no_sense_stay_within_the_arrays():
    """Traced offsets cannot be refused: no token outside is read, and none counts twice over."""
    x = jax.random.normal(jax.random.key(0), (1, 24, 4))
    run = jax.jit(lambda cuts: pool(x, cu_seqlens=cuts, platform="cuda"))
    with _settings.override(interpret=True):
        out = run(jnp.array([-5, 90, 3, 1 << 30], jnp.int32))
    assert out.shape == (3, 4)
    np.testing.assert_allclose(out[0], x[0].mean(axis=0), rtol=1e-5)


def test_slices_cover_every_row_once():
    cuts = np.array([0, 1, 1, 30, 64, 64], np.int32)
    made = spans.rows(call((1, 64, 2), cu_seqlens=cuts))
    cut = spans.slices(made, 8, 64)
    starts, stops, first, after = map(np.asarray, cut)
    assert (stops - starts).max() <= 8
    for row, (start, stop) in enumerate(itertools.pairwise(cuts)):
        mine = slice(first[row], after[row])
        tokens = [t for a, b in zip(starts[mine], stops[mine], strict=True) for t in range(a, b)]
        assert tokens == list(range(start, stop))


def test_many_short_sequences_need_few_slices():
    """As many as tokens and sequences allow, not each sequence those of the longest possible."""
    args = call((1, 4096, 2), cu_seqlens=np.arange(0, 4097, 4, dtype=np.int32))
    cut = spans.slices(spans.rows(args), 64, 4096)
    assert cut.starts.shape[0] == 4096 // 64 + 1024


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_warps", 3, "power of two from 1 to 32"),
        ("block_w", 12, "positive power of two"),
        ("slice_t", 0, "positive power of two"),
    ],
)
def test_bad_settings_are_named(name, value, words):
    with pytest.raises(ValueError, match=f"{name}={value} must be a {words}"):
        tile(**{name: value})


def test_a_machine_without_its_compiler_is_told(monkeypatch):
    entry = harness.find_entry("mean_pooling", "cuda/gpu")
    assert "NVIDIA" in entry.why_not(call(), MI300)
    monkeypatch.setattr(_cuda_build, "nvcc", lambda: None)
    monkeypatch.setattr(_cuda_build, "host_compiler", lambda: None)
    assert "no nvcc is on the path" in entry.why_not(call(), H200)
    with _settings.override(interpret=True):
        assert "C++ compiler" in entry.why_not(call(), Target(kind="cpu", model="cpu"))


def test_auto_waits_for_a_measurement():
    entry = harness.find_entry("mean_pooling", "cuda/gpu")
    assert "platform='cuda'" in entry.why_not_unasked(H200)
    assert kernel_registry.get("mean_pooling", "cuda", "gpu").entry is entry


def test_every_gpu_unit_has_work():
    shape = jax.ShapeDtypeStruct((1, 65536, 16, 128), jnp.bfloat16)

    def run(inputs):
        values = pooling_calls.SPEC.complete({"inputs": inputs, "chunk_size": 64})
        args = pooling_calls.SPEC.canonicalize(values)
        return fwd.forward(args, config.heuristic(args, "forward", H200))

    (made,) = _cuda_call.calls(jax.make_jaxpr(run)(shape).jaxpr)
    attributes = dict(made.attributes)
    across = min(attributes["threads"] * 8, attributes["block_w"])
    assert 1024 * (2048 // across) >= 8 * 132
