"""Grouped products for Hopper: on its GPU; elsewhere interpreted, and lowered for an H200."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import _settings
from ejkernel._device import Target
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._pallas.gpu._blocks import probe
from ejkernel.kernels._pallas.gpu.grouped_matmul import config
from ejkernel.kernels._shared import groups
from ejkernel.kernels._specs.grouped_matmul import num_columns, out_dtype
from ejkernel.modules import grouped_matmul
from tests.backend import BACKEND
from tests.kernels import harness

OP = "grouped_matmul"
SPEC = kernel_registry.spec(OP)
ENTRY = harness.find_entry(OP, "pallas/gpu")
H200 = Target("gpu", "NVIDIA H200", "9.0")
SMALL = config.Config(block_m=128, block_n=64, num_stages=2, band=2, num_programs=2)

WHY_NOT = probe.why_not() if BACKEND == "gpu" else probe.why_not_interpreted()
runs_kernels = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
lowered = pytest.mark.skipif(probe.why_not() is not None, reason=str(probe.why_not()))


def interpreted(test):
    """A wrong barrier makes a kernel wait for ever."""
    return runs_kernels(pytest.mark.timeout(150)(test))


pytestmark = pytest.mark.usefixtures("usable_mosaic_interpreter")


def values(m, k, n, sizes, matrices=None, dtype=jnp.bfloat16, **more) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(3), 3)
    normal = lambda key, *shape: jax.random.normal(key, shape, jnp.float32).astype(dtype)
    matrix = (n, k) if more.get("transpose_rhs") else (k, n)
    made = {
        "lhs": normal(keys[0], m, k),
        "rhs": normal(keys[1], matrices or len(sizes), *matrix),
        "group_sizes": np.asarray(sizes, np.int32),
    }
    if more.pop("existing", False):
        wide = jax.random.normal(keys[2], (m, n), jnp.float32)
        more["existing_out"] = wide.astype(more.get("preferred_element_type", dtype))
    return made | more


def batched(batch, groups, m, k, n, **more) -> dict[str, Any]:
    flat = values(batch * groups * m, k, n, (m,) * batch * groups, **more)
    lead = {"lhs": (batch, groups, m, k), "rhs": (batch, groups, *flat["rhs"].shape[1:])}
    return {name: flat[name].reshape(shape) for name, shape in lead.items()} | more


def make(given):
    return SPEC.canonicalize(SPEC.complete(given))


def assert_matches(given, cfg=SMALL):
    made = harness.solve(SPEC, make(given))
    actual = harness.run_entry(ENTRY, made, (cfg, cfg), compiler_options=harness.QUICK)
    harness.assert_close_to_oracle(actual, made)


# Numbers: outputs and the gradients of all operands

CASES = {
    # borders inside tiles of eight rows and of a warpgroup, an empty group, rows left over
    "borders": (values, (203, 64, 128, (3, 130, 0, 61)), {}),
    # the middle groups are here, the others on other devices
    "offset": (
        values,
        (150, 128, 64, (20, 0, 59, 30, 40), 3),
        {"group_offset": 1, "transpose_rhs": True, "existing": True},
    ),
}
MORE = {
    "plain": (values, (256, 64, 64, (128, 128)), {}),
    "one": (values, (1, 64, 64, (1,)), {}),
    "single_rows": (values, (9, 64, 64, (1,) * 9), {}),
    "nothing": (values, (70, 64, 64, (0, 0)), {}),
    "nothing_existing": (values, (70, 64, 64, (0, 0)), {"existing": True}),
    "empty_ends": (values, (140, 64, 64, (0, 0, 77, 0, 50, 0)), {}),
    "long_sums": (values, (90, 320, 192, (33, 40)), {}),
    "transposed": (values, (203, 192, 128, (3, 130, 0, 61)), {"transpose_rhs": True}),
    "offset": (values, (150, 64, 64, (20, 0, 59, 30, 40), 2), {"group_offset": 2}),
    "last": (values, (150, 64, 64, (20, 30, 59), 1), {"group_offset": 2, "existing": True}),
    "wide": (
        values,
        (150, 64, 128, (20, 0, 59, 30)),
        {"preferred_element_type": "float32", "existing": True},
    ),
    "wide_transposed": (
        values,
        (150, 128, 64, (20, 0, 59, 71)),
        {"preferred_element_type": "float32", "transpose_rhs": True},
    ),
    "half": (values, (150, 64, 128, (20, 0, 59, 30)), {"dtype": jnp.float16}),
    "batched": (batched, (2, 3, 37, 64, 128), {}),
    "batched_transposed": (batched, (2, 2, 130, 128, 64), {"transpose_rhs": True}),
}
BLOCKS: dict[str, dict[str, int]] = {
    "one_warpgroup": {"block_m": 64, "block_n": 128, "warpgroups": 1, "num_programs": 3},
    "many_stages": {"block_m": 128, "block_n": 128, "num_stages": 5, "num_buffers": 2},
    "tall": {"block_m": 256, "block_n": 128, "num_stages": 3},
    "wide": {"block_m": 128, "block_n": 256, "num_stages": 3, "num_buffers": 4, "num_programs": 5},
    "long": {"block_m": 128, "block_n": 64, "block_k": 128, "num_stages": 2, "num_programs": 1},
}


def given_by(case):
    build, sizes, options = case
    return build(*sizes, **options)


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_numbers(case):
    assert_matches(given_by(CASES[case]))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_more_numbers(case):
    assert_matches(given_by(MORE[case]))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("blocks", BLOCKS)
def test_every_kind_of_config(blocks):
    cfg = config.Config(**{"band": 2, "num_programs": 2} | BLOCKS[blocks])
    assert_matches(values(403, 128, 384, (3, 130, 0, 261)), cfg)


@interpreted
def test_rows_of_no_group_may_hold_nan():
    """Neither outputs nor gradients see rows before, between and after the groups that are here."""
    given = values(150, 64, 64, (20, 33, 0, 59, 30), 3, group_offset=1)
    outside = (np.arange(150) < 20) | (np.arange(150) >= 20 + 33 + 59)
    dirty = lambda x: jnp.where(outside[:, None], jnp.nan, x).astype(x.dtype)
    clean = lambda x: jnp.where(outside[:, None], 0, x)
    dout = jax.random.normal(jax.random.key(5), (150, 64)).astype(jnp.bfloat16)

    @jax.jit
    def run(lhs, dout):
        args = make(given | {"lhs": lhs})
        (out,), _ = ENTRY.fn(args, SMALL)
        grads = ENTRY.backward(args, SMALL, (out,), (), (dout,), frozenset({"lhs", "rhs"}))
        return {"out": out, **grads}

    found, expected = (run(f(given["lhs"]), f(dout)) for f in (dirty, clean))
    for name, x in found.items():
        np.testing.assert_array_equal(
            x.astype(jnp.float32), expected[name].astype(jnp.float32), name
        )
        assert np.isfinite(x.astype(jnp.float32)).all()


@interpreted
@pytest.mark.slow
def test_nan_stays_in_its_group():
    given = values(90, 64, 64, (21, 30, 32))
    given["lhs"] = given["lhs"].at[25].set(jnp.nan)
    args = make(given)
    (out,), _ = jax.jit(lambda args: ENTRY.fn(args, SMALL))(args)
    dout = (jnp.ones_like(out),)
    backward = lambda args, *rest: ENTRY.backward(args, SMALL, (), (), *rest, frozenset({"rhs"}))
    drhs = jax.jit(backward)(args, dout)["rhs"].astype(jnp.float32)
    bad = np.isnan(out.astype(jnp.float32)).any(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(bad), [25])
    np.testing.assert_array_equal(np.isnan(drhs).any(axis=(1, 2)), [False, True, False])


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, -3, 100, 5), (300, 7, 1, 1)])
def test_sizes_beyond_the_rows_are_cut(sizes):
    given = values(130, 64, 64, sizes)
    (out,), _ = jax.jit(lambda args: ENTRY.fn(args, SMALL))(make(given))
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), 130)
    cut = given | {"group_sizes": np.diff(ends, prepend=0).astype(np.int32)}
    (expected,), _ = jax.jit(lambda args: ENTRY.fn(args, SMALL))(make(cut))
    np.testing.assert_array_equal(out.astype(jnp.float32), expected.astype(jnp.float32))


@interpreted
@pytest.mark.slow
@pytest.mark.skipif(BACKEND == "gpu", reason="the interpreter finds races")
def test_no_races():
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    from ejkernel.callib import _pallas

    with _pallas.detect_races():
        assert_matches(given_by(CASES["borders"]))
    assert not gpu_callbacks.get_races().races_found


@interpreted
def test_the_registry_gives_it_by_name():
    given = values(70, 64, 64, (20, 0, 33))
    with _settings.override(interpret=True):
        found = kernel_registry.get(OP, "pallas", "gpu")(**given)
        expected = grouped_matmul(**given, platform="xla")
    found, expected = (x.astype(jnp.float32) for x in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("mapped", [("lhs",), ("lhs", "group_sizes"), ("lhs", "rhs", "existing")])
def test_vmap(mapped):
    given = values(70, 64, 64, (20, 0, 33), existing=True)
    extra = {name: given.pop(name) for name in ("existing_out",) if "existing" in mapped}
    given.pop("existing_out", None)
    arrays = given | extra
    axes = {n: 0 if n in (*mapped, *extra) else None for n in arrays}
    wide = {
        n: jnp.stack([x, x[::-1]]) if axes[n] == 0 else jnp.asarray(x) for n, x in arrays.items()
    }

    def run(platform):
        fn = lambda arrays: kernel_registry.get(OP, *platform)(**arrays)
        return jax.vmap(fn, in_axes=(axes,))(wide).astype(jnp.float32)

    with _settings.override(interpret=True):
        np.testing.assert_allclose(run(("pallas", "gpu")), run(("xla",)), rtol=0.02, atol=0.02)


# Which tiles there are


@lowered
@pytest.mark.parametrize("every_row", [True, False])
@pytest.mark.parametrize(("m", "size"), [(1, 64), (203, 64), (700, 128), (510, 256)])
def test_tiles_cover_every_row_once(m, size, every_row):
    from ejkernel.kernels._pallas.gpu.grouped_matmul import rows

    count = 5

    @jax.jit
    def tiles(sizes, offset):
        found = groups.of_sizes(sizes, offset, count, m)
        return found, *rows.tiles(found, m, size, every_row)

    rng = np.random.default_rng(0)
    for _ in range(30):
        sizes = rng.multinomial(rng.integers(0, m + 1), np.full(count + 3, 1 / (count + 3)))
        sizes = np.where(rng.random(count + 3) < 0.3, 0, sizes).astype(np.int32)
        found, table, number = jax.tree.map(np.asarray, tiles(sizes, rng.integers(0, 4)))
        assert number[0] <= table.shape[0]
        expected = np.full(m, -1)
        for i, (start, stop) in enumerate(zip(*found, strict=True)):
            expected[start:stop] = i
        matrix, seen = np.full(m, -1), np.zeros(m, int)
        for i, row, low, high, owned in table[: number[0]]:
            assert row % 8 == 0
            assert 0 <= low < high <= size
            matrix[row + low : row + high] = i if owned else -1
            seen[row + low : row + high] += 1
        np.testing.assert_array_equal(matrix, expected)
        np.testing.assert_array_equal(seen, 1 if every_row else expected >= 0)


# Machine code for a GPU that is not here


def abstract(m, k, n, g, dtype="bfloat16", **more):
    shape = lambda *s, dtype=dtype: jax.ShapeDtypeStruct(s, dtype)
    given: dict[str, Any] = {"lhs": shape(m, k), "group_sizes": shape(g, dtype=jnp.int32)}
    given["rhs"] = shape(g, n, k) if more.get("transpose_rhs") else shape(g, k, n)
    if more.pop("existing", False):
        given["existing_out"] = shape(m, n, dtype=more.get("preferred_element_type", dtype))
    return jax.eval_shape(lambda arrays: make(arrays | more), given)


def on_h200s(count, kind):
    from jax._src.mesh import AbstractDevice
    from jax.sharding import AbstractMesh, AxisType

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return AbstractMesh((count,), ("x",), (AxisType[kind],), abstract_device=device)


def assert_lowers(args, direction, cfg):
    def run(args):
        if direction == "forward":
            return ENTRY.fn(args, cfg)[0]
        dout = jnp.zeros((*args.lhs.shape[:-1], num_columns(args)), out_dtype(args))
        return ENTRY.backward(args, cfg, (), (), (dout,), frozenset({"lhs", "rhs"}))

    with jax.sharding.use_abstract_mesh(on_h200s(1, "Explicit")):
        text = jax.jit(run).trace(args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == (1 if direction == "forward" else 2)


OPTIONS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "odd": ((301, 64, 192, 8), {}),
    "transposed": ((301, 1408, 64, 8), {"transpose_rhs": True}),
    "one_row": ((1, 64, 64, 1), {}),
    "few_rows": ((64, 4096, 4096, 8), {}),
    "wide": ((300, 128, 192, 4), {"preferred_element_type": "float32", "transpose_rhs": True}),
    "half": ((4096, 256, 256, 8), {"dtype": "float16"}),
}
FORWARD_OPTIONS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "existing": ((301, 128, 192, 4), {"existing": True}),
}


@lowered
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("number", range(5))
def test_every_config_lowers(number, direction):
    args = abstract(32768, 4096, 4096, 8)
    found = config.candidates(args, direction, H200)
    assert len(found) == 5
    assert_lowers(args, direction, found[number])


@lowered
@pytest.mark.parametrize("number", range(3))
def test_every_config_for_few_rows_lowers(number):
    args = abstract(64, 4096, 4096, 8)
    found = config.candidates(args, "forward", H200)
    assert len(found) == 3
    assert_lowers(args, "forward", found[number])


@lowered
@pytest.mark.parametrize("options", [*OPTIONS, *FORWARD_OPTIONS])
def test_options_lower(options):
    sizes, more = (OPTIONS | FORWARD_OPTIONS)[options]
    args = abstract(*sizes, **more)
    assert_lowers(args, "forward", config.heuristic(args, "forward", H200))
    if options in OPTIONS:
        assert_lowers(args, "backward", config.heuristic(args, "backward", H200))


@lowered
@pytest.mark.parametrize("existing", [False, True])
def test_shard_map(existing):
    """Devices with groups of their own; JAX takes no refs to arrays that differ over a mesh."""
    from jax.sharding import PartitionSpec

    given = abstract(512, 128, 128, 8, existing=existing).arrays() | {"offset": jnp.arange(2) * 4}
    cfg = config.Config(block_m=128, block_n=128)
    specs = {n: PartitionSpec("x") if n in ("rhs", "offset") else PartitionSpec() for n in given}

    def run(arrays):
        offset = arrays.pop("offset")
        args = make(arrays | {"group_offset": offset[0]})
        return ENTRY.fn(args, cfg)[0][0][None]

    mesh = on_h200s(2, "Auto")
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec("x"))
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(mapped).trace(given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


# What is refused


@pytest.mark.parametrize(
    ("sizes", "more", "reason"),
    [
        ((64, 64, 64), {"dtype": "float32"}, "bfloat16 or float16"),
        ((64, 64, 72), {}, "multiples of 64"),
        ((64, 32, 64), {}, "multiples of 64"),
        ((0, 64, 64), {}, "at least one row"),
        ((64, 64, 64), {"preferred_element_type": "float16"}, "preferred_element_type"),
    ],
)
def test_refused(sizes, more, reason):
    m, k, n = sizes
    assert reason in (ENTRY.why_not(abstract(m, k, n, 2, **more), H200) or "")


def test_two_dtypes_are_refused():
    given = values(64, 64, 64, (64,))
    given["rhs"] = given["rhs"].astype(jnp.float16)
    assert "one dtype" in ENTRY.why_not(make(given), H200)


@lowered
def test_gradients_of_a_wide_output_of_float16_are_refused():
    args = abstract(64, 64, 64, 2, dtype="float16", preferred_element_type="float32")
    assert ENTRY.why_not(args, H200) is None
    assert "no gradients of a float32 output" in ENTRY.why_not(args, H200, direction="backward")


@lowered
@pytest.mark.parametrize("capability", ["8.0", "10.0", "gfx942"])
def test_other_architectures_are_refused(capability):
    reason = ENTRY.why_not(make(values(64, 64, 64, (64,))), Target("gpu", "GPU", capability))
    assert "compute capability 9.0" in reason


def test_auto_never_takes_it():
    assert "platform='pallas'" in ENTRY.by_name
    assert vars(kernel_registry.get(OP))["entry"] is not ENTRY
    given = values(9, 64, 64, (4, 5))
    out = grouped_matmul(given["lhs"], given["rhs"], given["group_sizes"])
    assert out.shape == (9, 64)


# Configurations


def test_configs_check_themselves():
    good = {"block_m": 128, "block_n": 128}
    config.Config(**good)
    wrongs: tuple[dict[str, Any], ...] = (
        {"block_m": 64},  # two warpgroups have 64 rows each at least
        {"block_m": 512},
        {"block_m": 256, "block_n": 256},  # 256 registers for sums
        {"block_n": 96},
        {"block_k": 32},
        {"warpgroups": 3},
        {"num_stages": 1},
        {"num_stages": 2.5},
        {"num_buffers": 0},
        {"band": 0},
        {"num_programs": True},
    )
    for wrong in wrongs:
        with pytest.raises(ValueError, match="Config"):
            config.Config(**good | wrong)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("sizes", [(32768, 4096, 4096, 8), (64, 4096, 1408, 8), (300, 64, 192, 4)])
def test_candidates_fit(sizes, direction):
    args = abstract(*sizes)
    found = ENTRY.candidates(args, direction, H200)
    assert len(found) >= 2
    assert found[0] == ENTRY.heuristic(args, direction, H200)
    for cfg in found:
        assert config.misfit(args, direction, cfg, H200) is None
        assert config.shared_bytes(args, direction, cfg) <= 227 << 10
        assert cfg.num_programs == 132


def test_what_does_not_fit_is_refused():
    args = abstract(32768, 4096, 4096, 8)
    guess = config.heuristic(args, "forward", H200)
    large = dataclasses.replace(guess, num_stages=6)
    assert "shared memory" in str(config.misfit(args, "forward", large, H200))
    long = config.Config(block_m=128, block_n=64, block_k=128)
    other = abstract(9, 192, 64, 2)
    assert "multiples of block_k=128" in str(config.misfit(other, "forward", long, H200))
