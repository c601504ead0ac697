"""Attention over cached keys on TPUs beyond the generated tests: layouts, steps and races."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel._device import Target
from ejkernel.aot import _targets, _tpu
from ejkernel.callib import _pallas
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._pallas.tpu._blocks import heads, keys
from ejkernel.kernels._pallas.tpu.page_attention import config as page_config
from ejkernel.kernels._pallas.tpu.ragged_page_attention import config, prefill
from tests.kernels import harness

OPS = ("page_attention", "ragged_page_attention", "ragged_decode_attention")
V5E = Target(kind="tpu", model="TPU v5 lite")
SMALL = config.Config(block_q=8, block_k=8, decode_block_k=8)


def entry_of(op):
    return harness.find_entry(op, "pallas/tpu")


def ragged(num_heads, groups, d, dtype, cache=None, size=4, starts=(0, 3, 4), **options):
    """A prefill and a decoding sequence over 7 and 5 keys, in pages of `size`."""
    spec = kernel_registry.spec("ragged_page_attention")
    k1, k2 = jax.random.split(jax.random.key(1))
    lens = (7, 5)
    blocks = -(-max(lens) // size)
    pages = jax.random.normal(k1, (2 * blocks, size, 2 * groups, d)) * (30 if cache else 1)
    values = options | {
        "queries": jax.random.normal(k2, (starts[-1], num_heads, d)).astype(dtype),
        "kv_pages": pages.astype(cache or dtype),
        "context_lens": jnp.asarray(lens),
        "block_tables": jnp.arange(2 * blocks).reshape(2, blocks)[::-1],
        "query_start_loc": jnp.asarray(starts),
        "num_seqs": 2,
    }
    return spec, spec.canonicalize(spec.complete(values))


# Heads that share words


@pytest.mark.parametrize(
    ("num_heads", "groups", "d", "dtype", "cache"),
    [
        (2, 1, 256, jnp.bfloat16, None),  # rows of two registers
        pytest.param(3, 3, 8, jnp.bfloat16, None, marks=pytest.mark.slow),  # heads apart
        pytest.param(6, 1, 8, jnp.float32, jnp.int8, marks=pytest.mark.slow),
        pytest.param(4, 4, 8, jnp.bfloat16, jnp.int8, marks=pytest.mark.slow),
        pytest.param(4, 2, 256, jnp.float32, None, marks=pytest.mark.slow),
        pytest.param(4, 2, 8, jnp.bfloat16, "float8_e5m2", marks=pytest.mark.slow),
    ],
)
def test_heads_in_words(num_heads, groups, d, dtype, cache):
    options = {} if cache is None else {"k_scale": 0.02, "v_scale": 0.03}
    spec, args = ragged(num_heads, groups, d, dtype, cache, **options)
    made, entry = harness.solve(spec, args), entry_of("ragged_page_attention")
    with _pallas.detect_races():
        actual = harness.run_entry(entry, made, (SMALL, None), compiler_options=harness.QUICK)
        assert not _pallas.races_found()
    harness.assert_close_to_oracle(actual, made)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_number_of_float8(dtype):
    codes = jnp.arange(256, dtype=jnp.uint8)
    expected = np.asarray(jax.lax.bitcast_convert_type(codes, jnp.dtype(dtype)), np.float32)
    made = jax.jit(lambda x: heads._float8(x, jnp.dtype(dtype)))(codes.astype(jnp.int32)[None])
    np.testing.assert_array_equal(made[0], expected)


def test_words_are_strided_as_the_interpreter_takes_them(monkeypatch):
    """What a TPU reads and writes with a stride, in JAX's plain interpreter."""
    if jax.__version_info__ < (0, 12):
        pytest.skip("JAX before 0.12 does not interpret buffers in another dtype")
    of = heads.Heads(4, 16, jnp.dtype(jnp.bfloat16))
    x = jax.random.normal(jax.random.key(0), (6, 4, 16)).astype(jnp.bfloat16)

    def kernel(x_ref, out_ref, buffer):
        buffer[0] = x_ref[...]
        out = of.load(buffer, 0, 1, 2, 3)
        of.store(out_ref, 0, [y + i for i, y in enumerate(out)])

    def run():
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((1, *x.shape), x.dtype),
            scratch_shapes=[pltpu.VMEM((1, *x.shape), x.dtype)],
            interpret=True,
        )(x)[0]

    expected = x + jnp.arange(4, dtype=x.dtype)[None, :, None]
    np.testing.assert_array_equal(run(), expected)
    monkeypatch.setattr(_pallas, "interpreted", lambda: False)
    np.testing.assert_array_equal(run(), expected)


# Steps and blocks


@example(block_k=512, size=48, blocks=100)
@example(block_k=512, size=16, blocks=1)
@given(block_k=st.integers(1, 2048), size=st.integers(1, 128), blocks=st.integers(1, 300))
def test_steps_fill_registers(block_k, size, blocks):
    pages = keys.pages_of_step(block_k, size, blocks)
    assert 1 <= pages <= max(blocks, 1)
    step = pages * size
    assert step <= max(block_k, size)
    assert step <= 128 or step % 128 == 0


@pytest.mark.parametrize("length", [130, 200])
def test_rows_that_do_not_fill_registers(length):
    """A step over rows of keys is a multiple of 128 too; the last one ends with the row."""
    k1, k2, k3 = jax.random.split(jax.random.key(2), 3)
    spec = kernel_registry.spec("ragged_decode_attention")
    values = {
        "query": jax.random.normal(k1, (2, 2, 8)),
        "key": jax.random.normal(k2, (2, length, 1, 8)),
        "value": jax.random.normal(k3, (2, length, 1, 8)),
        "sequence_start": jnp.asarray([3, 0]),
        "sequence_end": jnp.asarray([length, 129]),
        "return_lse": True,
    }
    made = harness.solve(spec, spec.canonicalize(spec.complete(values)))
    cfg = page_config.Config(block_k=512)
    entry = entry_of("ragged_decode_attention")
    actual = harness.run_entry(entry, made, (cfg, None), compiler_options=harness.QUICK)
    harness.assert_close_to_oracle(actual, made)


def test_blocks_of_queries():
    """Sequences of 5, 0, 1 and 4 queries in blocks of 4; the third is decoded."""
    counts = jnp.asarray([5, 0, 0, 4])
    starts, context = jnp.asarray([0, 5, 5, 6]), jnp.asarray([9, 3, 2, 2])
    table = np.asarray(prefill.blocks(starts, counts, (context, 3), 4, 5))
    expected = [
        (0, 0, 4, 4, 1, 8),
        (0, 4, 1, 8, 5, 9),
        (3, 6, 4, -2, 0, 2),
    ]
    np.testing.assert_array_equal(table[:3], expected)
    assert (table[3:, 2] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_no_race(op):
    made = harness.problem(op, "plain", "float32")
    cfg = harness.configs(entry_of(op), made.args, "testing")
    with _pallas.detect_races():
        actual = harness.run_entry(entry_of(op), made, cfg, compiler_options=harness.QUICK)
        assert not _pallas.races_found()
    harness.assert_close_to_oracle(actual, made)


# Refusals


def shapes(op, d=128, size=16, groups=2, cache=jnp.bfloat16, dtype=jnp.bfloat16, blocks=8):
    """A call of 4 sequences, by shapes."""
    spec, ids, n = kernel_registry.spec(op), jnp.int32, 4
    lengths = {"context_lens": ((n,), ids), "block_tables": ((n, blocks), ids)}
    pages = n * blocks
    found = {
        "page_attention": {
            "query": ((n, 4 * groups, d), dtype),
            "key_cache": ((pages, groups, size, d), cache),
            "value_cache": ((pages, groups, size, d), cache),
            **lengths,
        },
        "ragged_page_attention": {
            "queries": ((64, 4 * groups, d), dtype),
            "kv_pages": ((pages, size, 2 * groups, d), cache),
            "query_start_loc": ((n + 1,), ids),
            "num_seqs": ((1,), ids),
            **lengths,
        },
        "ragged_decode_attention": {
            "query": ((n, 4 * groups, d), dtype),
            "key": ((n, blocks * size, groups, d), cache),
            "value": ((n, blocks * size, groups, d), cache),
            "sequence_start": ((n,), ids),
            "sequence_end": ((n,), ids),
        },
    }[op]
    return spec, {name: jax.ShapeDtypeStruct(*x) for name, x in found.items()}


def reason(op, target=V5E, **sizes):
    spec, inputs = shapes(op, **sizes)
    found = []

    def trace(values):
        args = spec.canonicalize(spec.complete(values))
        found.append(entry_of(op).why_not(args, target))
        return 0

    jax.eval_shape(trace, inputs)
    return found[0]


@pytest.mark.parametrize("op", OPS)
def test_refusals(op):
    assert reason(op) is None
    assert "float16" in reason(op, dtype=jnp.float16, cache=jnp.float16)
    assert "256" in reason(op, d=384)
    assert "multiples of 128" in reason(op, d=64)
    assert reason(op, target=None, d=64) is None  # interpreted
    assert "float8_e4m3fnuz" in reason(op, cache=jnp.float8_e4m3fnuz)


@pytest.mark.parametrize("op", OPS[:2])
def test_refusals_of_pages(op):
    assert "multiple of 128; got 200" in reason(op, size=200)
    assert "scalar memory" in reason(op, blocks=1 << 16)
    assert "multiple of 8" in reason(op, size=12, groups=3)


def test_refusals_of_rows():
    assert "multiple of 32" in reason("ragged_decode_attention", groups=3, blocks=1)


def test_configs_check_themselves():
    for bad in ({"block_q": 12}, {"block_k": 0}, {"decode_block_k": 1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            config.Config(**({"block_q": 8, "block_k": 8, "decode_block_k": 8} | bad))
    with pytest.raises(ValueError, match="block_k"):
        page_config.Config(block_k=True)


# What libtpu makes of the kernels

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install libtpu"
)
SIZES = {
    "plain": {},
    "one head": {"groups": 1},
    "heads apart": {"groups": 3},
    "wide": {"d": 256},
    "large pages": {"size": 128},
    "int8": {"cache": jnp.int8, "size": 32},
    "int8, one head": {"cache": jnp.int8, "size": 32, "groups": 1},
    "float8": {"cache": jnp.float8_e4m3fn, "size": 32},
    "float32": {"dtype": jnp.float32, "cache": jnp.float32},
}


@functools.cache
def compiler_for(chip):
    made = _tpu.Compiler(_targets.parse(f"tpu:{chip}"), "x")
    made.expect([])
    return made


def compile_for(chip, op, options=None, **sizes):
    """Bytes of the cache, and those that the program needs beside its arguments."""
    spec, inputs = shapes(op, blocks=64, **sizes)
    entry = entry_of(op)
    target = Target(kind="tpu", model=_targets.CHIPS[chip].model)

    def run(values):
        args = spec.canonicalize(spec.complete(values | (options or {})))
        assert entry.why_not(args, target) is None
        return entry.fn(args, entry.heuristic(args, "forward", target))

    made = compiler_for(chip).compile(run, (inputs,), {})
    cache = max(inputs.values(), key=lambda x: x.size)
    return cache.size * cache.dtype.itemsize, made["temp_bytes"]


@needs_libtpu
@pytest.mark.usefixtures("without_jax_cache")
def test_libtpu_compiles_without_a_copy_of_the_cache():
    options = {"return_lse": True, "sliding_window": 100, "softmax_aux": jnp.ones((1, 2))}
    cache, temporary = compile_for("v5e", "ragged_page_attention", options, groups=1)
    assert temporary < cache // 2


@needs_libtpu
@pytest.mark.usefixtures("without_jax_cache")
@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("chip", ["v5e", "v4", "v5p", "v6e", "7x"])
def test_libtpu_compiles_every_layout(chip, op, sizes):
    options = {"return_lse": True, "alibi_slopes": jnp.ones(4 * SIZES[sizes].get("groups", 2))}
    cache, temporary = compile_for(chip, op, options, **SIZES[sizes])
    assert temporary < cache
