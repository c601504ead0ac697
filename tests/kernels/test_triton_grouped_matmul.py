"""The grouped product in Triton beyond the generated tests: sizes, work, configs, machine code."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import interpreter

from ejkernel import _settings
from ejkernel._device import Target
from ejkernel.callib import _triton_call
from ejkernel.callib._triton_compile import GpuTarget
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._blocks import groups
from ejkernel.kernels._triton.grouped_matmul import bwd, config, fwd, kernels
from tests.backend import BACKEND
from tests.kernels import harness

SPEC = kernel_registry.spec("grouped_matmul")
H200 = Target(kind="gpu", model="NVIDIA H200", capability="9.0")
TARGETS = {
    "cuda:sm_80": Target(kind="gpu", model="A100", capability="8.0"),
    "cuda:sm_90": H200,
    "cuda:sm_100": Target(kind="gpu", model="B200", capability="10.0"),
    "hip:gfx942": Target(kind="gpu", model="MI300", capability="gfx942"),
}
interpreted = pytest.mark.skipif(BACKEND != "cpu", reason="runs in the interpreter, on a CPU")


def call(m=48, k=16, n=24, sizes=(20, 0, 9, 14), matrices=None, dtype=jnp.float32, **more):
    keys = jax.random.split(jax.random.key(0), 2)
    values = {
        "lhs": jax.random.normal(keys[0], (m, k)).astype(dtype),
        "rhs": jax.random.normal(keys[1], (matrices or len(sizes), k, n)).astype(dtype),
        "group_sizes": np.asarray(sizes, np.int32),
    }
    return SPEC.canonicalize(SPEC.complete(values | more))


def abstract(m, k, n, g, dtype, **more):
    """Arguments of a large call, without their memory."""
    found = []

    def trace(lhs, rhs, sizes):
        values = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, **more}
        found.append(SPEC.canonicalize(SPEC.complete(values)))

    shape = lambda *s, dtype=dtype: jax.ShapeDtypeStruct(s, dtype)
    jax.eval_shape(trace, shape(m, k), shape(g, k, n), shape(g, dtype=jnp.int32))
    return found[0]


def tile(**more):
    sizes = {"block_m": 16, "block_n": 16, "block_k": 16, "num_stages": 1, "num_programs": 2}
    return config.Config(**sizes | more)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_m": 24}, ["block_m=24", "power of two"]),
        ({"block_k": 8}, ["block_k=8", "at least 16"]),
        ({"band": 0}, ["band=0", "positive"]),
        ({"num_programs": 1.5}, ["num_programs=1.5", "positive"]),
        ({"num_warps": 3}, ["num_warps=3"]),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        tile(**settings)


@pytest.mark.parametrize(
    ("sizes", "dtype", "block_m"),
    [
        ((32768, 4096, 4096, 8), "bfloat16", 128),
        ((64, 4096, 4096, 8), "bfloat16", 16),  # 8 rows a group: the matrices decide
        ((512, 4096, 4096, 8), "bfloat16", 64),
        ((32768, 4096, 4096, 8), "float32", 64),
    ],
)
def test_tiles_follow_the_rows_of_a_group(sizes, dtype, block_m):
    args = abstract(*sizes, dtype)
    for target in TARGETS.values():
        for direction in ("forward", "backward"):
            cfg = config.heuristic(args, direction, target)
            assert cfg.block_m == block_m
            assert config.misfit(args, direction, cfg, target) is None
            needed = config.shared_bytes(args, direction, cfg, target)
            assert needed <= _launch.shared_limit(target)


def test_what_does_not_fit_is_refused():
    args = abstract(32768, 4096, 4096, 8, "bfloat16")
    large = config.Config(block_m=256, block_n=256, block_k=128, num_warps=8, num_stages=3)
    assert "shared memory" in config.misfit(args, "forward", large, H200)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"m": 0, "sizes": (0,)}, "at least one row"),
        ({"preferred_element_type": "float8_e4m3fn"}, "`out` is float8_e4m3fn"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(more, words):
    assert words in harness.find_entry("grouped_matmul", "triton/gpu").why_not(call(**more), H200)


def test_kernels_and_helpers_have_few_parameters():
    functions = [x for m in (kernels, groups) for x in vars(m).values() if hasattr(x, "arg_names")]
    assert len(functions) > 8
    for function in functions:
        most = 24 if function.__name__.endswith("_kernel") else 14
        assert len(function.arg_names) <= most, function.__name__


def expected(args, first=0):
    """Rows times their matrices, in NumPy."""
    lhs, rhs = np.asarray(args.lhs, np.float64), np.asarray(args.rhs, np.float64)
    ends = np.minimum(np.cumsum(np.maximum(np.asarray(args.group_sizes), 0)), len(lhs))
    group = np.searchsorted(ends, np.arange(len(lhs)), side="right") - first
    here = (group >= 0) & (group < len(rhs)) & (np.arange(len(lhs)) < ends[-1])
    return np.stack(
        [x @ rhs[g] if ok else 0 * rhs[0, 0] for x, g, ok in zip(lhs, group, here, strict=True)]
    )


@interpreted
@pytest.mark.parametrize(
    ("more", "first"),
    [
        ({"m": 10, "sizes": (4, -3, 100, 5)}, 0),  # cut at the rows that there are
        ({"m": 40, "sizes": (3, 18, 0, 5, 9), "matrices": 2, "group_offset": 1}, 1),
        ({"m": 40, "sizes": (20, 0, 0, 9), "matrices": 2, "group_offset": 1}, 1),  # none is here
        ({"m": 40, "sizes": (0, 0, 0, 33), "matrices": 1, "group_offset": 3}, 3),
    ],
)
def test_every_row_is_written_once(more, first):
    args = call(**more)
    with _settings.override(interpret=True):
        ((out,), _) = fwd.forward(args, tile())
    np.testing.assert_allclose(out, expected(args, first), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("transposed", [False, True])
def test_descriptors_load_the_same_tiles(transposed):
    args = call(m=40, k=32, n=32, sizes=(3, 18, 0, 5), transpose_rhs=transposed, dtype=jnp.bfloat16)
    dout = (jax.random.normal(jax.random.key(1), (40, 32)).astype(jnp.bfloat16),)
    wanted, made = frozenset({"lhs", "rhs"}), []
    for described in (False, True):
        cfg = tile(descriptors=described, num_programs=3)
        with _settings.override(interpret=True):
            made.append((fwd.forward(args, cfg)[0], bwd.backward(args, cfg, (), (), dout, wanted)))
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        np.testing.assert_array_equal(a, b)


def test_descriptors_are_refused_where_they_would_read_another_matrix():
    args, cfg = call(k=24, n=32), tile(descriptors=True)
    with pytest.raises(ValueError, match="`grouped_matmul`: descriptors need k=24 and n=32"):
        fwd.forward(args, cfg)
    assert "9.0 or more" in config.misfit(args, "forward", cfg, TARGETS["hip:gfx942"])
    found = config.candidates(args, "forward", H200)
    assert not any(c.descriptors for c in found)


@interpreted
def test_rows_of_a_batch_share_matrices_that_have_none():
    args = call(m=20, n=16, sizes=(7, 9))
    more = jnp.stack([args.lhs, -2.0 * args.lhs])

    def run(lhs):
        return fwd.forward(args.with_arrays({"lhs": lhs}), tile())[0][0]

    with _settings.override(interpret=True):
        out = jax.vmap(run)(more)
    np.testing.assert_allclose(out[0], expected(args), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out[1], -2.0 * np.asarray(out[0]), rtol=1e-6)


@interpreted
def test_only_tiles_of_a_group_are_multiplied(monkeypatch):
    count, dot = [], interpreter.InterpreterBuilder.create_dot

    def counted(*args):
        count.append(1)
        return dot(*args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", counted)
    args = call(m=64, k=32, n=16, sizes=(20, 0, 9, 14))
    with _settings.override(interpret=True):
        jax.block_until_ready(fwd.forward(args, tile()))
    assert len(count) == 2 * (2 + 0 + 1 + 1)  # two steps of k for each tile of rows
    count.clear()
    dout = (jnp.ones((64, 16)),)
    with _settings.override(interpret=True):
        jax.block_until_ready(bwd.backward(args, tile(), (), (), dout, frozenset({"rhs"})))
    assert len(count) == 2 * (2 + 0 + 1 + 1)  # steps of 16 rows for each of two tiles of k


def launches(direction, cfg, m=32768, k=4096, n=4096, g=8, dtype="bfloat16", **more):
    def run(lhs, rhs, sizes):
        values = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, **more}
        args = SPEC.canonicalize(SPEC.complete(values))
        if direction == "forward":
            return fwd.forward(args, cfg)
        dout = (jnp.zeros((m, n), more.get("preferred_element_type", dtype)),)
        return bwd.backward(args, cfg, (), (), dout, frozenset({"lhs", "rhs"}))

    shape = lambda *s, dtype=dtype: jax.ShapeDtypeStruct(s, dtype)
    jaxpr = jax.make_jaxpr(run)(shape(m, k), shape(g, k, n), shape(g, dtype=jnp.int32))
    return [
        (eqn.params["launch"], [v.aval for v in eqn.invars])
        for eqn in _triton_call.launches(jaxpr.jaxpr)
    ]


@pytest.mark.parametrize(
    ("direction", "described", "k"),
    [
        ("forward", False, 4096),
        ("backward", False, 4096),
        ("forward", True, 4096),
        pytest.param("backward", True, 4096, marks=pytest.mark.slow),
        # rows of 16 bytes, in no whole number of tiles
        ("forward", False, 1000),
        pytest.param("backward", False, 1000, marks=pytest.mark.slow),
    ],
)
def test_hopper_multiplies_on_its_widest_units(direction, described, k):
    args = abstract(32768, k, 4096, 8, "bfloat16")
    guess = config.heuristic(args, direction, H200)
    made = launches(direction, dataclasses.replace(guess, descriptors=described), k=k)
    assert len(made) == (1 if direction == "forward" else 2)  # nothing else is launched
    for launch, avals in made:
        compiled = _triton_call.compile_launch(launch, avals, GpuTarget.parse("cuda:sm_90"))
        text = compiled.asm["ptx"]
        assert "wgmma.mma_async.sync.aligned.m64n256k16" in text
        # loads of 16 bytes into shared memory
        assert set(re.findall(r"cp\.async\.c[ag]\.[\w.:]* .*?, (0x\w+|\d+)", text)) <= {
            "0x10",
            "16",
        }
        assert ".local" not in text  # nothing is spilled by Triton itself


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("rows", "dtype", "k"),
    [
        (32768, "bfloat16", 200),
        (512, "bfloat16", 4096),
        (64, "float16", 4096),
        (512, "float32", 96),
    ],
)
@pytest.mark.parametrize("name", TARGETS)
def test_every_candidate_compiles_and_fits(name, rows, dtype, k, direction):
    sizes = {"m": rows, "k": k, "n": 1024, "g": 8}
    args = abstract(**sizes, dtype=dtype)
    limit = _launch.shared_limit(TARGETS[name])
    for cfg in config.candidates(args, direction, TARGETS[name]):
        for launch, avals in launches(direction, cfg, **sizes, dtype=dtype):
            compiled = _triton_call.compile_launch(launch, avals, GpuTarget.parse(name))
            assert compiled.shared_bytes <= limit, (compiled.name, cfg)
