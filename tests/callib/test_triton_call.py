"""Triton kernels as JAX functions: values, transformations, and what a GPU would be given."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import _settings
from ejkernel.callib import _triton_call, _triton_compile, _triton_interpret, triton_call
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
    return triton_call(
        scaled_sum_kernel,
        x,
        y,
        x.size,
        grid=(-(-x.size // block),),
        out_shape=[out if w else None for w in wanted],
        FACTOR=factor,
        BLOCK=block,
    )


def total_of(x, y):
    return scaled_sum(x, y)[0]


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
    return triton_call(grid_kernel, x, y, grid=x.shape, out_shape=[out], **sizes)[0]


@triton.jit
def plane_kernel(x, y, out, N1: tl.constexpr):
    """x[i, j] + y[0] with a program for each element, which looks at two axes alone."""
    o = tl.program_id(0) * N1 + tl.program_id(axis=1)
    tl.store(out + o, tl.load(x + o) + tl.load(y))


def on_plane(x, y):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return triton_call(plane_kernel, x, y, grid=x.shape, out_shape=[out], N1=x.shape[1])[0]


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
    return triton_call(
        add_one_kernel, x, n, grid=grid, out_shape=[out], BLOCK=x.shape[-1], **options
    )[0]


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
    assert scaled_sum(X, Y, wanted=(False, False)) == [None, None]


@pytest.mark.parametrize(("factor", "block"), [(3.0, 4), (0.5, 16), (-1, 1)])
def test_constants(factor, block):
    total, _ = scaled_sum(X, Y, factor, block=block)
    np.testing.assert_allclose(total, factor * X + Y, rtol=1e-6)


def test_integers_of_numpy_are_integers():
    np.testing.assert_array_equal(add_one(X[:4], np.int64(2), zeroed=[0])[:2], [1.0, 1.0])


def test_an_empty_grid_gives_zeros():
    total, product = scaled_sum(jnp.zeros(0), None)
    assert total.shape == product.shape == (0,)
    np.testing.assert_array_equal(add_one(jnp.ones(4), grid=(0,)), np.zeros(4))
    np.testing.assert_array_equal(add_one(jnp.ones(4), grid=(2, 0)), np.zeros(4))


def test_an_empty_grid_leaves_aliased_memory_as_it_was():
    np.testing.assert_array_equal(add_one(X, grid=(0,), aliases={0: 0}), X)


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
    kinds = [jax.ShapeDtypeStruct((n, n), kind) for kind in (jnp.float32, jnp.bfloat16)]
    out, narrow = triton_call(mixed_kernel, a, b, grid=(1,), out_shape=kinds, N=n)
    dot = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    np.testing.assert_array_equal(out, dot)
    expected = jnp.where(a > b, -(a * b), a + jnp.asarray(out).astype(jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(narrow, np.float32), np.asarray(expected, np.float32))


def test_integers_that_nobody_wrote_stand_out():
    out = add_one(jnp.zeros(4, jnp.int32), n=0)
    np.testing.assert_array_equal(out, np.full(4, np.iinfo(np.int32).max))


def test_zeroed_outputs():
    np.testing.assert_array_equal(add_one(jnp.full(4, 7.0), zeroed=[0]), [1.0, 1.0, 1.0, 0.0])


@pytest.mark.parametrize("jit", [False, True])
def test_aliased_outputs_start_as_their_input_which_stays(jit):
    x = jnp.arange(4.0)
    run = functools.partial(add_one, aliases={0: 0}, zeroed=[0])
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
    run = lambda x: triton_call(kernel, x, 3, grid=(1,), out_shape=[OUT], aliases={0: 0}, BLOCK=8)
    out = jax.vmap(run)(np.stack([X, -X]))[0]
    np.testing.assert_array_equal(out[:, :3], np.stack([X, -X])[:, :3] + 1)


def test_nested_vmap_of_three_axes():
    xs = np.arange(24.0, dtype=np.float32).reshape(2, 2, 1, 2, 3)
    ys = np.linspace(1.0, 2.0, 6, dtype=np.float32).reshape(2, 3)
    out = jax.vmap(jax.vmap(on_grid, (0, None)))(xs, ys)
    np.testing.assert_allclose(out, xs + ys[:, None, None, None, :], rtol=1e-6)


# What is refused


def call(*inputs, outputs=2, **changes):
    out = jax.ShapeDtypeStruct(X.shape, jnp.float32)
    options = {"grid": (3,), "out_shape": [out] * outputs, "FACTOR": 2.0, "BLOCK": 4} | changes
    options = {name: value for name, value in options.items() if value is not None}
    return triton_call(scaled_sum_kernel, *(inputs or (X, Y, X.size)), **options)


@pytest.mark.parametrize(
    ("arguments", "changes", "error", "words"),
    [
        ((X, Y), {}, TypeError, r"2 inputs, 2 outputs .* `product` is missing"),
        ((X, Y, 10), {"BLOCK": None}, TypeError, r"`BLOCK` is missing"),
        ((X, Y, 10), {"NOPE": 1}, TypeError, r"`NOPE` is none of the last ones"),
        ((X,) * 9, {}, TypeError, r"9 inputs.* fewer than those"),
        ((X, 2.0, 10), {}, TypeError, r"`y` must be an array, an int or None; got 2.0"),
        ((X, True, 10), {}, TypeError, r"`y` must be an array, an int or None; got True"),
        ((X, Y.astype(complex), 10), {}, TypeError, r"`y` is of complex128"),
        ((), {"grid": ()}, ValueError, r"`grid` must be one to three ints"),
        ((), {"grid": (1, 1, 1, 1)}, ValueError, r"`grid` must be one to three ints"),
        ((), {"grid": (1.5,)}, ValueError, r"`grid` must be .* got \(1.5,\)"),
        ((), {"grid": 3}, TypeError, r"`grid` must be a sequence; got 3"),
        ((), {"zeroed": 0}, TypeError, r"`zeroed` must be a sequence; got 0"),
        ((), {"out_shape": [X.shape] * 2}, TypeError, r"`out_shape\[0\]` must be a jax.Shape"),
        ((), {"out_shape": OUT}, TypeError, r"`out_shape` must be a sequence"),
        ((), {"BLOCK": [4]}, TypeError, r"constant `BLOCK` must be hashable; got \[4\]"),
        ((X, [1j] * 10, 10), {}, TypeError, r"`y` is of complex128"),
        ((X, Y, 2**63), {}, ValueError, r"`n` must fit 64 bits"),
        ((), {"num_warps": 3}, ValueError, r"`num_warps` must be a power of two up to 32; got 3"),
        ((), {"num_stages": 0}, ValueError, r"`num_stages` must be an int, at least 1; got 0"),
        ((), {"options": {"maxnregg": 64}}, ValueError, r"\['maxnregg'\], .*'maxnreg'"),
        ((), {"options": {"num_warps": 8}}, ValueError, r"\['num_warps'\] are arguments"),
        ((), {"options": {"num_ctas": 2}}, ValueError, r"JAX launches .* num_ctas=1 only"),
        ((), {"options": {"launch_pdl": True}}, ValueError, r"JAX launches .* launch_pdl=False"),
        ((), {"options": {"extern_libs": {}}}, TypeError, r"option `extern_libs` must be hashable"),
        ((), {"grid": (1, 70000)}, ValueError, r"`grid` must .* got \(1, 70000\)"),
        ((), {"zeroed": [7]}, ValueError, r"`zeroed` names the outputs \[7\]; there are 2"),
        ((X[:4], Y, 10), {"aliases": {0: 0}}, ValueError, r"input 0 is float32\[4\], output 0 is"),
        ((), {"aliases": {2: 0}}, ValueError, r"input 2 is no array"),
        ((), {"aliases": {5: 0}}, ValueError, r"input 5 is no array"),
        ((), {"aliases": {0: 3}}, ValueError, r"output 3 is absent"),
        ((), {"aliases": {0: 1, 1: 1}}, ValueError, r"one output to two inputs"),
    ],
)
def test_a_call_that_would_go_wrong_is_refused(arguments, changes, error, words):
    with pytest.raises(error, match=r"`triton_call\(scaled_sum_kernel\)`: .*" + words):
        call(*arguments, **changes)


def test_a_random_key_is_refused():
    with pytest.raises(TypeError, match=r"`triton_call\(scaled_sum_kernel\)`: .*`y` is of key"):
        call(X, jax.random.key(0), 10)


def test_a_plain_function_is_no_kernel():
    with pytest.raises(TypeError, match=r"`kernel` must be made by `triton.jit`"):
        triton_call(len, X, grid=(1,), out_shape=[])


def test_a_tuned_kernel_is_none_alone():
    tuned = triton.autotune([triton.Config({"BLOCK": 4})], key=[])(scaled_sum_kernel)
    with pytest.raises(TypeError, match=r"by `triton.jit` alone; .* Pass its `.fn`"):
        triton_call(tuned, X, Y, 10, grid=(3,), out_shape=[OUT, OUT], FACTOR=2.0)


def test_a_constant_is_no_input():
    with pytest.raises(TypeError, match=r"`factor` is a `tl.constexpr` of the kernel, and no inp"):
        triton_call(_weighted, X, 3, grid=(1,), out_shape=[])


# Constants


@triton.jit
def product_kernel(x, out, C: tl.constexpr, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(out + o, tl.load(x + o) * 3 * C * 1000000000)


def product(x, c):
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return triton_call(product_kernel, x, grid=(1,), out_shape=[out], C=c, B=x.size)[0]


def test_constants_that_are_equal_and_not_alike():
    whole = np.ones(4, np.int32)
    wrapped = np.float32(-1294967296)  # 3e9 in 32 bits
    for c in (1, 1.0, 1, np.int64(1), np.float32(1)):
        right = wrapped if isinstance(c, int | np.integer) else 3e9
        np.testing.assert_array_equal(product(whole, c), right)
    both = jax.jit(lambda x: [product(x, c) for c in (1, 1.0)])(whole)
    np.testing.assert_array_equal(both, [[wrapped] * 4, [3e9] * 4])


def test_which_constants_are_one():
    nan = lambda: _triton_compile.Exact(float("nan"))
    assert nan() == nan()
    assert hash(nan()) == hash(nan())
    assert _triton_compile.Exact(True) != _triton_compile.Exact(1)
    assert _triton_compile.Exact(0.0) != _triton_compile.Exact(-0.0)
    assert _triton_compile.Exact((0.0,)) != _triton_compile.Exact((-0.0,))


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
    shapes = [one(x.dtype), one(jnp.int32), like, like]
    made = triton_call(reduced_kernel, x, grid=(1,), out_shape=shapes, B=8)
    expected = [x.sum(), x.argmax(), jnp.cumsum(x), x * x + x]
    for actual, right in zip(made, expected, strict=True):
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

    made = triton_call(kernel, X[:8], grid=(1,), out_shape=[OUT], HELPER=_weighted, B=8)[0]
    np.testing.assert_array_equal(made[:8], X[:8] * 3 + X[:8] * 2 + X[:8] * 7)


@triton.jit
def failing_kernel(x, out, B: tl.constexpr):
    tl.store(out + tl.arange(0, B), tl.load(x + tl.arange(0, B + 1)))


def test_an_error_of_the_interpreter_names_the_kernel(caplog):
    with pytest.raises(jax.errors.JaxRuntimeError, match="InterpreterError"):
        jax.block_until_ready(triton_call(failing_kernel, X[:8], grid=(1,), out_shape=[OUT], B=8))
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
    plan = _triton_call._plan(launch, avals)
    assert plan.kernel.arg_names == [
        *("x", "y", "n", "total", "product", "size"),
        *("stride_x", "stride_total", "stride_product"),
        *("FACTOR", "BLOCK"),
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
    plan = _triton_call._plan(launch, avals)
    total, product = np.full_like(xs, np.nan), np.full_like(xs, np.nan)
    given = [xs, Y, 10, total, product, *plan.parameters[5:]]
    grid = (plan.grid[0], *spread)
    _triton_interpret.run(plan.kernel, given, _triton_compile.values(launch.constants), grid)
    np.testing.assert_allclose(total, 2 * xs + Y, rtol=1e-6)
    np.testing.assert_allclose(product, xs * Y, rtol=1e-6)


def test_a_batched_kernel_has_names_of_its_own():
    """The kernel that a GPU gets, interpreted."""
    xs = np.stack([X[:8], -X[:8]])

    def run(x):
        out = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
        return triton_call(named_kernel, x, 3, 2, 5, 4, 7, grid=(1,), out_shape=out, i_v=6, B=8)[0]

    expected = xs * 3 + 20 + 500 + 4000 + 70000 + 6
    np.testing.assert_array_equal(jax.vmap(run)(xs), expected)
    ((launch, avals),) = launches(jax.vmap(run), xs)
    plan = _triton_call._plan(launch, avals)
    out = np.full_like(xs, np.nan)
    given = [xs, 3, 2, 5, 4, 7, out, *plan.parameters[7:]]
    _triton_interpret.run(plan.kernel, given, _triton_compile.values(launch.constants), plan.grid)
    np.testing.assert_array_equal(out, expected)


def test_more_programs_than_an_axis_holds_take_two_axes():
    many = jax.ShapeDtypeStruct((100_000, 4), jnp.float32)
    ((launch, avals),) = launches(jax.vmap(total_of), many, many)
    assert _triton_call._plan(launch, avals).grid == (1, 65535, 2)


def test_absent_arrays_and_ones_are_not_parameters():
    ((launch, avals),) = launches(lambda x: scaled_sum(x, None, wanted=(True, False)), X[:1])
    plan = _triton_call._plan(launch, avals)
    assert plan.parameters == [(0,), (0,)]  # n = 1 is compiled in
    assert plan.signature.parameters == (np.float32, None, 1, np.float32, None)


def test_zeroed_outputs_are_cleared_by_the_launch():
    ((launch, avals),) = launches(lambda x: add_one(x, zeroed=[0]), X)
    assert _triton_call._plan(launch, avals).parameters == [(0,), 3, (40,)]
    ((launch, avals),) = launches(lambda x: add_one(x, zeroed=[0], aliases={0: 0}), X)
    assert _triton_call._plan(launch, avals).parameters == [(0,), 3, (0,)]


def test_an_aliased_array_gets_the_axis_of_its_output():
    run = jax.vmap(lambda x, y: scaled_alias(x, y), (None, 0))
    ((launch, avals),) = launches(run, X, np.stack([Y, Y, Y]))
    (array, out) = launch.aliases[0]
    assert avals[array].shape == launch.results()[out][1] == (3, 10)
    np.testing.assert_allclose(run(X, np.stack([Y, Y, Y])), [2 * X + Y] * 3, rtol=1e-6)


def scaled_alias(x, y):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    sizes = {"grid": (1,), "FACTOR": 2.0, "BLOCK": 16}
    return triton_call(
        scaled_sum_kernel, x, y, x.size, out_shape=[out, None], aliases={0: 0}, **sizes
    )[0]


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
