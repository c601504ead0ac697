"""`sparse_matmul` and `sampled_matmul`: values, each other's gradients, edges, errors, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel.kernels import kernel_registry
from ejkernel.modules import sampled_matmul, sparse_matmul
from tests import host

M, K, N, SIZE = 10, 7, 6, 4
ROWS, COLS = np.array([0, 2, 2, 1, 2], np.int32), np.array([1, 0, 0, 1, 1], np.int32)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def operands():
    return normal(1, 5, SIZE, SIZE), normal(2, K, N)


def written_out(blocks, rows=ROWS, cols=COLS, shape=(M, K)):
    """The matrix in full, block by block."""
    full = np.zeros((12, 8))
    for block, row, col in zip(np.asarray(blocks), rows, cols, strict=True):
        full[4 * row : 4 * row + 4, 4 * col : 4 * col + 4] += block
    return full[: shape[0], : shape[1]]


def assert_close(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5)


def test_product_with_duplicates_and_partial_blocks():
    blocks, dense = operands()
    out = sparse_matmul(blocks, ROWS, COLS, dense, shape=(M, K))
    assert_close(out, written_out(blocks) @ np.asarray(dense))


def test_sampled_blocks_with_duplicates_and_partial_blocks():
    lhs, rhs = normal(3, M, N), normal(4, N, K)
    out = sampled_matmul(lhs, rhs, ROWS, COLS, SIZE)
    product = np.zeros((12, 8))
    product[:M, :K] = np.asarray(lhs) @ np.asarray(rhs)
    for block, row, col in zip(out, ROWS, COLS, strict=True):
        assert_close(block, product[4 * row : 4 * row + 4, 4 * col : 4 * col + 4])


def test_gradients_of_a_single_block_in_bfloat16():
    """A loop of one step is unrolled; XLA on CPU then refused a transposed factor."""
    lhs, rhs = (normal(i, *s).astype(jnp.bfloat16) for i, s in ((1, (17, 17)), (2, (17, 8))))
    at = jnp.zeros(1, jnp.int32)
    loss = lambda lhs, rhs: sampled_matmul(lhs, rhs, at, at, 8).astype(jnp.float32).sum()
    dlhs, drhs = jax.grad(loss, argnums=(0, 1))(lhs, rhs)
    expected = np.zeros((17, 17))
    expected[:8] = np.asarray(rhs, np.float32).sum(axis=1)
    np.testing.assert_allclose(np.asarray(dlhs, np.float32), expected, rtol=1e-2, atol=1e-2)
    expected = np.asarray(lhs, np.float32)[:8].sum(axis=0)[:, None].repeat(8, axis=1)
    np.testing.assert_allclose(np.asarray(drhs, np.float32), expected, rtol=1e-2, atol=1e-2)


def test_each_is_the_gradient_of_the_other():
    blocks, dense = operands()
    dout = normal(5, M, N)
    _, pull = jax.vjp(lambda b, d: sparse_matmul(b, ROWS, COLS, d, shape=(M, K)), blocks, dense)
    dblocks, ddense = pull(dout)
    assert_close(dblocks, sampled_matmul(dout, dense.T, ROWS, COLS, SIZE))
    assert_close(ddense, written_out(blocks).T @ np.asarray(dout))
    lhs, rhs = normal(3, M, N), normal(4, N, K)
    _, pull = jax.vjp(lambda a, b: sampled_matmul(a, b, ROWS, COLS, SIZE), lhs, rhs)
    dlhs, drhs = pull(blocks)
    assert_close(dlhs, sparse_matmul(blocks, ROWS, COLS, rhs.T, shape=(M, K)))
    assert_close(drhs, np.asarray(lhs).T @ written_out(blocks))


def test_traced_indices_beyond_the_shape_are_dropped():
    blocks, dense = operands()
    rows, cols = ROWS.copy(), COLS.copy()
    rows[0], cols[3] = 3, -1
    kept = np.array([1, 2, 4])
    spoiled = blocks.at[0].set(jnp.nan)

    @jax.jit
    def both(rows, cols):
        fn = lambda b, d: sparse_matmul(b, rows, cols, d, shape=(M, K))
        out, pull = jax.vjp(fn, spoiled, dense)
        return out, pull(jnp.ones_like(out))

    out, (dblocks, ddense) = both(rows, cols)
    matrix = written_out(blocks[kept], rows[kept], cols[kept])
    assert_close(out, matrix @ np.asarray(dense))
    assert_close(ddense, matrix.T @ np.ones((M, N)))
    assert not dblocks[np.array([0, 3])].any()
    sampled = jax.jit(sampled_matmul, static_argnums=4)
    taken = sampled(normal(3, M, N), normal(4, N, K), rows, cols, SIZE)
    assert not taken[np.array([0, 3])].any()
    assert taken[1].any()


def test_what_a_block_holds_beyond_the_edge_never_matters():
    blocks, dense = operands()
    spoiled = blocks.at[0, :, 3].set(jnp.nan).at[4, 2:].set(jnp.inf)  # column 7, rows 10 and 11
    fn = lambda b, d: sparse_matmul(b, ROWS, COLS, d, shape=(M, K))
    out, pull = jax.vjp(fn, spoiled, dense)
    clean, pull_clean = jax.vjp(fn, blocks, dense)
    assert_close(out, clean)
    assert_close(pull(jnp.ones_like(out)), pull_clean(jnp.ones_like(out)))
    lhs = normal(3, M, N).at[9].set(jnp.nan)
    taken = sampled_matmul(lhs, normal(4, N, K), ROWS, COLS, SIZE)
    assert not taken[0, :, 3].any()  # beyond column 6
    assert not taken[4, 2:].any()  # beyond row 9


def test_forward_mode_second_order_and_vmap():
    blocks, dense = operands()
    fn = lambda b, d: sparse_matmul(b, ROWS, COLS, d, shape=(M, K))
    _, moved = jax.jvp(fn, (blocks, dense), (blocks, dense))
    assert_close(moved, 2 * fn(blocks, dense))
    gradient = jax.grad(lambda b, d: jnp.sum(fn(b, d) ** 2))
    _, twice = jax.jvp(gradient, (blocks, dense), (blocks, jnp.zeros_like(dense)))
    assert_close(twice, gradient(blocks, dense))  # quadratic in the blocks
    many = jax.vmap(fn, in_axes=(0, None))(jnp.stack([blocks, 2 * blocks]), dense)
    assert_close(many[1], 2 * many[0])
    lhs, rhs = normal(3, M, N), normal(4, N, K)
    sampled = lambda a, b: sampled_matmul(a, b, ROWS, COLS, SIZE)
    _, moved = jax.jvp(sampled, (lhs, rhs), (lhs, rhs))
    assert_close(moved, 2 * sampled(lhs, rhs))


@pytest.mark.parametrize(("nnz", "m", "k", "n"), [(0, 8, 8, 3), (2, 8, 8, 0), (1, 8, 0, 3)])
def test_empty_axes(nnz, m, k, n):
    index = jnp.zeros(nnz, jnp.int32)
    if k == 0:
        with pytest.raises(ValueError, match="`cols` must be in"):
            sparse_matmul(jnp.ones((nnz, 4, 4)), index, index, jnp.ones((k, n)), shape=(m, k))
        return
    out = sparse_matmul(jnp.ones((nnz, 4, 4)), index, index, jnp.ones((k, n)), shape=(m, k))
    assert out.shape == (m, n)
    assert not out.any()
    taken = sampled_matmul(jnp.ones((m, n)), jnp.ones((n, k)), index, index, 4)
    assert taken.shape == (nnz, 4, 4)
    assert not taken.any()


def test_columns_split_over_devices():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("x",))
    blocks, dense = operands()
    fn = lambda d: sparse_matmul(
        blocks,
        ROWS,
        COLS,
        d,
        shape=(M, K),
        mesh=mesh,
        in_specs={"dense": PartitionSpec(None, "x")},
        out_specs=PartitionSpec(None, "x"),
    )
    assert_close(jax.jit(fn)(dense), written_out(blocks) @ np.asarray(dense))


def test_no_full_matrix_exists():
    """The matrix would be 4 * m * k bytes; temporaries stay near the operands."""
    m = k = 4096
    nnz, size, n = 64, 32, 8
    index = jax.ShapeDtypeStruct((nnz,), jnp.int32)
    blocks = jax.ShapeDtypeStruct((nnz, size, size), jnp.float32)
    dense = jax.ShapeDtypeStruct((k, n), jnp.float32)

    def gradient(blocks, rows, cols, dense):
        fn = lambda b, d: jnp.sum(sparse_matmul(b, rows, cols, d, shape=(m, k)) ** 2)
        return jax.grad(fn, argnums=(0, 1))(blocks, dense)

    compiled = jax.jit(gradient).lower(blocks, index, index, dense).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * m * k / 32

    def other(lhs, rhs, rows, cols):
        fn = lambda a, b: jnp.sum(sampled_matmul(a, b, rows, cols, size) ** 2)
        return jax.grad(fn, argnums=(0, 1))(lhs, rhs)

    rhs = jax.ShapeDtypeStruct((n, k), jnp.float32)
    compiled = jax.jit(other).lower(dense, rhs, index, index).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * m * k / 32


@pytest.mark.parametrize("form", [lambda x: x, host.to_jax], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": np.array([0, 2, 3, 1, 2])}, ValueError, r"`rows` must .*3\).* got 3 at entry 2"),
        ({"cols": np.array([0, 1, 0, 1, -1])}, ValueError, r"\[0, 2\).*-1 at entry 4"),
        ({"rows": ROWS[:4]}, ValueError, "rows"),
        ({"rows": ROWS.astype(np.float32)}, TypeError, "rows"),
        ({"shape": (M, K + 1)}, ValueError, "k=7"),
        ({"shape": (-1, K)}, ValueError, "must be in|m >= 0"),
        ({"blocks": host.normal(1, (5, SIZE, SIZE + 1))}, ValueError, "blocks"),
        ({"blocks": host.normal(1, (5, 0, 0))}, ValueError, "at least one row"),
        ({"dense": host.ones((K, N), jnp.bfloat16)}, TypeError, "dtype of `blocks`"),
    ],
)
def test_errors(change, error, message, form):
    blocks, dense = operands()
    call = {"blocks": blocks, "rows": ROWS, "cols": COLS, "dense": dense, "shape": (M, K)}
    with pytest.raises(error, match=message):
        sparse_matmul(**call | form(change))


@pytest.mark.parametrize("form", [lambda x: x, host.to_jax], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": np.array([0, 2, 3, 1, 2])}, ValueError, r"`rows` must .*3\).* got 3 at entry 2"),
        ({"block_size": 0}, ValueError, "at least 1; got 0"),
        ({"block_size": 2.0}, TypeError, "block_size"),
        ({"rhs": host.normal(4, (N + 1, K))}, ValueError, "rhs"),
        ({"rhs": host.normal(4, (N, K)).astype(jnp.bfloat16)}, TypeError, "dtype of `lhs`"),
    ],
)
def test_errors_of_sampled(change, error, message, form):
    call = {"lhs": normal(3, M, N), "rhs": normal(4, N, K), "rows": ROWS, "cols": COLS}
    with pytest.raises(error, match=message):
        sampled_matmul(**(call | {"block_size": SIZE} | form(change)))


@pytest.mark.parametrize("op", ["sparse_matmul", "sampled_matmul"])
def test_a_kernel_asked_for_by_name_refuses_bad_places_too(op):
    rows, cols = jnp.asarray([0, 7]), jnp.asarray([0, 0])
    run = kernel_registry.get(op, "xla")
    arguments = {
        "sparse_matmul": (jnp.ones((2, 4, 4)), rows, cols, jnp.ones((8, 3)), (8, 8)),
        "sampled_matmul": (jnp.ones((8, 3)), jnp.ones((3, 8)), rows, cols, 4),
    }
    with pytest.raises(ValueError, match=r"`rows`.*7"):
        run(*arguments[op])
