"""The PTX emulator: small kernels compiled for Hopper, and the same with faults put in."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.callib import _triton_call, triton_call
from tools.ptx import hook, launch

triton = pytest.importorskip("triton")
tl = triton.language
M, N, K = 64, 64, 96
USED = 80  # of K: three steps of the loop, the last of which is cut short


@triton.jit
def product_kernel(
    a, b, out, used, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr
):
    o_m, o_n, o_k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    acc = tl.zeros([M, N], tl.float32)
    for k in range(0, used, BK):
        m_k = k + o_k < used
        b_a = tl.load(a + o_m[:, None] * K + k + o_k, mask=m_k, other=0.0)  # [M, BK]
        b_b = tl.load(b + (k + o_k)[:, None] * N + o_n, mask=m_k[:, None], other=0.0)  # [BK, N]
        acc = tl.dot(b_a, b_b, acc)
    tl.store(out + o_m[:, None] * N + o_n, acc)


@triton.jit
def scaled_product_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """A factor that is computed, and so is stored in shared memory before the product."""
    o_m, o_n, o_k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    b_a = tl.load(a + o_m[:, None] * K + o_k)  # [M, K]
    b_b = tl.load(b + o_k[:, None] * N + o_n) * 2  # [K, N]
    tl.store(out + o_m[:, None] * N + o_n, tl.dot(b_a, b_b))


@triton.jit
def sum_kernel(x, out, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    o_n = tl.arange(0, BLOCK)
    b_x = tl.load(x + o_n, mask=o_n < n, other=0.0) if MASKED else tl.load(x + o_n)
    tl.store(out, tl.sum(b_x))


@triton.jit
def widen_kernel(x, out, BLOCK: tl.constexpr):
    o_n = tl.arange(0, BLOCK)
    tl.store(out + o_n, tl.load(x + o_n).to(out.dtype.element_ty))


@triton.jit
def integers_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """Signed division, shifts, products of twice the width, and extremes, one row each."""
    o_n = tl.arange(0, BLOCK)
    m_n = o_n < n
    b_x = tl.load(x + o_n, mask=m_n, other=1)
    b_y = tl.load(y + o_n, mask=m_n, other=1)
    tl.store(out + 0 * n + o_n, b_x // b_y, mask=m_n)
    tl.store(out + 1 * n + o_n, b_x % b_y, mask=m_n)
    tl.store(out + 2 * n + o_n, b_x >> 3, mask=m_n)
    tl.store(out + 3 * n + o_n, ((b_x.to(tl.int64) * b_y) >> 7).to(tl.int32), mask=m_n)
    tl.store(out + 4 * n + o_n, tl.maximum(tl.minimum(b_x, b_y), 0), mask=m_n)
    tl.store(out + 5 * n + o_n, tl.umulhi(b_x.to(tl.uint32), b_y.to(tl.uint32)), mask=m_n)


def factors():
    keys = jax.random.split(jax.random.key(3))
    shapes = ((M, K), (K, N))
    a, b = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))
    return a.at[:, USED:].set(jnp.nan), b.at[USED:].set(jnp.nan)


def call_product(a, b):
    bound = {"inputs": {"a": a, "b": b, "used": USED}, "outputs": {"out": struct((M, N))}}
    return triton_call(product_kernel, **bound, grid=(1,), M=M, N=N, K=K, BK=32)["out"]


def struct(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled(call, *arrays):
    """The machine code of the one launch of a call."""
    (eqn,) = jax.make_jaxpr(call)(*arrays).eqns
    avals = [v.aval for v in eqn.invars]
    return _triton_call.compile_launch(eqn.params["launch"], avals, hook.HOPPER)


def run_product(edit=None, **others):
    """Outcome and result of the product, after an edit of its PTX."""
    a, b = (np.asarray(x) for x in factors())
    made, out = compiled(call_product, a, b), np.full((M, N), np.nan, np.float32)
    given = {"shared_bytes": made.shared_bytes, "writable": [out]} | others
    ptx = made.code if edit is None else edit(made.code)
    assert edit is None or ptx != made.code
    return launch.run(ptx, [a, b, out, USED], (1,), **given), out


def exact_product():
    a, b = (np.asarray(x, np.float64) for x in factors())
    return a[:, :USED] @ b[:USED]


def sum_of(x, n, masked):
    bound = {"inputs": {"x": x, "n": n}, "outputs": {"out": struct(())}}
    return triton_call(sum_kernel, **bound, grid=(1,), BLOCK=1024, MASKED=masked)["out"]


def test_a_product_of_tiles_is_right():
    a, b = factors()
    with hook.emulated() as outcomes:
        out = np.asarray(jax.jit(call_product)(a, b))
    (outcome,) = outcomes
    assert outcome.clean, outcome
    assert outcome.instructions > 100
    text = compiled(call_product, a, b).code
    assert "wgmma.mma_async" in text
    assert "cp.async" in text
    np.testing.assert_allclose(out, exact_product(), atol=1e-4)


@pytest.mark.parametrize(("rows", "opcode"), [(M, "wgmma.mma_async"), (16, "mma.sync")])
def test_a_product_in_tensorfloat32_is_right(rows, opcode):
    """Hopper multiplies 64 rows and more by wgmma, from shared memory."""
    a, b = (x.astype(jnp.float32) + jnp.float32(1e-3) for x in factors())
    bound = {"inputs": {"a": a, "b": b, "used": USED}, "outputs": {"out": struct((rows, N))}}
    with hook.emulated() as outcomes:
        out = triton_call(product_kernel, **bound, grid=(1,), M=rows, N=N, K=K, BK=32)["out"]
    assert outcomes[0].clean, outcomes
    assert f"{opcode}." in outcomes[0].code
    assert ".f32.tf32.tf32" in outcomes[0].code
    cut = lambda x: (np.asarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    left, right = (cut(x).astype(np.float64) for x in (a[:rows, :USED], b[:USED]))
    np.testing.assert_allclose(out, left @ right, atol=1e-4)


def test_bytes_are_widened_right():
    """By inline assembly with registers that have names."""
    x = np.arange(-128, 128, dtype=np.int8)
    bound = {"inputs": {"x": x}, "outputs": {"out": struct(x.shape, jnp.bfloat16)}}
    with hook.emulated() as outcomes:
        out = triton_call(widen_kernel, **bound, grid=(1,), BLOCK=256)["out"]
    assert outcomes[0].clean, outcomes
    np.testing.assert_array_equal(np.asarray(out, np.float32), x)


def test_the_interpreter_is_back_afterwards():
    before = _triton_call._run_on_host
    with hook.emulated():
        assert _triton_call._run_on_host is not before
    assert _triton_call._run_on_host is before


@pytest.mark.parametrize("n", [1, 777])
def test_a_masked_sum_is_right(n):
    x = jax.random.normal(jax.random.key(n), (n,))
    with hook.emulated() as outcomes:
        out = float(sum_of(x, n, True))
    assert [x.clean for x in outcomes] == [True], outcomes
    assert out == pytest.approx(float(np.asarray(x, np.float64).sum()), rel=1e-5, abs=1e-5)


def test_a_batch_runs_in_one_launch():
    x = jax.random.normal(jax.random.key(1), (3, 100))
    with hook.emulated() as outcomes:
        out = np.asarray(jax.vmap(lambda row: sum_of(row, 100, True))(x))
    assert [(x.clean, x.grid) for x in outcomes] == [(True, (1, 3, 1))], outcomes
    np.testing.assert_allclose(out, np.asarray(x).sum(1), atol=1e-4)


def test_integers_are_right():
    rng, n = np.random.default_rng(5), 101
    x = rng.integers(-(2**31), 2**31, n).astype(np.int32)
    y = (rng.integers(1, 2**20, n) * rng.choice([-1, 1], n)).astype(np.int32)
    x[:3] = (-7, 7, 0)
    bound = {"inputs": {"x": x, "y": y, "n": n}, "outputs": {"out": struct((6, n), jnp.int32)}}
    with hook.emulated() as outcomes:
        out = triton_call(integers_kernel, **bound, grid=(1,), BLOCK=128)["out"]
    assert outcomes[0].clean, outcomes
    wide, by = x.astype(np.int64), y.astype(np.int64)
    quotient = np.sign(wide) * np.sign(by) * (np.abs(wide) // np.abs(by))
    unsigned = [z.view(np.uint32).astype(np.uint64) for z in (x, y)]
    rows = [
        *(quotient, wide - quotient * by, wide >> 3, (wide * by) >> 7),
        *(np.maximum(np.minimum(wide, by), 0), (unsigned[0] * unsigned[1]) >> np.uint64(32)),
    ]
    expected = np.stack([row.astype(np.uint64).astype(np.uint32).view(np.int32) for row in rows])
    np.testing.assert_array_equal(np.asarray(out), expected)


# Faults put in


def replaced(pattern, to):
    """An edit of PTX."""
    return lambda ptx: re.sub(pattern, to, ptx)


@pytest.mark.parametrize(
    ("edit", "race"),
    [
        (
            replaced(r"(wgmma\.wait_group\.sync\.aligned\s+)\d", r"\g<1>7"),
            "writes what a product in flight reads",
        ),
        (
            replaced(r"(cp\.async\.wait_group\s+)\d", r"\g<1>7"),
            "reads what a copy in flight writes",
        ),
        (replaced(r"bar\.sync\s+0;", ""), "another warp wrote since the last barrier"),
    ],
    ids=["copy_overtakes_product", "product_overtakes_copy", "no_barrier"],
)
def test_a_race_is_found(edit, race):
    outcome, _ = run_product(edit)
    assert any(race in found for found in outcome.races), outcome
    assert all("test_emulator.py:" in found for found in outcome.races)  # the line in the source


def test_a_product_of_stores_needs_a_fence():
    a, b = (np.asarray(x)[..., :64, :64] for x in factors())
    bound = {"inputs": {"a": a, "b": b}, "outputs": {"out": struct((64, 64))}}
    call = lambda: triton_call(scaled_product_kernel, **bound, grid=(1,), M=64, N=64, K=64)["out"]
    made = compiled(call)
    out = np.full((64, 64), np.nan, np.float32)
    arrays = [np.ascontiguousarray(a), np.ascontiguousarray(b), out]
    whole = launch.run(made.code, arrays, (1,), made.shared_bytes, [out])
    assert whole.clean, whole
    np.testing.assert_allclose(out, 2 * a.astype(np.float64) @ b.astype(np.float64), atol=1e-3)
    cut = re.sub(r"fence\.proxy\.async\.shared::cta;", "", made.code)
    outcome = launch.run(cut, arrays, (1,), made.shared_bytes, [out])
    assert any("without a proxy fence" in found for found in outcome.races), outcome


@pytest.mark.parametrize("n", [8, 777])  # far from the array, and right behind it
def test_a_load_out_of_bounds_is_found(n):
    x = jax.random.normal(jax.random.key(2), (n,))
    with hook.emulated() as outcomes:
        out = float(sum_of(x, n, False))
    assert "OutOfBoundsError" in outcomes[0].fault
    assert "ld.global" in outcomes[0].fault
    assert np.isnan(out)


def test_a_write_to_an_input_is_found():
    outcome, _ = run_product(writable=[])
    assert "writes to an input" in outcome.fault


def test_too_little_shared_memory_is_found():
    outcome, _ = run_product(shared_bytes=4096)
    assert "shared address lies outside" in outcome.fault


@pytest.mark.parametrize("opcode", ["shl.strange.b32", "shl.b32.strange"])
def test_an_unknown_instruction_is_named(opcode):
    outcome, out = run_product(replaced(r"\bshl\.b32\b", opcode))
    assert outcome.fault.startswith(f"UnknownInstructionError: `{opcode} %r")
    assert np.isnan(out).all()


PACKED = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry packed_kernel(
    .param .u64 packed_kernel_param_0
)
.reqntid 32
{
    .reg .b16 %rs<5>;
    .reg .b32 %r<5>;
    .reg .b64 %rd<2>;
    ld.param.b64 %rd1, [packed_kernel_param_0];
    mov.u32 %r1, %tid.x;
    cvt.u16.u32 %rs3, %r1;
    mov.b32 %r2, {%rs4, %rs3};
    shr.u32 %r3, %r2, SHIFT;
    st.global.b32 [%rd1], %r3;
    LATER
    ret;
}
"""


@pytest.mark.parametrize(
    ("shift", "later", "result", "fault"),
    [
        (16, "", 31, None),  # the undefined half is shifted away
        (0, "", 31 * 65536 + 0xA5A5, None),
        (16, "cvt.u16.u32 %rs4, %r1;", 0, "%rs4 is read before it is written"),
    ],
)
def test_what_nothing_writes_is_noise(shift, later, result, fault):
    """Compilers leave half of a pair undefined where nobody reads it."""
    out = np.zeros(1, np.uint32)
    code = PACKED.replace("SHIFT", str(shift)).replace("LATER", later)
    outcome = launch.run(code, [out], (1,), 0, [out])
    assert out[0] == result
    assert (outcome.fault is None) if fault is None else fault in outcome.fault
