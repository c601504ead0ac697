"""The PTX emulator: tiles that a descriptor describes, and the same with faults put in."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.callib import _triton_call, triton_call
from tools.ptx import hook, launch

triton = pytest.importorskip("triton")
tl = triton.language
M, N, K, BK = 64, 64, 100 * 2, 32
STEPS = 7  # of the loop; the last one reaches beyond K, where tiles are 0


@triton.jit
def described_product_kernel(
    a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr
):
    rows = tl.make_tensor_descriptor(a, [M, K], [K, 1], [M, BK])
    columns = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, N])
    acc = tl.zeros([M, N], tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(rows.load([0, k]), columns.load([k, 0]), acc)
    o_m, o_n = tl.arange(0, M), tl.arange(0, N)
    tl.store(out + o_m[:, None] * N + o_n, acc)


def factors():
    keys = jax.random.split(jax.random.key(3))
    return [
        np.asarray(jax.random.normal(k, s, jnp.bfloat16))
        for k, s in zip(keys, ((M, K), (K, N)), strict=True)
    ]


def call(a, b):
    out = {"out": jax.ShapeDtypeStruct((M, N), jnp.float32)}
    bound = {"inputs": {"a": a, "b": b}, "outputs": out}
    return triton_call(described_product_kernel, **bound, grid=(1,), M=M, N=N, K=K, BK=BK)


@pytest.fixture(scope="module")
def compiled():
    (eqn,) = jax.make_jaxpr(call)(*factors()).eqns
    avals = [v.aval for v in eqn.invars]
    return _triton_call.compile_launch(eqn.params["launch"], avals, hook.HOPPER)


def run(compiled, edit=lambda ptx: ptx):
    """Outcome and result of the product, after an edit of its PTX."""
    a, b = factors()
    out = np.full((M, N), np.nan, np.float32)
    ptx = edit(compiled.code)
    return launch.run(ptx, [a, b, out], (1,), compiled.shared_bytes, [out]), out


def test_a_product_of_described_tiles_is_right(compiled):
    assert "cp.async.bulk.tensor.2d" in compiled.code
    outcome, out = run(compiled)
    assert outcome.clean, outcome
    a, b = (x.astype(np.float64) for x in factors())
    np.testing.assert_allclose(out, a @ b, atol=1e-4)


def replaced(pattern, text, count=0):
    def edit(ptx):
        found, number = re.subn(pattern, text, ptx, count=count)
        assert number, pattern
        return found

    return edit


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        # nobody waits for tiles
        (replaced(r"mbarrier\.try_wait[^;]*;", "mov.pred complete, -1;"), "a copy in flight"),
        # the product still reads the tile that the next copy writes
        (replaced(r"wgmma\.wait_group\.sync\.aligned \d;", ""), "a product in flight reads"),
        # a warp may still read a tile, or a barrier, that another one writes
        (replaced(r"bar\.sync\s+0;", ""), "since the last barrier"),
        # fewer or more bytes than tiles have: the wait would not end, or end early
        (replaced(r"(expect_tx[^;]*), 8192;", r"\1, 4096;"), "nothing completes"),
        (replaced(r"(mbarrier\.init[^;]*), 1;", r"\1, 2;"), "nothing completes"),
    ],
)
def test_a_fault_in_copies_of_tiles_is_found(compiled, edit, told):
    outcome, _ = run(compiled, edit)
    found = " ".join([*outcome.races, outcome.fault or ""])
    assert told in found, outcome
