"""Triton kernels as JAX functions: values, transformations, and what a GPU would be given."""

import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import _settings
from ejkernel.callib import (
    Cost,
    _triton_call,
    _triton_interpret,
    _triton_launch,
    triton_call,
)
from ejkernel.callib._triton_arguments import Array, Bundle, Exact, Output
from ejkernel.callib._triton_compile import GpuTarget
from ejkernel.xla_utils import manual

triton = pytest.importorskip("triton")
tl = triton.language
HOPPER = GpuTarget("cuda", 90)
OUT = jax.ShapeDtypeStruct((10,), jnp.float32)
X = np.linspace(-3.0, 4.0, 10, dtype=np.float32)
Y = np.cos(np.arange(10, dtype=np.float32))


@triton.jit
def _weighted(x, factor: tl.constexpr):
    return x * factor


@triton.jit
def scaled_sum_kernel(x, y, n, total, product, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    """FACTOR * x + y, and x * y where it is wanted; either input may be absent."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    b_x = tl.load(x + o, mask=m, other=0.0)
    b_y = tl.zeros([BLOCK], tl.float32)
    if y is not None:
        b_y = tl.load(y + o, mask=m, other=0.0)
    if total is not None:
        tl.store(total + o, _weighted(b_x, FACTOR) + b_y, mask=m)
    if product is not None:
        tl.store(product + o, b_x * b_y, mask=m)


def scaled_sum(x, y, factor=2.0, wanted=(True, True), block=4):
    like = x if y is None else y
    out = jax.ShapeDtypeStruct(like.shape, jnp.float32)
    made = triton_call(
        scaled_sum_kernel,
        inputs={"x": x, "y": y, "n": x.size},
        outputs={n: out if w else None for n, w in zip(("total", "product"), wanted, strict=True)},
        grid=(-(-x.size // block),),
        FACTOR=factor,
        BLOCK=block,
    )
    return [made["total"], made["product"]]


def total_of(x, y):
    total, _ = scaled_sum(x, y)
    return total


@pytest.mark.parametrize("function", [total_of, jax.jit(total_of), jax.vmap(total_of)])
def test_without_jit(function):
    """The kernel itself stays one compiled program."""
    x, y = X.reshape(2, 5), Y.reshape(2, 5)
    with jax.disable_jit():
        np.testing.assert_array_equal(function(x, y), 2 * x + y)


@triton.jit
def grid_kernel(x, y, out, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr):
    """x[i, j, k] + y[k] with a program for each element of a grid of any rank."""
    i = tl.program_id(0)
    j = tl.program_id(1)
    k = tl.program_id(2)
    o = (i * N1 + j) * N2 + k
    tl.store(out + o, tl.load(x + o) + tl.load(y + k))


def on_grid(x, y):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    n = [*x.shape, *[1] * (3 - x.ndim)]
    sizes = {f"N{i}": size for i, size in enumerate(n)}
    inputs = {"x": x, "y": y}
    return triton_call(grid_kernel, inputs=inputs, outputs={"out": out}, grid=x.shape, **sizes)[
        "out"
    ]


@triton.jit
def plane_kernel(x, y, out, N1: tl.constexpr):
    """x[i, j] + y[0] with a program for each element, which looks at two axes alone."""
    o = tl.program_id(0) * N1 + tl.program_id(axis=1)
    tl.store(out + o, tl.load(x + o) + tl.load(y))


def on_plane(x, y):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    bound = {"inputs": {"x": x, "y": y}, "outputs": {"out": out}}
    return triton_call(plane_kernel, **bound, grid=x.shape, N1=x.shape[1])["out"]


@triton.jit
def named_kernel(x, stride_x, index, kernel, tl_, size, out, i_v: tl.constexpr, B: tl.constexpr):
    """Has the names for parameters that a batched kernel needs for itself."""
    o = tl.arange(0, B)
    v = tl.load(x + o) * stride_x + index * 10 + kernel * 100 + tl_ * 1000 + size * 10000
    tl.store(out + o, v + i_v)


@triton.jit
def add_one_kernel(x, n, out, BLOCK: tl.constexpr):
    """Adds one to what `out` holds already, in its first n elements."""
    o = tl.arange(0, BLOCK)
    tl.store(out + o, tl.load(out + o) + 1.0, mask=o < n)


def add_one(x, n=3, grid=(1,), **options):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    bound = {"inputs": {"x": x, "n": n}, "outputs": {"out": out}}
    return triton_call(add_one_kernel, **bound, grid=grid, BLOCK=x.shape[-1], **options)["out"]


@pytest.fixture(autouse=True)
def _interpreted():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


# Values


@pytest.mark.parametrize("jit", [False, True])
def test_values(jit):
    run = jax.jit(scaled_sum) if jit else scaled_sum
    total, product = run(X, Y)
    np.testing.assert_allclose(total, 2 * X + Y, rtol=1e-6)
    np.testing.assert_allclose(product, X * Y, rtol=1e-6)
    assert total.dtype == jnp.float32


def test_absent_inputs_and_outputs():
    total, product = scaled_sum(X, None)
    np.testing.assert_array_equal(total, 2 * X)
    np.testing.assert_array_equal(product, 0 * X)
    total, product = scaled_sum(X, Y, wanted=(False, True))
    assert total is None
    np.testing.assert_allclose(product, X * Y, rtol=1e-6)
    assert list(scaled_sum(X, Y, wanted=(False, False))) == [None, None]


@pytest.mark.parametrize(("factor", "block"), [(3.0, 4), (0.5, 16), (-1, 1)])
def test_constants(factor, block):
    total, _ = scaled_sum(X, Y, factor, block=block)
    np.testing.assert_allclose(total, factor * X + Y, rtol=1e-6)


def test_integers_of_numpy_are_integers():
    np.testing.assert_array_equal(add_one(X[:4], np.int64(2), zeroed=["out"])[:2], [1.0, 1.0])


def test_an_empty_grid_gives_zeros():
    total, product = scaled_sum(jnp.zeros(0), None)
    assert total.shape == product.shape == (0,)
    np.testing.assert_array_equal(add_one(jnp.ones(4), grid=(0,)), np.zeros(4))
    np.testing.assert_array_equal(add_one(jnp.ones(4), grid=(2, 0)), np.zeros(4))


def test_an_empty_grid_leaves_aliased_memory_as_it_was():
    np.testing.assert_array_equal(add_one(X, grid=(0,), aliases={"out": "x"}), X)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_memory_that_nobody_wrote_is_nan(dtype):
    assert np.isnan(np.asarray(add_one(jnp.zeros(4, dtype), n=0), np.float32)).all()
    assert np.isnan(add_one(jnp.zeros(4))).all()  # and so is what is made of it


@triton.jit
def mixed_kernel(a, b, out, narrow, N: tl.constexpr):
    o = tl.arange(0, N)
    square = o[:, None] * N + o[None, :]
    b_a, b_b = tl.load(a + square), tl.load(b + square)
    made = tl.dot(b_a, b_b)
    tl.store(out + square, made)
    tl.store(narrow + square, tl.where(b_a > b_b, -(b_a * b_b), b_a + made.to(tl.bfloat16)))


def test_bfloat16_is_interpreted_as_numbers():
    n = 16
    a, b = (jax.random.randint(jax.random.key(i), (n, n), -9, 9) for i in range(2))
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)  # whole numbers: exact in any order
    kinds = {"out": jnp.float32, "narrow": jnp.bfloat16}
    outputs = {name: jax.ShapeDtypeStruct((n, n), kind) for name, kind in kinds.items()}
    made = triton_call(mixed_kernel, inputs={"a": a, "b": b}, outputs=outputs, grid=(1,), N=n)
    out, narrow = made.values()
    dot = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    np.testing.assert_array_equal(out, dot)
    expected = jnp.where(a > b, -(a * b), a + jnp.asarray(out).astype(jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(narrow, np.float32), np.asarray(expected, np.float32))


def test_integers_that_nobody_wrote_stand_out():
    out = add_one(jnp.zeros(4, jnp.int32), n=0)
    np.testing.assert_array_equal(out, np.full(4, np.iinfo(np.int32).max))


def test_zeroed_outputs():
    np.testing.assert_array_equal(add_one(jnp.full(4, 7.0), zeroed=["out"]), [1.0, 1.0, 1.0, 0.0])


@pytest.mark.parametrize("jit", [False, True])
def test_aliased_outputs_start_as_their_input_which_stays(jit):
    x = jnp.arange(4.0)
    run = functools.partial(add_one, aliases={"out": "x"}, zeroed=["out"])
    out = (jax.jit(run) if jit else run)(x)
    np.testing.assert_array_equal(out, [1.0, 2.0, 3.0, 3.0])
    np.testing.assert_array_equal(x, np.arange(4.0))


# vmap


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 0), (None, 1)])
@pytest.mark.parametrize("jit", [False, True])
def test_vmap(axes, jit):
    xs = X if axes[0] is None else np.stack([X, X + 1, -X], axes[0])
    ys = Y if axes[1] is None else np.stack([Y, 2 * Y, Y - 1], axes[1])
    run = jax.vmap(total_of, axes)
    out = (jax.jit(run) if jit else run)(xs, ys)
    rows = [x if a is None else np.moveaxis(x, a, 0) for x, a in zip((xs, ys), axes, strict=True)]
    np.testing.assert_allclose(out, np.broadcast_to(2 * rows[0] + rows[1], (3, 10)), rtol=1e-6)


@pytest.mark.parametrize("outer", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("inner", [(0, None), (None, 0), (0, 0)])
def test_nested_vmap(outer, inner):
    shape = {0: 2, 1: 3}
    make = lambda which: tuple(
        shape[level] for level, axes in enumerate((outer, inner)) if axes[which] == 0
    )
    keys = jax.random.split(jax.random.key(0))
    xs, ys = (jax.random.normal(key, (*make(i), 4)) for i, key in enumerate(keys))
    out = jax.vmap(jax.vmap(total_of, inner), outer)(xs, ys)

    def expanded(a, which):
        a = np.asarray(a)
        a = a if inner[which] == 0 else np.expand_dims(a, -2)
        return a if outer[which] == 0 else np.expand_dims(a, 0)

    expected = np.broadcast_to(2 * expanded(xs, 0) + expanded(ys, 1), (2, 3, 4))
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_vmap_of_nothing():
    out = jax.vmap(total_of, (0, None))(jnp.zeros((0, 10)), Y)
    assert out.shape == (0, 10)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 1, 3)])
def test_vmap_of_a_grid_of_any_rank(shape):
    xs = np.arange(2.0 * np.prod(shape), dtype=np.float32).reshape(2, *shape)
    y = np.linspace(1.0, 2.0, 3, dtype=np.float32)
    expected = xs + (y if len(shape) == 3 else y[0])
    np.testing.assert_allclose(jax.vmap(on_grid, (0, None))(xs, y), expected, rtol=1e-6)
    # no axis is left, or the kernel looks at those that are
    assert "scan[" in str(jax.make_jaxpr(jax.vmap(on_grid, (0, None)))(xs, y))


def test_vmap_takes_an_axis_that_the_kernel_does_not_look_at():
    xs, y = np.arange(12.0, dtype=np.float32).reshape(2, 2, 3), np.ones(1, np.float32)
    run = jax.vmap(on_plane, (0, None))
    np.testing.assert_array_equal(run(xs, y), xs + 1)
    assert "scan[" not in str(jax.make_jaxpr(run)(xs, y))


def test_vmap_of_a_kernel_that_triton_interprets_itself():
    """As TRITON_INTERPRET=1 makes them."""
    from triton.runtime.interpreter import InterpretedFunction

    kernel = InterpretedFunction(add_one_kernel.fn)

    def run(x):
        bound = {"inputs": {"x": x, "n": 3}, "outputs": {"out": OUT}, "aliases": {"out": "x"}}
        return triton_call(kernel, **bound, grid=(1,), BLOCK=8)["out"]

    out = jax.vmap(run)(np.stack([X, -X]))
    np.testing.assert_array_equal(out[:, :3], np.stack([X, -X])[:, :3] + 1)


def test_nested_vmap_of_three_axes():
    xs = np.arange(24.0, dtype=np.float32).reshape(2, 2, 1, 2, 3)
    ys = np.linspace(1.0, 2.0, 6, dtype=np.float32).reshape(2, 3)
    out = jax.vmap(jax.vmap(on_grid, (0, None)))(xs, ys)
    np.testing.assert_allclose(out, xs + ys[:, None, None, None, :], rtol=1e-6)


# What is refused


def call(inputs=None, constants=None, **changes):
    options = {
        "inputs": {"x": X, "y": Y, "n": X.size} | (inputs or {}),
        "outputs": {"total": OUT, "product": OUT},
        "grid": (3,),
    }
    values = {"FACTOR": 2.0, "BLOCK": 4} | (constants or {})
    options = options | changes | {name: x for name, x in values.items() if x is not None}
    return triton_call(scaled_sum_kernel, **options)


ABSENT = {"total": OUT, "product": None}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"outputs": {"total": OUT}}, TypeError, r"`product` is missing"),
        ({"constants": {"BLOCK": None}}, TypeError, r"`BLOCK` is missing"),
        ({"constants": {"NOPE": 1}}, TypeError, r"`NOPE` is none of them"),
        ({"inputs": {"total": X}}, TypeError, r"`total` is given twice"),
        ({"inputs": {"y": 2.0}}, TypeError, r"`y` must be an array, an int or None; got 2.0"),
        ({"inputs": {"y": True}}, TypeError, r"`y` must be an array, an int or None; got True"),
        ({"inputs": {"y": "Y"}}, TypeError, r"`y` must be an array, an int or None; got 'Y'"),
        ({"inputs": {"y": Y.astype(complex)}}, TypeError, r"`y` is of complex128"),
        ({"grid": ()}, ValueError, r"`grid` must be one to three ints"),
        ({"grid": (1, 1, 1, 1)}, ValueError, r"`grid` must be one to three ints"),
        ({"grid": (1.5,)}, ValueError, r"`grid` must be .* got \(1.5,\)"),
        ({"grid": 3}, TypeError, r"`grid` must be a sequence; got 3"),
        ({"grid": (1, 70000)}, ValueError, r"`grid` must .* got \(1, 70000\)"),
        ({"zeroed": "total"}, TypeError, r"`zeroed` must be a sequence of names; got 'total'"),
        ({"zeroed": ["n"]}, ValueError, r"`zeroed` names \['n'\]; the outputs are"),
        ({"outputs": {"total": X.shape, "product": None}}, TypeError, r"output `total` must be a"),
        ({"outputs": OUT}, TypeError, r"`outputs` must map names"),
        ({"constants": {"BLOCK": [4]}}, TypeError, r"constant `BLOCK` must be hashable; got \[4\]"),
        ({"inputs": {"y": [1j] * 10}}, TypeError, r"`y` is of complex128"),
        ({"inputs": {"n": 2**63}}, ValueError, r"`n` must fit 64 bits"),
        ({"num_warps": 3}, ValueError, r"`num_warps` must be a power of two up to 32; got 3"),
        ({"num_stages": 0}, ValueError, r"`num_stages` must be an int, at least 1; got 0"),
        ({"options": {"maxnregg": 64}}, ValueError, r"\['maxnregg'\], .*'maxnreg'"),
        ({"options": {"num_warps": 8}}, ValueError, r"\['num_warps'\] are arguments"),
        ({"options": {"num_ctas": 2}}, ValueError, r"JAX launches .* num_ctas=1 only"),
        ({"options": {"launch_pdl": True}}, ValueError, r"JAX launches .* launch_pdl=False"),
        ({"options": {"extern_libs": {}}}, TypeError, r"option `extern_libs` must be hashable"),
        (
            {"inputs": {"x": X[:4]}, "aliases": {"total": "x"}},
            ValueError,
            r"output `total` is float32\[10\], input `x` is float32\[4\]",
        ),
        ({"aliases": {"total": "n"}}, ValueError, r"input `n` is no array"),
        ({"aliases": {"total": "nope"}}, ValueError, r"input `nope` is no array"),
        ({"outputs": ABSENT, "aliases": {"product": "x"}}, ValueError, r"`product` is absent"),
        ({"aliases": {"total": "x", "product": "x"}}, ValueError, r"one input to two outputs"),
    ],
)
def test_a_call_that_would_go_wrong_is_refused(changes, error, words):
    with pytest.raises(error, match=r"`triton_call\(scaled_sum_kernel\)`: .*" + words):
        call(**changes)


def test_a_random_key_is_refused():
    with pytest.raises(TypeError, match=r"`triton_call\(scaled_sum_kernel\)`: .*`y` is of key"):
        call(inputs={"y": jax.random.key(0)})


def test_a_plain_function_is_no_kernel():
    with pytest.raises(TypeError, match=r"`kernel` must be made by `triton.jit`"):
        triton_call(len, inputs={"x": X}, outputs={}, grid=(1,))


def test_a_tuned_kernel_is_none_alone():
    tuned = triton.autotune([triton.Config({"BLOCK": 4})], key=[])(scaled_sum_kernel)
    with pytest.raises(TypeError, match=r"by `triton.jit` alone; .* Pass its `.fn`"):
        triton_call(tuned, inputs={"x": X, "y": Y, "n": 10}, outputs={}, grid=(3,), FACTOR=2.0)


def test_a_constant_is_no_input():
    with pytest.raises(TypeError, match=r"`factor` is a `tl.constexpr` of the kernel"):
        triton_call(_weighted, inputs={"x": X, "factor": 3}, outputs={}, grid=(1,))
    with pytest.raises(TypeError, match=r"`x` is no `tl.constexpr` of the kernel"):
        triton_call(_weighted, inputs={}, outputs={}, grid=(1,), x=3, factor=3)


# Constants


@triton.jit
def product_kernel(x, out, C: tl.constexpr, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(out + o, tl.load(x + o) * 3 * C * 1000000000)


def product(x, c):
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    bound = {"inputs": {"x": x}, "outputs": {"out": out}}
    return triton_call(product_kernel, **bound, grid=(1,), C=c, B=x.size)["out"]


def test_constants_that_are_equal_and_not_alike():
    whole = np.ones(4, np.int32)
    wrapped = np.float32(-1294967296)  # 3e9 in 32 bits
    for c in (1, 1.0, 1, np.int64(1), np.float32(1)):
        right = wrapped if isinstance(c, int | np.integer) else 3e9
        np.testing.assert_array_equal(product(whole, c), right)
    both = jax.jit(lambda x: [product(x, c) for c in (1, 1.0)])(whole)
    np.testing.assert_array_equal(both, [[wrapped] * 4, [3e9] * 4])


def test_which_constants_are_one():
    nan = lambda: Exact(float("nan"))
    assert nan() == nan()
    assert hash(nan()) == hash(nan())
    assert Exact(True) != Exact(1)
    assert Exact(0.0) != Exact(-0.0)
    assert Exact((0.0,)) != Exact((-0.0,))


# What the interpreter can do


@triton.jit
def reduced_kernel(x, total, most, sums, fused, B: tl.constexpr):
    o = tl.arange(0, B)
    v = tl.load(x + o)
    tl.store(total, tl.sum(v))
    tl.store(most, tl.argmax(v, 0))
    tl.store(sums + o, tl.cumsum(v, 0))
    tl.store(fused + o, tl.fma(v, v, v))


def test_reductions_of_bfloat16():
    x = jnp.array([-3, 5, -8, 1, 2, -1, 6, -6], jnp.bfloat16)
    one = lambda kind: jax.ShapeDtypeStruct((1,), kind)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    shapes = {"total": one(x.dtype), "most": one(jnp.int32), "sums": like, "fused": like}
    made = triton_call(reduced_kernel, inputs={"x": x}, outputs=shapes, grid=(1,), B=8)
    expected = [x.sum(), x.argmax(), jnp.cumsum(x), x * x + x]
    for actual, right in zip(made.values(), expected, strict=True):
        np.testing.assert_array_equal(actual, jnp.broadcast_to(right, actual.shape))


outer = types.ModuleType("outer")
outer.inner = types.ModuleType("inner")
outer.inner.outer, outer.inner.weighted = outer, _weighted  # modules know each other


def test_helpers_in_closures_constants_and_modules():
    helper, scale = _weighted, tl.constexpr(3.0)

    @triton.jit
    def kernel(x, out, HELPER: tl.constexpr, B: tl.constexpr):
        o = tl.arange(0, B)
        v = tl.load(x + o)
        v = helper(v, scale) + HELPER(v, 2.0) + outer.inner.outer.inner.weighted(v, 7.0)
        tl.store(out + o, v)

    bound = {"inputs": {"x": X[:8]}, "outputs": {"out": OUT}}
    made = triton_call(kernel, **bound, grid=(1,), HELPER=_weighted, B=8)["out"]
    np.testing.assert_array_equal(made[:8], X[:8] * 3 + X[:8] * 2 + X[:8] * 7)


@triton.jit
def failing_kernel(x, out, B: tl.constexpr):
    tl.store(out + tl.arange(0, B), tl.load(x + tl.arange(0, B + 1)))


def test_an_error_of_the_interpreter_names_the_kernel(caplog):
    bound = {"inputs": {"x": X[:8]}, "outputs": {"out": OUT}}
    with pytest.raises(jax.errors.JaxRuntimeError, match="InterpreterError"):
        jax.block_until_ready(triton_call(failing_kernel, **bound, grid=(1,), B=8))
    assert "Triton kernel `failing_kernel`, interpreted on the CPU, with {'B': 8}" in caplog.text


# What a GPU gets


def launches(fn, *args):
    """(launch, avals) of every call in a traced function."""
    return [
        (eqn.params["launch"], [v.aval for v in eqn.invars])
        for eqn in jax.make_jaxpr(fn)(*args).eqns
        if eqn.primitive is _triton_call.triton_call_p
    ]


def test_an_array_without_the_axis_is_not_copied():
    xs = np.stack([X, -X])
    text = str(jax.make_jaxpr(jax.vmap(total_of, (0, None)))(xs, Y))
    assert "broadcast" not in text
    ((launch, avals),) = launches(jax.vmap(total_of, (0, None)), xs, Y)
    assert launch.batch == (2, (True, False))
    assert [a.shape for a in avals] == [(2, 10), (10,)]


def test_a_batched_launch_passes_strides_and_compiles(tmp_path):
    ((launch, avals),) = launches(jax.vmap(total_of, (0, None)), np.stack([X] * 3), Y)
    plan = _triton_launch.plan(launch, avals)
    assert plan.kernel.arg_names == [
        *("x", "y", "n", "total", "product", "FACTOR", "BLOCK", "size"),
        *("stride_x", "stride_total", "stride_product"),
    ]
    # x, y, n, two outputs, the size of the batch, and the strides
    assert plan.parameters == [(0,), (0,), 10, (0,), (0,), 3, 10, 10, 10]
    assert plan.grid == (3, 3, 1)
    with _settings.override(cache_dir=str(tmp_path)):
        compiled = _triton_call.compile_launch(launch, avals, HOPPER)
    assert compiled.name == "scaled_sum_kernel_batched"
    assert ".target sm_90" in compiled.code
    assert compiled.code.count(".param .") >= len(plan.parameters)


@pytest.mark.parametrize("spread", [(3, 1), (2, 2)], ids=["one_axis", "two_axes"])
def test_each_program_of_a_batched_launch_has_its_own_slices(spread):
    """The kernel that a GPU gets, interpreted; programs beyond the batch do nothing."""
    xs = np.stack([X, X + 1, -X])
    ((launch, avals),) = launches(jax.vmap(total_of, (0, None)), xs, Y)
    plan = _triton_launch.plan(launch, avals)
    total, product = np.full_like(xs, np.nan), np.full_like(xs, np.nan)
    constants = launch.parameters[5:]
    given = [xs, Y, 10, total, product, *constants, *plan.parameters[5:]]
    _triton_interpret.run(plan.kernel, given, (plan.grid[0], *spread))
    np.testing.assert_allclose(total, 2 * xs + Y, rtol=1e-6)
    np.testing.assert_allclose(product, xs * Y, rtol=1e-6)


def test_a_batched_kernel_has_names_of_its_own():
    """The kernel that a GPU gets, interpreted."""
    xs = np.stack([X[:8], -X[:8]])

    def run(x):
        inputs = {"x": x, "stride_x": 3, "index": 2, "kernel": 5, "tl_": 4, "size": 7}
        outputs = {"out": jax.ShapeDtypeStruct(x.shape, x.dtype)}
        bound = {"inputs": inputs, "outputs": outputs}
        return triton_call(named_kernel, **bound, grid=(1,), i_v=6, B=8)["out"]

    expected = xs * 3 + 20 + 500 + 4000 + 70000 + 6
    np.testing.assert_array_equal(jax.vmap(run)(xs), expected)
    ((launch, avals),) = launches(jax.vmap(run), xs)
    plan = _triton_launch.plan(launch, avals)
    out = np.full_like(xs, np.nan)
    given = [xs, 3, 2, 5, 4, 7, out, *launch.parameters[7:], *plan.parameters[7:]]
    _triton_interpret.run(plan.kernel, given, plan.grid)
    np.testing.assert_array_equal(out, expected)


def test_more_programs_than_an_axis_holds_take_two_axes():
    many = jax.ShapeDtypeStruct((100_000, 4), jnp.float32)
    ((launch, avals),) = launches(jax.vmap(total_of), many, many)
    assert _triton_launch.plan(launch, avals).grid == (1, 65535, 2)


def test_absent_arrays_and_ones_are_not_parameters():
    ((launch, avals),) = launches(lambda x: scaled_sum(x, None, wanted=(True, False)), X[:1])
    plan = _triton_launch.plan(launch, avals)
    assert plan.parameters == [(0,), (0,)]  # n = 1 is compiled in
    assert plan.signature.parameters[:5] == (np.float32, None, 1, np.float32, None)


def test_zeroed_outputs_are_cleared_by_the_launch():
    ((launch, avals),) = launches(lambda x: add_one(x, zeroed=["out"]), X)
    assert _triton_launch.plan(launch, avals).parameters == [(0,), 3, (40,)]
    ((launch, avals),) = launches(lambda x: add_one(x, zeroed=["out"], aliases={"out": "x"}), X)
    assert _triton_launch.plan(launch, avals).parameters == [(0,), 3, (0,)]


def test_an_aliased_array_gets_the_axis_of_its_output():
    run = jax.vmap(lambda x, y: scaled_alias(x, y), (None, 0))
    ((launch, avals),) = launches(run, X, np.stack([Y, Y, Y]))
    (array, out) = launch.aliases[0]
    assert avals[array].shape == launch.results()[out][0] == (3, 10)
    np.testing.assert_allclose(run(X, np.stack([Y, Y, Y])), [2 * X + Y] * 3, rtol=1e-6)


def scaled_alias(x, y):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    sizes = {"grid": (1,), "FACTOR": 2.0, "BLOCK": 16}
    return triton_call(
        scaled_sum_kernel,
        inputs={"x": x, "y": y, "n": x.size},
        outputs={"total": out, "product": None},
        aliases={"total": "x"},
        **sizes,
    )["total"]


# Bundles


class Offset(NamedTuple):
    """Numbers to add, `step` apart; TWICE counts them twice."""

    base: Any
    step: Any
    TWICE: tl.constexpr


class Affine(NamedTuple):
    FACTOR: tl.constexpr
    KIND: tl.constexpr
    limit: Any
    offset: Any


@triton.jit
def _offset(offset, o, N: tl.constexpr):
    b = tl.load(offset.base + o * offset.step)
    if offset.TWICE:
        b = b * 2.0
    return b


@triton.jit
def _affine(x, o, affine, N: tl.constexpr):
    if affine.FACTOR is not None:
        x = affine.FACTOR * x
    if affine.offset is not None:
        moved = Offset(affine.offset.base + 1, affine.offset.step, affine.offset.TWICE)
        x += _offset(moved, o, N)
    if affine.KIND == "square":
        x = x * x
    if affine.limit is not None:
        x = tl.minimum(x, affine.limit)
    return x


@triton.jit(do_not_specialize=("affine.limit", "affine.offset.step"))
def affine_kernel(affine, x, out, N: tl.constexpr):
    """min((FACTOR x + offset[1:])^2, limit); each member but KIND may be absent."""
    o = tl.arange(0, N)
    tl.store(out + o, _affine(tl.load(x + o), o, affine, N))


def affine(x, values=None, factor=None, kind="", limit=None, step=1, twice=False, **options):
    offset = None if values is None else Offset(values, step, twice)
    return triton_call(
        affine_kernel,
        inputs={"x": x, "affine": Affine(factor, kind, limit, offset)},
        outputs={"out": jax.ShapeDtypeStruct(x.shape, x.dtype)},
        grid=(1,),
        N=x.shape[-1],
        **options,
    )["out"]


def test_results_are_in_the_order_of_the_kernels_parameters():
    """A GPU takes the memory of results one after another, whatever the order of the mapping."""
    wide = jax.ShapeDtypeStruct((12,), jnp.float32)

    def call(x):
        return triton_call(
            scaled_sum_kernel,
            inputs={"n": 10, "y": Y, "x": x},
            outputs={"product": wide, "total": OUT},
            grid=(3,),
            FACTOR=2.0,
            BLOCK=4,
        )

    ((launch, _),) = launches(call, X)
    leaves = [*map(repr, (launch.parameters[i] for i in (0, 1, 3, 4)))]
    assert leaves == [repr(x) for x in (Array(0), Array(1), Output(0), Output(1))]
    assert [shape for shape, _ in launch.out] == [(10,), (12,)]
    made = call(X)
    assert list(made) == ["product", "total"]
    np.testing.assert_allclose(made["total"], 2 * X + Y, rtol=1e-6)
    np.testing.assert_allclose(made["product"][:10], X * Y, rtol=1e-6)


@triton.jit
def out_first_kernel(out, x, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(out + o, tl.load(x + o))


def test_an_array_behind_an_output_is_refused():
    with pytest.raises(ValueError, match=r"`x` comes after the output `out`.*Move the outputs"):
        triton_call(
            out_first_kernel,
            inputs={"x": X[:8]},
            outputs={"out": jax.ShapeDtypeStruct((8,), jnp.float32)},
            grid=(1,),
            B=8,
        )


V = np.arange(18, dtype=np.float32) / 8
BUNDLES = {
    "absent": ({}, lambda x: x),
    "constants": ({"factor": 3.0, "kind": "square"}, lambda x: 9 * x * x),
    "nested": ({"values": V}, lambda x: x + V[1:9]),
    "nested_constant": ({"values": V, "twice": True, "step": 2}, lambda x: x + 2 * V[1:17:2]),
    "integer": ({"limit": 2, "factor": 2}, lambda x: np.minimum(2 * x, 2)),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_bundles_interpreted(name):
    options, expected = BUNDLES[name]
    np.testing.assert_allclose(affine(X[:8], **options), expected(X[:8]), rtol=1e-6)


@pytest.mark.parametrize("name", BUNDLES)
def test_bundles_compiled(name, tmp_path):
    options, _ = BUNDLES[name]
    ((launch, avals),) = launches(lambda x: affine(x, **options), X[:8])
    with _settings.override(cache_dir=str(tmp_path)):
        text = _triton_call.compile_launch(launch, avals, HOPPER).ttir
    (signature,) = [line for line in text.splitlines() if "tt.func public" in line]
    parameters = 2 + ("limit" in options) + 2 * ("values" in options)
    assert signature.count("!tt.ptr<f32>") + signature.count(": i32 loc") == parameters
    assert len(_triton_launch.plan(launch, avals).parameters) == parameters
    # code of absent members is not there
    assert ("minnumf" in text or "minimumf" in text) == ("limit" in options)
    assert text.count("tt.load") == 1 + ("values" in options)


class Inner(NamedTuple):
    base: Any
    SCALE: tl.constexpr


class Outer(NamedTuple):
    """Has an absent member before the inner bundle, and no constant behind it."""

    limit: Any
    absent: Any
    inner: Inner


@triton.jit
def _inner_value(outer, i):
    if outer.inner is not None:
        return tl.load(outer.inner.base + i) * outer.inner.SCALE
    else:
        return 0.0


@triton.jit
def inner_constants_kernel(outer, out):
    if tl.load(outer.inner.base) < 0.0:
        return
    total = tl.load(outer.inner.base) * outer.inner.SCALE
    for i in range(1, outer.limit):
        if i > 2:
            total += _inner_value(outer, i)
    tl.store(out, total)


def sum_of_inner(x):
    return triton_call(
        inner_constants_kernel,
        inputs={"outer": Outer(x.size, None, Inner(x, 2.0))},
        outputs={"out": jax.ShapeDtypeStruct((1,), jnp.float32)},
        grid=(1,),
    )["out"]


@pytest.mark.skipif(
    triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.5.0",
    reason="Triton 3.6 takes an array of one number for a loop's end, which NumPy 2.5 refuses",
)
def test_constants_of_inner_bundles_interpreted():
    # eight roundings of float32: NumPy adds in another order
    np.testing.assert_allclose(sum_of_inner(X[5:]), [2.0 * (X[5] + X[8:].sum())], rtol=1e-6)


def test_constants_of_inner_bundles_reach_compiled_loops_and_branches(tmp_path):
    ((launch, avals),) = launches(sum_of_inner, X[5:])
    with _settings.override(cache_dir=str(tmp_path)):
        text = _triton_call.compile_launch(launch, avals, HOPPER).ttir
    assert "2.000000e+00" in text


def test_ints_are_left_unspecialised_by_path(tmp_path):
    def code(limit):
        ((launch, avals),) = launches(lambda x: affine(x, V, limit=limit, step=1), X[:8])
        assert _triton_launch.plan(launch, avals).parameters == [limit, (0,), 1, (0,), (0,)]
        with _settings.override(cache_dir=str(tmp_path)):
            return _triton_call.compile_launch(launch, avals, HOPPER).ttir

    assert code(16) == code(3) == code(1)
    assert code(16).count("tt.divisibility = 16") == 3  # of the arrays


@triton.jit
def limit(x, affine):
    return tl.minimum(x, affine.limit)


@triton.jit
def limit_kernel(affine, x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, limit(tl.load(x + o), affine))


def test_a_helper_may_have_the_name_of_a_member_that_it_reads():
    bound = {"inputs": {"affine": Affine(None, "", 2, None), "x": X[:8]}, "outputs": {"out": OUT}}
    made = triton_call(limit_kernel, **bound, grid=(1,), N=8)["out"]
    np.testing.assert_array_equal(made[:8], np.minimum(X[:8], 2))


def test_a_path_of_no_parameter_is_refused():
    @triton.jit(do_not_specialize=("nothing.limit",))
    def kernel(x, out):
        tl.store(out, tl.load(x))

    with pytest.raises(ValueError, match=r"`do_not_specialize` names 'nothing.limit'"):
        triton_call(kernel, inputs={"x": X}, outputs={"out": OUT}, grid=(1,))


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 1)])
def test_vmap_over_a_member(axes, tmp_path):
    xs = np.stack([X[:8], -X[:8], X[1:9]]) if axes[0] == 0 else X[:8]
    values = V if axes[1] is None else np.stack([V, 2 * V, -V], axes[1])
    run = jax.vmap(lambda x, v: affine(x, v, factor=0.5, limit=2), axes)
    rows = V if axes[1] is None else np.moveaxis(values, axes[1], 0)
    expected = np.broadcast_to(np.minimum(0.5 * xs + rows[..., 1:9], 2), (3, 8))
    np.testing.assert_allclose(run(xs, values), expected, rtol=1e-6)
    # the kernel that a GPU gets compiles, and gives the same numbers interpreted
    ((launch, avals),) = launches(run, xs, values)
    plan = _triton_launch.plan(launch, avals)
    assert ("stride_affine_offset_base" in plan.kernel.arg_names) == (axes[1] is not None)
    with _settings.override(cache_dir=str(tmp_path)):
        assert _triton_call.compile_launch(launch, avals, HOPPER).name == "affine_kernel_batched"
    out = np.full((3, 8), np.nan, np.float32)
    offset = Bundle(Offset, (np.ascontiguousarray(rows), 1, Exact(False)))
    own = [Bundle(Affine, (Exact(0.5), Exact(""), 2, offset)), xs, out, Exact(8)]
    count = len(plan.kernel.arg_names) - len(own)
    _triton_interpret.run(plan.kernel, [*own, *plan.parameters[-count:]], plan.grid)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_a_member_shares_its_memory_with_an_output():
    values = np.arange(8, dtype=np.float32)
    options = {"aliases": {"out": "affine.offset.base"}, "step": 0}
    np.testing.assert_array_equal(affine(X[:8], values, **options), X[:8] + 1)
    np.testing.assert_array_equal(values, np.arange(8))  # the caller's array stays
    ((launch, _),) = launches(lambda x, v: affine(x, v, **options), X[:8], values)
    member = launch.parameters[0].members[3].members[0]
    assert isinstance(member, Array)
    assert launch.aliases == ((member.index, 0),)


def test_a_member_that_is_no_array_is_named():
    with pytest.raises(
        TypeError, match=r"`affine.limit` must be an array, an int or None; got 0.5"
    ):
        affine(X[:8], limit=0.5)
    with pytest.raises(TypeError, match=r"constant `affine.FACTOR` must be hashable; got \[1\]"):
        affine(X[:8], factor=[1])
    named = NamedTuple("named", [("values", Any)])(X)
    with pytest.raises(TypeError, match=r"`y.values` has the name 'values', which Triton needs"):
        call(inputs={"y": named})


def test_a_cost_travels_with_the_launch():
    cost = Cost(flops=16, bytes_accessed=64)
    ((launch, _),) = launches(lambda x: affine(x, cost=cost), X[:8])
    assert launch.cost == cost


# Meshes


def on_two(fn, in_specs):
    auto = (jax.sharding.AxisType.Auto,)
    if len(jax.devices("cpu")) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("i",), axis_types=auto, devices=jax.devices("cpu")[:2])
    options = {"mesh": mesh, "in_specs": in_specs, "out_specs": P("i"), "check_vma": True}
    return jax.jit(jax.shard_map(fn, **options))


def test_shard_map():
    xs, ys = np.concatenate([X, X + 1]), np.concatenate([Y, -Y])
    np.testing.assert_allclose(on_two(total_of, (P("i"), P("i")))(xs, ys), 2 * xs + ys, rtol=1e-6)
    out = on_two(total_of, (P("i"), P()))(xs, Y)  # y is alike on both devices
    np.testing.assert_allclose(out, 2 * xs + np.concatenate([Y, Y]), rtol=1e-6)


def test_outputs_differ_between_devices_where_any_input_does():
    def checked(x, y):
        out = total_of(x, y)
        assert manual.varying_axes(out) == {"i"}
        return out

    ys = np.concatenate([Y, -Y])
    out = on_two(checked, (P(), P("i")))(X, ys)
    np.testing.assert_allclose(out, 2 * np.concatenate([X, X]) + ys, rtol=1e-6)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_vmap_inside_shard_map(axes):
    xs = np.stack([X, X + 1, X - 1, 3 * X])
    ys = np.stack([Y, -Y, Y + 1, 0 * Y])
    given = [a if axis == 0 else a[0] for a, axis in zip((xs, ys), axes, strict=True)]
    specs = tuple(P("i") if axis == 0 else P() for axis in axes)
    out = on_two(jax.vmap(total_of, axes), specs)(*given)
    np.testing.assert_allclose(out, 2 * given[0] + given[1], rtol=1e-6)
