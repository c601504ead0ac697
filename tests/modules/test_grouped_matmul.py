"""`grouped_matmul`: edges, errors, values that must not matter, and transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel import _settings
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import kernel_registry
from ejkernel.modules.operations.grouped_matmul import grouped_matmul
from tests import host

M, K, N, G = 11, 4, 3, 3


@pytest.fixture(scope="module", autouse=True)
def arrays():
    # JAX arrays cannot be made while tests are collected: see conftest.py
    global SIZES
    SIZES = jnp.asarray([4, 0, 5], jnp.int32)


ROWS = (slice(0, 4), slice(4, 4), slice(4, 9))


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def operands():
    return normal(1, (M, K)), normal(2, (G, K, N))


def naive(lhs, rhs, bounds=ROWS):
    out = jnp.zeros((lhs.shape[0], rhs.shape[-1]))
    for group, rows in enumerate(bounds):
        product = jnp.matmul(lhs[rows], rhs[group], precision="highest")
        out = out.at[rows].set(product)
    return out


def loss(fn):
    def of(*xs):
        out = fn(*xs)
        return jnp.sum(jnp.sin(out) * jnp.arange(1, out.size + 1).reshape(out.shape))

    return of


def assert_close(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5)


def test_values_and_gradients():
    xs = operands()
    ours = functools.partial(grouped_matmul, group_sizes=SIZES)
    assert_close(ours(*xs), naive(*xs))
    expected = jax.grad(loss(naive), argnums=(0, 1))(*xs)
    assert_close(jax.grad(loss(ours), argnums=(0, 1))(*xs), expected)
    assert not expected[1][1].any()


def test_forward_mode_and_second_order():
    xs, directions = operands(), (normal(3, (M, K)), normal(4, (G, K, N)))
    ours = functools.partial(grouped_matmul, group_sizes=SIZES)
    actual, expected = (
        jax.jit(jax.jvp, static_argnums=0)(jax.grad(loss(fn), argnums=(0, 1)), xs, directions)
        for fn in (ours, naive)
    )
    assert_close(actual, expected)

    def twice(fn):
        return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(loss(fn), argnums=1)(x, xs[1]) ** 2)))

    assert_close(twice(ours)(xs[0]) / 1e3, twice(naive)(xs[0]) / 1e3)


def test_traced_sizes_compile_once():
    xs, run = operands(), jax.jit(grouped_matmul)
    for sizes in ([4, 0, 5], [0, 0, 0], [0, 11, 0], [1, 1, 1]):
        cuts = np.cumsum([0, *sizes])
        bounds = [slice(a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]  # noqa: RUF007
        assert_close(run(*xs, jnp.asarray(sizes, jnp.int32)), naive(*xs, bounds))
    assert run._cache_size() == 1


def test_vmap_over_rows_and_sizes():
    lhs, rhs = normal(1, (2, M, K)), operands()[1]
    sizes = jnp.asarray([[4, 0, 5], [2, 2, 7]], jnp.int32)
    gradient = jax.grad(loss(grouped_matmul), argnums=(0, 1))
    actual = jax.jit(jax.vmap(gradient, in_axes=(0, None, 0)))(lhs, rhs, sizes)
    expected = [gradient(lhs[i], rhs, sizes[i]) for i in range(2)]
    assert_close(actual, jax.tree.map(lambda *x: jnp.stack(x), *expected))


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_nan_after_the_last_group_reaches_nothing(transpose_rhs):
    lhs, rhs = operands()
    matrices = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    spoiled = lhs.at[9:].set(jnp.nan)

    def ours(lhs, rhs):
        return grouped_matmul(lhs, rhs, SIZES, transpose_rhs=transpose_rhs)

    out, pull = jax.vjp(ours, spoiled, matrices)
    assert_close(out, naive(lhs, rhs))
    dout = normal(5, (M, N))
    _, clean = jax.vjp(ours, lhs, matrices)
    assert_close(pull(dout.at[9:].set(jnp.nan)), clean(dout))
    assert not pull(dout)[0][9:].any()
    moved = jax.jvp(ours, (spoiled, matrices), (spoiled, matrices))[1]
    assert_close(moved, jax.jvp(ours, (lhs, matrices), (lhs, matrices))[1])


def test_nan_stays_in_its_group():
    lhs, rhs = operands()
    gradient = jax.grad(lambda r: grouped_matmul(lhs.at[3].set(jnp.nan), r, SIZES).sum())(rhs)
    assert jnp.isnan(gradient[0]).all()
    assert jnp.isfinite(gradient[1:]).all()
    out = grouped_matmul(lhs, rhs.at[0].set(jnp.nan), SIZES)
    assert jnp.isnan(out[:4]).all()
    assert jnp.isfinite(out[4:]).all()


def test_shards_of_the_groups_sum_to_the_whole():
    lhs, rhs = operands()
    whole = grouped_matmul(lhs, rhs, SIZES)
    parts = [grouped_matmul(lhs, rhs[i : i + 1], SIZES, group_offset=i) for i in range(G)]
    assert_close(sum(parts), whole)
    chained = None
    for i in range(G):
        chained = grouped_matmul(lhs, rhs[i : i + 1], SIZES, group_offset=i, existing_out=chained)
    assert_close(chained, whole)
    # [1], as Megablox takes it, and traced
    traced = jax.jit(lambda i: grouped_matmul(lhs, rhs[2:], SIZES, group_offset=i))
    assert_close(traced(jnp.asarray([2])), parts[2])


def test_existing_out_gets_the_gradient_of_rows_that_are_not_computed():
    lhs, rhs = operands()
    existing = normal(6, (M, N))
    out, pull = jax.vjp(lambda e: grouped_matmul(lhs, rhs, SIZES, existing_out=e), existing)
    assert_close(out[9:], existing[9:])
    dout = normal(7, (M, N))
    assert_close(pull(dout)[0], dout.at[:9].set(0))


def test_too_large_and_negative_sizes_touch_no_other_rows():
    lhs, rhs = operands()
    out = grouped_matmul(lhs, rhs, jnp.asarray([4, -3, 100]))
    assert_close(out, naive(lhs, rhs, (slice(0, 4), slice(4, 4), slice(4, M))))
    with _settings.override(debug=True), pytest.raises(ValueError, match="sum to at most"):
        grouped_matmul(lhs, rhs, jnp.asarray([4, 0, 100]))


@pytest.mark.parametrize(
    ("m", "k", "n", "g"), [(0, 4, 3, 2), (5, 0, 3, 2), (5, 4, 0, 2), (5, 4, 3, 0)]
)
def test_empty_axes(m, k, n, g):
    sizes = jnp.full(g, m // max(g, 1), jnp.int32)
    existing = normal(3, (m, n))

    def ours(lhs, rhs, existing):
        return grouped_matmul(lhs, rhs, sizes, existing_out=existing)

    xs = normal(1, (m, k)), normal(2, (g, k, n)), existing
    out, pull = jax.vjp(ours, *xs)
    done = int(sizes.sum())
    assert_close(out, existing.at[:done].set(0))
    assert_close(pull(jnp.ones_like(out))[2], jnp.ones_like(out).at[:done].set(0))


def test_batched_form():
    lhs, rhs = normal(1, (2, 3, 5, K)), normal(2, (2, 3, K, N))
    expected = jnp.matmul(lhs, rhs, precision="highest")
    assert_close(grouped_matmul(lhs, rhs), expected)
    assert_close(grouped_matmul(lhs, rhs.swapaxes(2, 3), transpose_rhs=True), expected)
    gradient = jax.grad(loss(grouped_matmul), argnums=(0, 1))(lhs, rhs)
    wanted = jax.grad(loss(functools.partial(jnp.matmul, precision="highest")), argnums=(0, 1))
    assert_close(gradient, wanted(lhs, rhs))


@pytest.mark.parametrize("dtype", [jnp.float32, "float32", np.dtype("float32")])
def test_preferred_element_type_in_any_spelling(dtype):
    lhs, rhs = (x.astype(jnp.bfloat16) for x in operands())
    assert grouped_matmul(lhs, rhs, SIZES).dtype == jnp.bfloat16
    out = grouped_matmul(lhs, rhs, SIZES, preferred_element_type=dtype)
    assert out.dtype == jnp.float32
    assert_close(out, naive(lhs.astype(jnp.float32), rhs.astype(jnp.float32)))


@pytest.mark.parametrize("form", ["ragged", "batched"])
@pytest.mark.parametrize("narrow", ["lhs", "rhs"])
def test_mixed_dtypes_are_promoted(form, narrow):
    """As `jax.lax.ragged_dot` does; each gradient has the dtype of its operand."""
    lhs, rhs = operands()
    if form == "batched":
        lhs, rhs = lhs[None, None], rhs[None, :1]
    lhs, rhs = (lhs, rhs.astype("bfloat16")) if narrow == "rhs" else (lhs.astype("bfloat16"), rhs)
    wide = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    more = () if form == "batched" else (SIZES,)
    run = lambda lhs, rhs: grouped_matmul(lhs, rhs, *more)
    out, pull = jax.vjp(run, lhs, rhs)
    expected, pull_wide = jax.vjp(run, *wide)
    assert out.dtype == jnp.float32
    if form == "ragged":
        assert out.dtype == jax.lax.ragged_dot(lhs, rhs, SIZES).dtype
    assert_close(out, expected)
    for gradient, exact, x in zip(pull(out), pull_wide(out), (lhs, rhs), strict=True):
        assert gradient.dtype == x.dtype
        assert_close(gradient.astype(jnp.float32), exact.astype(x.dtype).astype(jnp.float32))
    assert grouped_matmul(lhs, rhs, *more, preferred_element_type="bfloat16").dtype == jnp.bfloat16
    assert jax.jvp(run, (lhs, rhs), (lhs, rhs))[1].dtype == jnp.float32


def test_columns_split_over_devices():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("x",))
    lhs, rhs = normal(1, (M, K)), normal(2, (G, K, 4))

    def ours(lhs, rhs):
        return grouped_matmul(
            lhs,
            rhs,
            SIZES,
            mesh=mesh,
            in_specs={"rhs": PartitionSpec(None, None, "x")},
            out_specs=PartitionSpec(None, "x"),
        )

    expected = jax.value_and_grad(loss(naive), argnums=(0, 1))(lhs, rhs)
    assert_close(jax.jit(jax.value_and_grad(loss(ours), argnums=(0, 1)))(lhs, rhs), expected)
    with pytest.raises(ValueError, match="group_offset"):
        grouped_matmul(
            lhs,
            rhs,
            SIZES,
            mesh=mesh,
            in_specs={"rhs": PartitionSpec("x")},
            out_specs=PartitionSpec(),
        )


def test_no_array_grows_with_groups_times_rows():
    m, groups = 512, 64
    xs = normal(1, (m, K)), normal(2, (groups, K, N)), jnp.full(groups, 8, jnp.int32)
    gradient = jax.jit(jax.grad(lambda *a: grouped_matmul(*a).sum(), argnums=(0, 1)))
    temporary = gradient.lower(*xs).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 4 * groups * m * min(K, N)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"group_sizes": None}, ValueError, "needs `group_sizes`"),
        ({"group_sizes": host.asarray([1, 2])}, ValueError, "must have 3 entries"),
        ({"group_sizes": host.ones(3)}, TypeError, "group_sizes"),
        ({"rhs": host.normal(1, (G, N, K))}, ValueError, "transpose_rhs"),
        ({"rhs": host.normal(1, (K, N))}, ValueError, "rhs"),
        ({"rhs": host.normal(1, (1, G, K, N))}, ValueError, "does not go with"),
        ({"lhs": host.normal(1, (2, M, K))}, ValueError, "group_sizes"),
        ({"lhs": host.ones((M, K), jnp.int32)}, TypeError, "lhs"),
        ({"rhs": np.ones((G, K, N), np.int8)}, TypeError, "`rhs` must have a dtype of kind F"),
        (
            {"lhs": host.normal(1, (1, G, M, K)), "rhs": host.normal(2, (1, G, K, N))},
            ValueError,
            "belong",
        ),
        ({"preferred_element_type": "int8"}, TypeError, "float dtype"),
        ({"preferred_element_type": "nonsense"}, TypeError, "must be a dtype"),
        ({"group_offset": host.asarray([1, 2])}, ValueError, "scalar"),
        ({"group_offset": 0.5}, TypeError, "group_offset"),
        ({"group_offset": 1}, ValueError, r"in \[0, 0\]: `rhs` holds 3 of the 3 groups .*; got 1"),
        ({"group_offset": -1}, ValueError, "`group_offset` must be in .*; got -1"),
        ({"existing_out": host.normal(1, (M, N + 1))}, ValueError, "existing_out"),
        ({"existing_out": host.normal(1, (M, N)).astype(jnp.bfloat16)}, ValueError, "existing_out"),
        ({"platform": "triton"}, UnsupportedError, "triton"),
    ],
)
def test_errors(change, error, message):
    lhs, rhs = operands()
    call = {"lhs": lhs, "rhs": rhs, "group_sizes": SIZES} | host.to_jax(change)
    with pytest.raises(error, match=message):
        grouped_matmul(**call)


@pytest.mark.parametrize("name", ["plain", "batched", "offset_existing"])
def test_the_twin_of_a_call_is_a_small_call(name):
    spec = kernel_registry.spec("grouped_matmul")
    case = next(case for case in spec.cases() if case.name == name)
    args = spec.make(case, jnp.float32, jax.random.key(0))
    twin = spec.reduced(args, 4)
    assert twin.lhs.shape[-2] == 8 + args.lhs.shape[-2] % 4
    assert twin.statics() == args.statics()
    assert twin.arrays().keys() == args.arrays().keys()
    assert spec.canonicalize(spec.complete(spec.publish(twin))).lhs.shape == twin.lhs.shape
    if name != "batched":
        assert 0 < twin.group_sizes.sum() <= twin.lhs.shape[0]


def test_registered_as_a_keyword_function():
    lhs, rhs = operands()
    run = kernel_registry.get("grouped_matmul", "xla")
    assert_close(run(lhs=lhs, rhs=rhs, group_sizes=SIZES), naive(lhs, rhs))
    assert not [p for p in kernel_registry.validate_signatures() if "grouped_matmul" in p]
