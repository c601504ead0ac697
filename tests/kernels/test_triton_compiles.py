"""Triton kernels compile for GPUs that are not here, within the shared memory of each."""

import importlib
import pathlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import _settings, modules
from ejkernel._device import Target
from ejkernel.callib import _triton_call, _triton_compile
from ejkernel.callib._triton_compile import GpuTarget
from ejkernel.kernels import kernel_registry

pytest.importorskip("triton")
from ejkernel.kernels import _triton
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.flash_attention import bwd, config, fwd

SPEC = kernel_registry.spec("flash_attention")
CACHE = pathlib.Path(__file__).parents[2] / ".cache"
TARGETS = {
    "cuda:sm_80": Target(kind="gpu", model="A100", capability="8.0"),
    "cuda:sm_90": Target(kind="gpu", model="H200", capability="9.0"),
    "cuda:sm_100": Target(kind="gpu", model="B200", capability="10.0"),
    "hip:gfx942": Target(kind="gpu", model="MI300", capability="gfx942"),
}
BATCH, LENGTH, HEADS, GROUPS = 2, 1024, 4, 2
CAUSAL = {"causal": True}
CAPPED = {"causal": True, "logits_soft_cap": 30.0}
EVERYTHING = {
    "causal": True,
    "sliding_window": (256, 0),
    "logits_soft_cap": 30.0,
    "dropout_prob": 0.1,
    "dropout_seed": np.uint32([1, 2]),
    "q_segment_ids": np.zeros((BATCH, LENGTH), np.int32),
    "kv_segment_ids": np.zeros((BATCH, LENGTH), np.int32),
    "attention_mask": np.ones((BATCH, 1, LENGTH, LENGTH), bool),
    "bias": np.zeros((1, HEADS, LENGTH, LENGTH), np.float32),
    "softmax_aux": np.zeros((HEADS, 2), np.float32),
    "alibi_slopes": np.zeros(HEADS, np.float32),
    "return_lse": True,
}


@pytest.fixture(autouse=True)
def _kept():
    with _settings.override(cache_dir=str(CACHE)):
        yield


def arguments(arrays, options):
    return SPEC.canonicalize(SPEC.complete({**arrays, **options}))


def shapes(d, dtype, e=None):
    sizes = {"query": (HEADS, d), "key": (GROUPS, d), "value": (GROUPS, e or d)}
    return {
        name: jax.ShapeDtypeStruct((BATCH, LENGTH, *size), jnp.dtype(dtype))
        for name, size in sizes.items()
    }


def run_backward(args, cfg):
    like = lambda shape, dtype: jnp.zeros(shape, dtype)
    out = like((*args.query.shape[:3], args.value.shape[-1]), args.query.dtype)
    lse = like((args.query.shape[0], HEADS, args.query.shape[1]), jnp.float32)
    outputs = (out, lse) if args.return_lse else (out,)
    wanted = frozenset(n for n in SPEC.differentiable if getattr(args, n) is not None)
    return bwd.backward(args, cfg, outputs, (lse,), outputs, wanted)


def launches(direction, cfg, arrays, options):
    """(launch, avals) of the kernels of one direction."""
    run = fwd.forward if direction == "forward" else run_backward
    jaxpr = jax.make_jaxpr(lambda arrays: run(arguments(arrays, options), cfg))(arrays)
    return [
        (eqn.params["launch"], [v.aval for v in eqn.invars])
        for eqn in _triton_call.launches(jaxpr.jaxpr)
    ]


def configs(pick, direction, arrays, options, target):
    """`candidates` or `heuristic` of a call."""
    found = []

    def trace(arrays):
        found.append(pick(arguments(arrays, options), direction, target))

    jax.eval_shape(trace, arrays)
    return found[0]


def assert_compiles(direction, cfg, arrays, options, name):
    made = launches(direction, cfg, arrays, options)
    tables = [x for x in made if x[0].kernel.__name__ == "block_table_kernel"]
    # forward: with a fixed reference, and the careful one after it or alone; backward: dk, dv; dq
    passes = 1 if direction == "forward" and options is EVERYTHING else 2
    assert len(made) - len(tables) == passes
    limit = _launch.shared_limit(TARGETS[name])
    for launch, avals in made:
        compiled = _triton_call.compile_launch(launch, avals, GpuTarget.parse(name))
        assert compiled.name == launch.kernel.__name__
        assert compiled.shared_bytes <= limit, (compiled.name, cfg)


def check_heuristic(direction, d, options, name="cuda:sm_90", dtype="bfloat16", e=None):
    arrays = shapes(d, dtype, e)
    cfg = configs(config.heuristic, direction, arrays, options, TARGETS[name])
    assert_compiles(direction, cfg, arrays, options, name)


def test_kernels_and_helpers_have_few_parameters():
    found = pkgutil.walk_packages(_triton.__path__, f"{_triton.__name__}.")
    modules = [importlib.import_module(module.name) for module in found]
    functions = [(m, x) for m in modules for x in vars(m).values() if hasattr(x, "arg_names")]
    assert len(functions) > 60
    for module, function in functions:
        most = 24 if function.__name__.endswith("_kernel") else 14
        assert len(function.arg_names) <= most, (module.__name__, function.__name__)


def test_a_causal_value_and_gradient_launches_four_kernels():
    arrays = shapes(64, "bfloat16")

    def loss(arrays):
        out = modules.flash_attention(**arrays, causal=True, platform="triton")
        return out.astype(jnp.float32).sum()

    with _settings.override(interpret=True):  # each launch is a callback to the interpreter
        text = jax.jit(jax.value_and_grad(loss)).lower(arrays).as_text()
    callbacks = [line for line in text.splitlines() if "custom_call" in line and "callback" in line]
    assert len(callbacks) == 4  # forward, careful forward, dk and dv, dq


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_causal_call_compiles(direction):
    check_heuristic(direction, 128, CAUSAL)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_heads_in_two_parts_compile(direction):
    check_heuristic(direction, 192, CAUSAL, e=128)


def test_a_plain_call_compiles():
    check_heuristic("forward", 64, {})


def test_a_soft_cap_compiles():
    check_heuristic("forward", 128, CAPPED)


@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_calls_of_other_rows_and_lengths_share_a_kernel(direction, tmp_path):
    """So that a candidate's small twin, which is compared with the oracle, costs no compilation."""
    cfg = config.Config(block_q=64, block_k=64)
    compiled = [_triton_compile.counts["compiled"]]
    with _settings.override(cache_dir=str(tmp_path)):
        for batch, length in ((2, 1024), (1, 8192)):
            arrays = {
                n: jax.ShapeDtypeStruct((batch, length, *x.shape[2:]), x.dtype)
                for n, x in shapes(64, "bfloat16").items()
            }
            for launch, avals in launches(direction, cfg, arrays, CAUSAL):
                _triton_call.compile_launch(launch, avals, GpuTarget.parse("cuda:sm_90"))
            compiled.append(_triton_compile.counts["compiled"])
    assert compiled[0] < compiled[1] == compiled[2]


@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_every_option_at_once_compiles(direction):
    check_heuristic(direction, 64, EVERYTHING)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("options", [{}, CAUSAL, EVERYTHING], ids=["plain", "causal", "everything"])
@pytest.mark.parametrize("name", TARGETS)
def test_the_first_guess_compiles_everywhere(name, options, direction):
    check_heuristic(direction, 64, options, name)
    check_heuristic(direction, 128, options, name)
    check_heuristic(direction, 192, options, name, e=128)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("d", "e", "dtype"),
    [
        (64, 64, "bfloat16"),
        (96, 96, "bfloat16"),
        (128, 128, "bfloat16"),
        (192, 128, "bfloat16"),
        (192, 192, "bfloat16"),
        (256, 256, "bfloat16"),
        (128, 128, "float32"),
        (192, 128, "float32"),
    ],
)
@pytest.mark.parametrize("name", TARGETS)
def test_every_candidate_compiles_and_fits(name, d, e, dtype, direction):
    arrays = shapes(d, dtype, e)
    for cfg in configs(config.candidates, direction, arrays, CAUSAL, TARGETS[name]):
        assert_compiles(direction, cfg, arrays, CAUSAL, name)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", TARGETS)
def test_every_candidate_compiles_and_fits_with_a_soft_cap(name, d):
    arrays = shapes(d, "bfloat16")
    for cfg in configs(config.candidates, "forward", arrays, CAPPED, TARGETS[name]):
        assert_compiles("forward", cfg, arrays, CAPPED, name)
