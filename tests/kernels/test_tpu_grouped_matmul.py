"""The grouped product on TPUs beyond the generated tests: block sizes, refusals, races."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel._device import Target
from ejkernel.callib import _pallas
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._pallas.tpu.grouped_matmul import bwd, config, fwd
from tests.kernels import harness

SPEC = kernel_registry.spec("grouped_matmul")


def call(m=48, k=16, n=24, sizes=(20, 0, 9, 14), dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 2)
    values = {
        "lhs": jax.random.normal(keys[0], (m, k)).astype(dtype),
        "rhs": jax.random.normal(keys[1], (len(sizes), k, n)).astype(dtype),
        "group_sizes": np.asarray(sizes, np.int32),
    }
    return SPEC.canonicalize(SPEC.complete(values))


@pytest.mark.parametrize("bad", [{"block_m": 12}, {"block_k": 0}, {"block_n": 8.0}])
def test_configs_check_themselves(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}=.* must be a positive multiple of 8"):
        config.Config(**{"block_m": 16, "block_k": 16, "block_n": 16} | bad)


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ((4096, 4096, 4096), (512, 1024, 1024)),
        ((100, 4096, 1536), (112, 1024, 768)),  # 1536 = 2 * 768, no 1024
        ((4096, 20, 200), (512, 24, 256)),
        ((4096, 1100, 1100), (512, 1024, 1024)),  # nothing divides it: padded
    ],
)
def test_blocks_divide_matrices_where_they_can(sizes, blocks):
    cfg = config.Config(block_m=512, block_k=1024, block_n=1024)
    assert config.fitting(cfg, *sizes) == blocks


@pytest.mark.parametrize("model", ["TPU v4", "TPU v5 lite", "TPU v6 lite", "TPU7x"])
def test_the_first_guess_fits_every_device(model):
    guess = config.heuristic(call(), "forward", Target(kind="tpu", model=model))
    blocks = (guess.block_m, guess.block_k, guess.block_n)
    assert config.vmem_limit(blocks, (jnp.float32,) * 3) <= 96 << 20


def test_float16_and_nothing_are_refused():
    entry = harness.find_entry("grouped_matmul", "pallas/tpu")
    assert "`lhs` is float16" in entry.why_not(call(dtype=jnp.float16))
    assert "at least one row" in entry.why_not(call(m=0, sizes=(0,)))


def test_no_race():
    args, cfg = call(), config.Config(block_m=16, block_k=8, block_n=8)
    with _pallas.detect_races():
        ((out,), _) = fwd.forward(args, cfg)
        assert not _pallas.races_found()
    ends = np.cumsum([20, 0, 9, 14])
    owner = np.searchsorted(ends, np.arange(48), side="right")
    lhs, rhs = np.asarray(args.lhs, np.float64), np.asarray(args.rhs, np.float64)
    expected = [lhs[i] @ rhs[g] if g < 4 else np.zeros(24) for i, g in enumerate(owner)]
    np.testing.assert_allclose(out, np.stack(expected), rtol=1e-5, atol=1e-5)


def test_no_race_backward():
    args, cfg = call(), config.Config(block_m=16, block_k=8, block_n=8)
    dout = jax.random.normal(jax.random.key(1), (48, 24))
    with _pallas.detect_races():
        wanted = frozenset({"lhs", "rhs"})
        grads = bwd.backward(args, cfg, (), (), (dout,), wanted)
        assert not _pallas.races_found()
    ends = np.cumsum([0, 20, 0, 9, 14])
    lhs, rhs, dout = (np.asarray(x, np.float64) for x in (args.lhs, args.rhs, dout))
    dlhs, rows = np.zeros((48, 16)), [slice(*pair) for pair in itertools.pairwise(ends)]
    for g, own in enumerate(rows):
        dlhs[own] = dout[own] @ rhs[g].T
    drhs = np.stack([lhs[own].T @ dout[own] for own in rows])  # 0 for the empty group
    np.testing.assert_allclose(grads["lhs"], dlhs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grads["rhs"], drhs, rtol=1e-5, atol=1e-5)
