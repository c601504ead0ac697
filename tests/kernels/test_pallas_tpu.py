"""Attention on TPUs, as the interpreter sees it: memory, races, blocks and what is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel._device import Target
from ejkernel.callib import _pallas
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._pallas.tpu._blocks import philox, ranges, tiles
from ejkernel.kernels._pallas.tpu.flash_attention import config
from ejkernel.kernels._reference import philox as reference_philox
from tests.kernels import harness

OP = "flash_attention"
SPEC = kernel_registry.spec(OP)
ENTRY = harness.find_entry(OP, "pallas/tpu")
V5E, V6E = Target(kind="tpu", model="TPU v5 lite"), Target(kind="tpu", model="TPU v6 lite")


def arrays(batch, t, s, heads, groups, d, e):
    keys = jax.random.split(jax.random.key(1), 3)
    return {
        "query": jax.random.normal(keys[0], (batch, t, heads, d)),
        "key": jax.random.normal(keys[1], (batch, s, groups, d)),
        "value": jax.random.normal(keys[2], (batch, s, groups, e)),
    }


def make(values):
    return SPEC.canonicalize(SPEC.unpack(SPEC.complete(values)))


def assert_matches(values, cfg):
    made = harness.solve(SPEC, make(values))
    actual = harness.run_entry(ENTRY, made, (cfg, cfg), compiler_options=harness.QUICK)
    harness.assert_close_to_oracle(actual, made)


@pytest.mark.parametrize("length", [31, 32, 33])
def test_lengths_around_a_block(length):
    """Parts of a held block, and blocks that are fetched together or apart."""
    values = arrays(1, length, length + 16, 1, 1, 8, 8) | {"causal": True, "return_lse": True}
    assert_matches(values, config.Config(block_q=16, block_k=16, parts=2, stream=2))


def test_a_window_far_from_the_first_fetch():
    values = arrays(1, 16, 80, 1, 1, 8, 8) | {"sliding_window": (5, 0)}
    assert_matches(values, config.Config(block_q=16, block_k=16, stream=1))


def test_head_sizes_beyond_a_register():
    assert_matches(arrays(1, 9, 10, 2, 1, 136, 160), config.Config(block_q=16, block_k=16))


@pytest.mark.parametrize("case", ["causal", "segments_window_bias"])
def test_no_race(case):
    made = harness.problem(OP, case, "float32")
    cfg = harness.configs(ENTRY, made.args, "testing")[0]
    with _pallas.detect_races():
        outputs, _ = jax.jit(lambda args: ENTRY.fn(args, cfg))(made.args)
        jax.block_until_ready(outputs)
    assert not _pallas.races_found()
    np.testing.assert_allclose(outputs[0], made.oracle.outputs["out"], rtol=2e-5, atol=2e-6)


def copy_kernel(table, x, out):
    out[...] = x[...]


def call_with(kernel, scratch=()):
    block = pl.BlockSpec((8, 128), lambda i, table: (i, 0))
    call = _pallas.tpu_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(2,),
            in_specs=[block],
            out_specs=[block],
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct((16, 128), jnp.float32)],
        name="sample_kernel",
        sequential=1,
    )
    return call(jnp.zeros(1, jnp.int32), jnp.arange(2048.0).reshape(16, 128))[0]


def test_the_interpreter_runs_kernels():
    np.testing.assert_array_equal(call_with(copy_kernel).ravel(), np.arange(2048))


def test_memory_that_nobody_wrote_is_nan():
    def kernel(table, x, out, scratch):
        out[...] = x[...] + scratch[...]

    assert np.isnan(call_with(kernel, [pltpu.VMEM((8, 128), jnp.float32)])).all()


def test_reads_out_of_bounds_raise():
    def kernel(table, x, out):
        out[...] = x[pl.ds(table[0] + 4, 8)]

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)out.of.bounds"):
        np.asarray(call_with(kernel))


def test_kernels_are_compiled_where_a_tpu_is_meant():
    assert _pallas.interpreted()
    with _pallas.compile_for_tpu():
        assert not _pallas.interpreted()


def test_float16_is_refused():
    args = make({n: x.astype(jnp.float16) for n, x in arrays(1, 8, 8, 1, 1, 8, 8).items()})
    assert "bfloat16 or float32" in ENTRY.why_not(args)


def test_bfloat16():
    values = {n: x.astype(jnp.bfloat16) for n, x in arrays(1, 40, 40, 2, 1, 16, 16).items()}
    assert_matches(values | {"causal": True}, config.Config(block_q=32, block_k=32))


# Configs


@pytest.mark.parametrize("target", [V5E, V6E, Target(kind="tpu", model="TPU v4")])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("length", [1, 130, 5000])
def test_guesses_are_whole_registers_and_fit(length, direction, target):
    shapes = {"query": (1, length, 8, 128), "key": (1, length, 2, 128), "value": (1, length, 2, 64)}
    args = make({n: jnp.zeros(s, jnp.bfloat16) for n, s in shapes.items()} | {"causal": True})
    found = config.candidates(args, direction, target)
    assert found[0] == config.heuristic(args, direction, target)
    for cfg in found:
        assert cfg.block_q % 128 == cfg.block_k % 128 == 0
        assert cfg.block_q < length + 128
        assert cfg.block_k < length + 128


@pytest.mark.parametrize("bad", [{"block_q": 12}, {"block_k": 0}, {"parts": 3}, {"stream": 0}])
def test_configs_check_themselves(bad):
    with pytest.raises(ValueError, match=r"`Config`"):
        config.Config(**{"block_q": 16, "block_k": 16} | bad)


# Blocks


@pytest.mark.parametrize("window", [(None, None), (None, 0), (7, 0), (0, 5), (40, None)])
@pytest.mark.parametrize(("t", "s"), [(40, 40), (19, 50), (45, 33)])
def test_tables_cover_what_is_seen(t, s, window):
    """Constant and computed tables agree on what they promise."""
    block_q, block_k = 16, 8
    left, right = window
    queries, keys = ranges.Side(t, s - t, (), None), ranges.Side(s, 0, (), None)
    index = jnp.arange(t)[None] + s - t, jnp.arange(s)[None]
    given = ranges.Side(t, 0, (), index[0]), ranges.Side(s, 0, (), index[1])
    gap = np.arange(s)[None] - (np.arange(t) + s - t)[:, None]
    seen = np.ones_like(gap, bool)
    seen &= True if left is None else gap >= -left
    seen &= True if right is None else gap <= right
    for held, streamed in ((queries, keys), given):
        table = np.asarray(ranges.table(held, streamed, window, (block_q, block_k), True))[0]
        for i, (first, full, ragged, last) in enumerate(table):
            assert first <= full <= ragged <= last
            rows = seen[i * block_q : (i + 1) * block_q]
            assert not rows[:, : first * block_k].any()
            assert not rows[:, last * block_k :].any()
            assert rows[:, full * block_k : ragged * block_k].all()
            assert ragged * block_k <= s or full == ragged


def test_random_bits_are_those_of_the_reference():
    query, key = np.mgrid[3:11, 5:21].astype(np.int32)
    words = reference_philox.words([7, 9], key >> 2, query, 2, 1)
    expected = np.choose(key & 3, words) >= np.uint64(int(0.3 * 2.0**32))
    seed = (jnp.int32(7), jnp.int32(9))
    batch, head = jnp.int32(1), jnp.int32(2)
    kept = philox.keep(seed, batch, head, jnp.asarray(query), jnp.asarray(key), int(0.3 * 2**32))
    np.testing.assert_array_equal(kept, expected)


def test_columns_and_rows():
    row = jnp.arange(24.0)[None]
    column = tiles.to_column(row)
    np.testing.assert_array_equal(tiles.to_row(column), row)
    np.testing.assert_array_equal(tiles.wide(column, 200), np.repeat(row.T, 200, axis=1))
    x = jax.random.normal(jax.random.key(0), (8, 384))
    np.testing.assert_allclose(tiles.partial_sums(x).sum(1), x.sum(1), rtol=1e-5, atol=1e-5)
