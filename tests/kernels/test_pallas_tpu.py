"""Attention on TPUs, as the interpreter sees it: memory, races and mistakes.

The kernels issue no copies of their own: all of them follow from block specs, so that there is no
wait that could be missing.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel._device import Target
from ejkernel.callib import _pallas
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._pallas.tpu._blocks import logits
from ejkernel.kernels._pallas.tpu.flash_attention import call, config
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


@pytest.mark.parametrize("length", [31, pytest.param(33, marks=pytest.mark.slow)])
def test_lengths_around_a_block(length):
    """Parts of a held block, and blocks that are fetched together or apart."""
    values = arrays(1, length, length + 16, 1, 1, 8, 8) | {"causal": True, "return_lse": True}
    assert_matches(values, config.Config(block_q=16, block_k=16, parts=2, stream=2))


def test_a_window_far_from_the_first_fetch():
    values = arrays(1, 32, 80, 1, 1, 8, 8) | {"sliding_window": (5, 0)}
    assert_matches(values, config.Config(block_q=16, block_k=16, stream=1))


def test_bias_gets_a_gradient_where_nothing_is_seen():
    """Blocks that a window hides are left out of the grid, but not of the gradient."""
    values = arrays(1, 16, 48, 1, 1, 8, 8) | {"sliding_window": (5, 0)}
    values |= {"bias": jax.random.normal(jax.random.key(2), (1, 1, 16, 48))}
    assert_matches(values, config.Config(block_q=16, block_k=16, stream=1))


def test_a_bias_shared_over_queries_sums_the_parts_of_a_block():
    values = arrays(1, 40, 24, 2, 1, 8, 8)
    values |= {"bias": jax.random.normal(jax.random.key(2), (1, 2, 1, 24))}
    assert_matches(values, config.Config(block_q=16, block_k=16, parts=2, stream=1))


def test_a_narrow_window_has_a_short_grid():
    values = arrays(1, 128, 128, 1, 1, 8, 8) | {"sliding_window": (5, 0)}
    cfg = config.Config(block_q=16, block_k=16, stream=1)
    for holds_keys, grid in ((False, (1, 1, 8, 2)), (True, (1, 1, 8, 1, 2))):
        assert call.Call(make(values), cfg, holds_keys).grid == grid


def test_head_sizes_beyond_a_register():
    assert_matches(arrays(1, 9, 10, 2, 1, 136, 160), config.Config(block_q=16, block_k=16))


@pytest.mark.parametrize(
    ("length", "options"),
    [
        ((1000, 1000), {"causal": True}),
        pytest.param((530, 700), {"sliding_window": (200, 3)}, marks=pytest.mark.slow),
        ((600, 560), {"causal": True, "logits_soft_cap": 3.0}),  # rows that see nothing
    ],
)
def test_parts_of_blocks_on_an_edge(length, options):
    """Blocks as large as those of a device, cut where a mask hides all of a register."""
    values = arrays(1, *length, 1, 1, 8, 8) | options
    cfg = config.Config(block_q=512, block_k=512)
    assert call.Call(make(values), cfg, holds_keys=False).bands
    assert_matches(values, cfg)


ONE_PASS = {
    # several visits to each of several blocks of keys, and groups of heads
    "groups": ((2, 40, 56, 4, 2, 8, 16), {"causal": True}, {"stream": 1}),
    "parts": ((1, 31, 47, 1, 1, 8, 8), {"causal": True}, {"parts": 2, "stream": 2}),
    "window": ((1, 32, 80, 2, 1, 8, 8), {"sliding_window": (5, 0)}, {"stream": 1}),
    # parts that a mask cuts begin inside a block of queries
    "edges": ((1, 600, 560, 1, 1, 8, 8), {"causal": True}, {"block_q": 512, "block_k": 512}),
}


@pytest.mark.parametrize("name", ONE_PASS)
def test_dq_in_the_pass_over_keys(name):
    sizes, options, settings = ONE_PASS[name]
    settings = {"block_q": 16, "block_k": 16} | settings
    assert_matches(arrays(*sizes) | options, config.Config(**settings, one_pass=True))


def test_parts_overlap_in_the_order_of_their_stages():
    values = arrays(1, 31, 47, 1, 1, 8, 8) | {"causal": True, "return_lse": True}
    assert_matches(values, config.Config(block_q=16, block_k=16, parts=2, overlap=True))


def kernels_of(wanted, one_pass=True, **options):
    args = make(arrays(1, 16, 16, 1, 1, 8, 8) | options)
    cfg = config.Config(block_q=16, block_k=16, one_pass=one_pass)

    def gradients(args):
        outputs, residuals = ENTRY.fn(args, cfg)
        return ENTRY.backward(args, cfg, outputs, residuals, outputs, frozenset(wanted))

    text = str(jax.make_jaxpr(gradients)(args))
    return [name for name in ("dkv", "dq") if f"flash_attention_bwd_{name}_kernel" in text]


def test_one_pass_serves_dq_with_keys_or_values_and_without_bias():
    everything = ("query", "key", "value")
    assert kernels_of(everything) == ["dkv"]
    assert kernels_of(everything, one_pass=False) == ["dkv", "dq"]
    assert kernels_of(("query", "value")) == ["dkv"]
    assert kernels_of(("query",)) == ["dq"]
    assert kernels_of(("key",)) == ["dkv"]
    assert kernels_of((*everything, "bias"), bias=jnp.ones((1, 1, 16, 16))) == ["dkv", "dq"]


@pytest.mark.parametrize("case", ["causal", "segments_window_bias"])
def test_no_race(case):
    made = harness.problem(OP, case, "float32")
    cfg = harness.configs(ENTRY, made.args, "testing")[0]
    with _pallas.detect_races():
        outputs, _ = jax.jit(lambda args: ENTRY.fn(args, cfg))(made.args)
        jax.block_until_ready(outputs)
    assert not _pallas.races_found()
    np.testing.assert_allclose(outputs[0], made.oracle.outputs["out"], rtol=2e-5, atol=2e-6)


# Mistakes


def forward(cfg=None, **options):
    """Of a small call whose keys fill their blocks."""
    args = make(arrays(1, 32, 48, 1, 1, 8, 8) | options)
    cfg = cfg or config.Config(block_q=16, block_k=16, stream=3)
    return np.asarray(jax.jit(lambda args: ENTRY.fn(args, cfg)[0][0])(args))


def test_a_slice_one_row_off_is_caught(monkeypatch):
    assert np.isfinite(forward()).all()
    late = property(lambda self: pl.ds(self.lane + 1, self.shape[1]))
    monkeypatch.setattr(logits.Tile, "lanes", late)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)out.of.bounds"):
        forward()


def test_rows_one_off_are_caught(monkeypatch):
    late = property(lambda self: pl.ds(self.row + 1, self.shape[0]))
    monkeypatch.setattr(logits.Tile, "rows", late)
    with pytest.raises(ValueError, match=r"Out of bound"):  # known while tracing
        forward()


def test_a_block_too_far_is_caught(monkeypatch):
    def key_spec(self, width):
        shape = (None, None, self.fetched, width)
        return self.spec(shape, lambda b, h, g, i, f: (b, g, f + 1, 0))

    monkeypatch.setattr(call.Call, "key_spec", key_spec)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)out.of.bounds"):
        forward()


def test_a_table_one_block_too_long_is_caught(monkeypatch):
    def tiles(self, refs, at, step, visit=call.Call.tiles):
        first, full, ragged, last = at.bounds
        longer = (first, full, ragged + 1, last + 1)
        place = call.Place(at.batch, at.head, at.held, at.first, longer, at.bands)
        visit(self, refs, place, step)

    monkeypatch.setattr(call.Call, "tiles", tiles)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)out.of.bounds"):
        forward()


def interpreters(jaxpr):
    """What runs each kernel of a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn.params["interpret"]
            continue
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from interpreters(inner)


def test_the_generated_tests_use_the_strict_interpreter():
    """As `test_conformance.py` runs them: memory is nan, and reads out of bounds raise."""
    cases = [row[2] for row in harness.matrix("core") if row[:2] == (OP, ENTRY.name)]
    assert len(cases) >= 8
    for case in cases:
        args = SPEC.make(harness.find_case(OP, case), jnp.dtype("float32"), jax.random.key(0))
        cfg = harness.configs(ENTRY, args, "testing")[0]
        made = jax.make_jaxpr(lambda args, cfg=cfg: ENTRY.fn(args, cfg))(args)
        [params] = interpreters(made.jaxpr)
        assert params.uninitialized_memory == "nan"
        assert params.out_of_bounds_reads == "raise"


# The interpreter


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
    values |= {"causal": True, "return_lse": True}
    assert_matches(values, config.Config(block_q=32, block_k=32))


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


@pytest.mark.parametrize(
    ("shape", "model", "one_pass"),
    [
        ((1, 4096, 8, 128), "TPU v6 lite", True),
        ((1, 4096, 1, 128), "TPU v6 lite", True),
        ((1, 4096, 8, 128), "TPU v5", True),
        ((1, 4096, 1, 128), "TPU v5", False),  # one head of keys would leave a core idle
        ((1, 4096, 8, 128), "TPU v4", False),
        ((1, 1 << 18, 8, 128), "TPU v6 lite", False),
    ],
)
def test_one_pass_where_dq_of_a_key_head_fits(shape, model, one_pass):
    values = dict.fromkeys(("query", "key", "value"), jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    args, target = jax.eval_shape(make, values), Target(kind="tpu", model=model)
    cfg = config.heuristic(args, "backward", target)
    assert cfg.one_pass == one_pass
    assert not config.heuristic(args, "forward", target).one_pass
    assert config.misfit(args, "backward", cfg, target) is None
    fits = shape[1] == 4096 and model != "TPU v4"
    one = config.Config(block_q=512, block_k=512, one_pass=True)
    assert (config.misfit(args, "backward", one, target) is None) == fits


@pytest.mark.parametrize("bad", [{"block_q": 12}, {"block_k": 0}, {"parts": 3}, {"stream": 0}])
def test_configs_check_themselves(bad):
    with pytest.raises(ValueError, match=r"`Config`"):
        config.Config(**{"block_q": 16, "block_k": 16} | bad)


# What libtpu makes of the kernels

CHIPS = {  # libtpu's name of the smallest slice, JAX's of a device
    "v4": ("v4:2x2x1", "TPU v4"),
    "v5e": ("v5e:2x2", "TPU v5 lite"),
    "v5p": ("v5p:2x2x1", "TPU v5"),
    "v6e": ("v6e:2x2", "TPU v6 lite"),
    "7x": ("tpu7x:2x2x1", "TPU7x"),
}
OPTIONS = {
    "causal": ((1, 4096, 4096, 8, 2, 128, 128), {"causal": True}, {}),
    "all_static": (
        (1, 256, 300, 4, 2, 64, 128),
        {
            "sliding_window": (100, 9),
            "logits_soft_cap": 5.0,
            "dropout_prob": 0.1,
            "dropout_seed": 3,
            "return_lse": True,
        },
        {"bias": (1, 4, 256, 300), "softmax_aux": (4, 1), "alibi_slopes": (4,)},
    ),
    "all_dynamic": (
        (2, 200, 200, 2, 2, 256, 64),
        {"causal": True},
        {"q_segment_ids": (2, 200), "kv_segment_ids": (2, 200), "attention_mask": (2, 1, 1, 200)},
    ),
    "packed": ((1, 300, 300, 2, 1, 40, 40), {"causal": True}, {"cum_seqlens_q": (4,)}),
    "short": ((1, 1, 700, 2, 1, 128, 128), {"sliding_window": (64, 0)}, {"bias": (1, 1, 1, 700)}),
}
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install libtpu"
)


def compile_for(chip, options, dtype, every=False):
    """Compiles both directions with the first guess or every candidate; how many programs."""
    slice_name, model = CHIPS[chip]
    device = topologies.get_topology_desc(platform="tpu", topology_name=slice_name).devices[0]
    place = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    target = Target(kind="tpu", model=model)
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    shape, statics, more = OPTIONS[options]
    inputs = jax.tree.map(placed, abstract(shape, more, dtype))
    args_of = lambda arrays: make(arrays | statics)
    args = jax.eval_shape(args_of, inputs)
    wanted = frozenset(args.arrays()) & SPEC.differentiable
    guess = lambda way: (ENTRY.candidates if every else one_guess)(args, way, target)
    count = 0
    with _pallas.compile_for_tpu():
        for cfg in guess("forward"):
            run = jax.jit(lambda arrays, cfg=cfg: ENTRY.fn(args_of(arrays), cfg))
            outputs, residuals = jax.tree.map(placed, jax.eval_shape(run, inputs))
            count += run.lower(inputs).compile() is not None
        for cfg in guess("backward"):
            run = jax.jit(
                lambda arrays, *rest, cfg=cfg: ENTRY.backward(args_of(arrays), cfg, *rest, wanted)
            )
            count += run.lower(inputs, outputs, residuals, outputs).compile() is not None
    return count


def one_guess(args, direction, target):
    return (ENTRY.heuristic(args, direction, target),)


def abstract(shape, more, dtype):
    batch, t, s, heads, groups, d, e = shape
    shapes = {"query": (batch, t, heads, d), "key": (batch, s, groups, d)}
    shapes |= {"value": (batch, s, groups, e)} | more
    kinds = {"bias": dtype, "softmax_aux": "float32", "alibi_slopes": "float32"}
    kinds |= dict.fromkeys(("q_segment_ids", "kv_segment_ids", "cum_seqlens_q"), "int32")
    kinds |= {"attention_mask": "bool"}
    return {n: jax.ShapeDtypeStruct(s, kinds.get(n, dtype)) for n, s in shapes.items()}


@needs_libtpu
@pytest.mark.usefixtures("without_jax_cache")
@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("causal", "all_static")),
        "all_dynamic",
    ],
)
def test_libtpu_compiles_the_first_guess(options):
    assert compile_for("v5e", options, "bfloat16") == 2


@needs_libtpu
@pytest.mark.slow
@pytest.mark.usefixtures("without_jax_cache")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chip", CHIPS)
def test_libtpu_compiles_every_candidate(chip, options, dtype):
    assert compile_for(chip, options, dtype, every=True) >= 2
