"""Latent attention over pages in Triton: tiles, splits, memory it reads, and bits it promises."""

import dataclasses
import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from ejkernel import _settings
from ejkernel._device import Target
from ejkernel.callib import triton_call
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._triton.mla_page_attention import config
from tests.backend import BACKEND
from tests.kernels import guard, harness

OP = "mla_page_attention"
SPEC = kernel_registry.spec(OP)
ENTRY = harness.find_entry(OP, "triton/gpu")
HEADS, L, R, W, BLOCKS = 4, 16, 8, 4, 12
TARGETS = {
    "cuda:sm_80": Target(kind="gpu", model="A100", capability="8.0"),
    "cuda:sm_90": Target(kind="gpu", model="H200", capability="9.0"),
    "cuda:sm_100": Target(kind="gpu", model="B200", capability="10.0"),
    "hip:gfx942": Target(kind="gpu", model="MI300", capability="gfx942"),
}
on_a_cpu = pytest.mark.skipif(BACKEND != "cpu", reason="looks into the interpreter, on a CPU")


@pytest.fixture(autouse=True)
def _interpreted():
    with _settings.override(interpret=True):
        yield


def values(queries=(1, 6, 1), lens=(40, 23, 48), heads=HEADS, seed=0, **options):
    """A call of sequences with so many queries and keys, over shuffled pages."""
    count = len(queries)
    keys = jax.random.split(jax.random.key(seed), 3)
    starts = np.concatenate([[0], np.cumsum(queries)])
    tokens, pages = int(starts[-1]), count * BLOCKS
    tables = np.random.default_rng(seed).permutation(pages).reshape(count, BLOCKS)
    made = {
        "q_nope": jax.random.normal(keys[0], (tokens, heads, L)),
        "q_pe": jax.random.normal(keys[1], (tokens, heads, R)),
        "kv_pages": jax.random.normal(keys[2], (pages, W, L + R)),
        "context_lens": np.asarray(lens, np.int32),
        "block_tables": tables.astype(np.int32),
        "query_start_loc": starts.astype(np.int32),
        "num_seqs": count,
    }
    return made | {"softmax_scale": 0.3, "return_lse": True} | options


def run(values, **sizes):
    args = SPEC.canonicalize(SPEC.complete(values))
    assert ENTRY.why_not(args) is None
    cfg = dataclasses.replace(config.testing(args, "forward"), **sizes)
    return [np.asarray(x) for x in jax.jit(lambda args: ENTRY.fn(args, cfg)[0])(args)]


def assert_matches_oracle(values, **sizes):
    made = harness.solve(SPEC, SPEC.canonicalize(SPEC.complete(values)))
    for actual, name in zip(run(values, **sizes), ("out", "lse"), strict=True):
        expected = made.oracle.outputs[name]
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)


# rows of a tile that hold several heads and tokens, a part of the heads, and more than there are
@pytest.mark.parametrize(
    ("heads", "rows"),
    [(20, 16), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((3, 16), (4, 32)))],
)
def test_tiles_of_heads_and_tokens(heads, rows):
    assert_matches_oracle(values((1, 9, 2), heads=heads), block_q=rows, programs=8)


def test_long_sequences_may_have_tiles_of_their_own():
    own = {"prefill_block_k": 32, "prefill_warps": 8, "prefill_stages": 2}
    assert_matches_oracle(values((1, 9, 5), sliding_window=11), prefill_block_q=32, **own)


def test_the_number_of_splits_changes_only_rounding():
    few, many = (run(values(num_splits=n)) for n in (1, 3))
    for a, b in zip(few, many, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert any((a != b).any() for a, b in zip(few, many, strict=True))


def test_bits_of_a_sequence_depend_on_nothing_else():
    given = values((1, 6, 1), num_splits=3)
    expected = run(given)
    order = np.random.default_rng(9).permutation(len(given["kv_pages"]))  # page i moves to order[i]
    moved = {
        "kv_pages": jnp.zeros_like(given["kv_pages"]).at[order].set(given["kv_pages"]),
        "block_tables": order[given["block_tables"]].astype(np.int32),
    }
    for a, b in zip(run(given | moved), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    # alone, among as many tokens: one query and forty keys
    alone = {"query_start_loc": np.array([0, 1]), "num_seqs": 1}
    rows = {name: given[name][:1] for name in ("context_lens", "block_tables")}
    for a, b in zip(run(given | rows | alone), expected, strict=True):
        np.testing.assert_array_equal(a[:1], b[:1])


def test_unused_pages_full_of_nan_change_no_bit():
    given = values((1, 6, 1), sliding_window=20, num_splits=2)
    pages = np.asarray(given["kv_pages"]).copy()
    for table, last, count in zip(given["block_tables"], (40, 23, 48), (1, 6, 1), strict=True):
        for key in range(BLOCKS * W):
            if not last - count - 20 <= key < last:
                pages[table[key // W], key % W] = np.nan
    assert np.isnan(pages).any()
    for a, b in zip(run(given | {"kv_pages": jnp.asarray(pages)}), run(given), strict=True):
        np.testing.assert_array_equal(a, b)


@on_a_cpu
def test_bad_ids_lengths_and_starts_read_inside_the_arrays():
    given = values((1, 6, 1), return_lse=False)
    bad = {
        "context_lens": np.array([10**9, -5, 49]),
        "block_tables": np.where(np.arange(BLOCKS) % 2 == 0, 2**30, -(2**31)) * np.ones((3, 1)),
        "query_start_loc": np.array([-3, 4, 2, 10**6]),
        "num_seqs": np.array([2**20]),
    }
    for name, value in bad.items():
        with guard.inside_arrays() as seen:
            run(given | {name: value.astype(np.int32)})
        assert seen["loads"] > 0


@triton.jit
def read_beyond_kernel(x, out, N: tl.constexpr):
    tl.store(out, tl.load(x + N))


@on_a_cpu
def test_the_guard_sees_what_is_outside():
    outputs = {"out": jax.ShapeDtypeStruct((1,), jnp.float32)}
    read = lambda n: triton_call(
        read_beyond_kernel, inputs={"x": jnp.ones(4)}, outputs=outputs, grid=(1,), N=n
    )
    with guard.inside_arrays():
        assert read(3)["out"] == 1.0
        with pytest.raises(Exception, match="outside of every array"):
            jax.block_until_ready(read(4))


@on_a_cpu
@pytest.mark.slow
def test_calls_for_a_memory_checker_read_inside_the_arrays():
    file = pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu_memcheck.py"
    spec = importlib.util.spec_from_file_location("gpu_memcheck", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seen = set()
    with guard.inside_arrays():
        for name, op, given in module.serving_calls(jnp.float32):
            for output in jax.tree.leaves(module.serve(op, given)):
                assert np.isfinite(output).all(), (name, op)
            seen.add(op)
    assert len(seen) == 7


def traced_configs(pick, heads, name, dtype="bfloat16", tokens=8):
    """`candidates` or `heuristic` of decoding with latent vectors of 512."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    arrays = {
        "q_nope": shape((tokens, heads, 512)),
        "q_pe": shape((tokens, heads, 64)),
        "kv_pages": shape((256, 64, 576)),
        "context_lens": jax.ShapeDtypeStruct((8,), jnp.int32),
        "block_tables": jax.ShapeDtypeStruct((8, 32), jnp.int32),
        "query_start_loc": jax.ShapeDtypeStruct((9,), jnp.int32),
        "num_seqs": jax.ShapeDtypeStruct((1,), jnp.int32),
    }
    found = []
    trace = lambda arrays: found.append(
        pick(
            SPEC.canonicalize(SPEC.complete({**arrays, "softmax_scale": 0.1})),
            "forward",
            TARGETS[name],
        )
    )
    jax.eval_shape(trace, arrays)
    return found[0]


@pytest.mark.parametrize("name", TARGETS)
def test_guesses_have_the_rows_of_a_sequence(name):
    most = 32 if name.startswith("hip") else 64
    guess = functools.partial(traced_configs, config.heuristic, name=name)
    assert guess(16).block_q == 16
    assert guess(16, tokens=32).block_q == most
    assert guess(128).block_q == guess(128).prefill_block_q == most
    assert guess(128, dtype="float32").block_q == 16
    for cfg in traced_configs(config.candidates, 128, name):
        assert config.prefill(cfg).block_q == most
