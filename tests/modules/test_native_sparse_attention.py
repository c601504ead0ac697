"""Native sparse attention: what is special about it, and what must not matter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import kernel_registry
from ejkernel.kernels._xla.native_sparse_attention import schedule, select, table
from ejkernel.modules import apply_native_sparse_attention, native_sparse_attention

SPEC = kernel_registry.spec("native_sparse_attention")
APPLY = kernel_registry.spec("apply_native_sparse_attention")


def arrays(t=23, heads=4, groups=2, d=6, e=5, batch=1, seed=0, gates=0):
    rng = np.random.default_rng(seed)
    shapes = [(heads, d), (groups, d), (groups, e), *[(heads,)] * gates]
    return [jnp.asarray(rng.standard_normal((batch, t, *s)), jnp.float32) for s in shapes]


def reference(*xs, spec=SPEC, **options):
    names = list(spec.args.__dataclass_fields__)[: len(xs)]
    values = spec.complete(dict(zip(names, xs, strict=True)) | options)
    return spec.reference_fn()(spec.canonicalize(values))[0]


def assert_close(actual, expected, atol=2e-5):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=atol)


def loss(fn):
    def of(*xs):
        out = fn(*xs)
        return jnp.sum(jnp.sin(out) * jnp.arange(1, out.size + 1).reshape(out.shape) / out.size)

    return of


def lists(*rows, t, groups=1):
    """The same list for every token."""
    return jnp.broadcast_to(jnp.asarray(rows, jnp.int32), (1, t, groups, len(rows)))


def dense(q, k, v, seen):
    return jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(seen)[None, None])


# What the branches see


def test_all_blocks_are_causal_attention():
    xs = arrays()
    expected = dense(*xs[:2], jnp.pad(xs[2], ((0, 0),) * 3 + ((0, 1),)), np.tri(23, dtype=bool))
    assert_close(native_sparse_attention(*xs, block_size=5), expected[..., :5])
    # a block longer than the row is the row
    assert_close(native_sparse_attention(*xs, block_counts=1, block_size=64), expected[..., :5])


def test_compressed_branch_by_hand():
    """Blocks of 4, 4 and 2 tokens: with zero queries, plain means of the blocks that are full."""
    q, k, v = arrays(t=10, heads=1, groups=1)
    ones = jnp.ones((1, 10, 1))
    out = native_sparse_attention(0 * q, k, v, g_cmp=ones, block_size=4)[0, :, 0]
    first, second = (v[0, i : i + 4, 0].mean(axis=0) for i in (0, 4))
    assert not out[:3].any()
    assert_close(out[3:7], jnp.broadcast_to(first, (4, 5)))
    # the last block has two tokens and is never complete
    assert_close(out[7:], jnp.broadcast_to((first + second) / 2, (3, 5)))


def test_window_counts_the_query_itself():
    q, k, v = arrays(t=11)
    ones = jnp.ones((1, 11, 4))
    run = functools.partial(native_sparse_attention, q, k, v, g_swa=ones)
    assert_close(run(window_size=1), jnp.repeat(v, 2, axis=2))
    ahead = np.subtract.outer(np.arange(11), np.arange(11))
    wide_v = jnp.pad(v, ((0, 0),) * 3 + ((0, 1),))
    expected = dense(q, k, wide_v, (ahead >= 0) & (ahead < 3))[..., :5]
    assert_close(run(window_size=3), expected)
    assert_close(run(window_size=2**40), native_sparse_attention(q, k, v))


def test_gates_weigh_branches_and_none_leaves_one_out():
    *xs, cmp, slc, swa = arrays(gates=3)
    run = functools.partial(
        native_sparse_attention, *xs, block_counts=2, block_size=4, window_size=3
    )
    assert_close(run(cmp, None, swa), run(cmp, 0 * slc, swa))
    assert_close(run(), run(None, jnp.ones_like(slc)))
    every = run(cmp, slc, swa)
    # linear in each gate
    assert_close((run(2 * cmp, slc, swa) + run(0 * cmp, slc, swa)) / 2, every)


# Which blocks are selected


def test_the_most_important_blocks_are_selected():
    """One block's mean key points along the queries, another's less so, the others against."""
    t, size = 24, 4
    strength = np.repeat([-1.0, 2.0, -1.0, 3.0, -1.0, -1.0], size)
    k = jnp.asarray(strength, jnp.float32)[None, :, None, None] * jnp.ones((1, t, 1, 3))
    q, _, v = arrays(t=t, heads=2, groups=1, d=3)
    q = 1 + abs(q)
    out = native_sparse_attention(q, k, v, block_counts=3, block_size=size)
    expected = apply_native_sparse_attention(q, k, v, lists(1, 3, 5, t=t), block_size=size)
    assert_close(out[:, 20:], expected[:, 20:])
    two = native_sparse_attention(q, k, v, block_counts=2, block_size=size)
    expected = apply_native_sparse_attention(q, k, v, lists(3, 5, t=t), block_size=size)
    assert_close(two[:, 20:], expected[:, 20:])


@pytest.mark.parametrize("kind", ["zero queries", "equal blocks"])
def test_ties_go_to_the_lower_index(kind):
    t, size, count = 39 * 3, 3, 4
    q, k, v = arrays(t=t, heads=6, groups=2, d=37)
    if kind == "zero queries":
        q = 0 * q
    else:
        k = jnp.tile(k[:, :size], (1, t // size, 1, 1))
    out = native_sparse_attention(q, k, v, block_counts=count, block_size=size)
    own = np.arange(t) // size
    chosen = np.stack([np.where(own < i, -1, i) for i in range(count - 1)] + [own], axis=1)
    chosen = jnp.broadcast_to(jnp.asarray(chosen)[None, :, None], (1, t, 2, count))
    expected = apply_native_sparse_attention(q, k, v, chosen, block_size=size)
    np.testing.assert_array_equal(out, expected)


def test_blocks_with_one_mean_share_their_importance():
    """Whatever a matrix product makes of equal columns; not across sequences, nan is no twin."""
    first = jnp.asarray([0, 0, 0, 0, 4, 4, 4], jnp.int32)
    blocks = table.Table(np.arange(7), np.ones(7, int), table.Tokens(first, jnp.arange(7), None))
    kc = jnp.asarray([[1.0, 2], [3, 4], [1, 2], [3, 4], [1, 2], [1, jnp.nan], [1, 2]])
    assert select.twins(blocks, kc).tolist() == [0, 1, 0, 1, 4, 5, 4]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_best_blocks_are_those_of_a_sort(dtype):
    with jax.enable_x64(dtype == "float64"):
        rng = np.random.default_rng(2)
        rows, n = 60, 35
        # few values, so that there are ties; tiny ones that a float32 holds only as subnormals
        importance = rng.choice([0.0, 1e-41, 0.25, 0.5, 0.5 + 2**-24, 3.0], (rows, n))
        importance = importance.astype(dtype)
        first = rng.integers(0, 3, rows).astype(np.int32)
        own = (first + rng.integers(0, n - 3, rows)).astype(np.int32)
        own[:2] = -1  # outside every sequence
        count = rng.integers(0, n + 2, rows).astype(np.int32)
        tokens = table.Tokens(*map(jnp.asarray, (first, own, own)))
        actual = jax.jit(select.best)(jnp.asarray(importance), tokens, jnp.asarray(count))
        for row in range(rows):
            earlier = np.arange(max(first[row], 0), max(own[row], 0))
            order = earlier[np.argsort(-importance[row, earlier], kind="stable")]
            expected = {*order[: max(count[row] - 1, 0)].tolist()} | {int(own[row])} - {-1}
            expected = expected if own[row] >= 0 else set()
            assert {*np.flatnonzero(actual[row]).tolist()} == expected


def test_bits_and_schedules_keep_a_selection():
    mask = jnp.asarray(np.random.default_rng(1).random((29, 70)) < 0.2).at[:, 7].set(True)
    np.testing.assert_array_equal(select.unpack(select.pack(mask), 70), mask)
    plan = schedule.make(mask, 4, 70)
    seen = np.zeros(mask.shape, int)
    for i in range(int(plan.count)):
        tokens, block = plan.tile(i)
        np.add.at(seen, (np.asarray(tokens)[tokens < 29], int(block)), 1)
    np.testing.assert_array_equal(seen, mask)


def test_counts_may_differ_by_token_and_head():
    xs = arrays()
    counts = jnp.asarray(np.random.default_rng(1).integers(0, 4, (1, 23, 2)))
    run = functools.partial(native_sparse_attention, *xs, block_size=4)
    by_count = jnp.stack([run(block_counts=i) for i in range(1, 4)])
    heads = jnp.repeat(jnp.maximum(counts, 1) - 1, 2, axis=2)  # below 1 means the own block
    expected = jnp.take_along_axis(by_count, heads[None, ..., None], axis=0)[0]
    assert_close(jax.jit(lambda c: run(block_counts=c))(counts), expected)


def test_block_size_matters():
    xs = arrays()
    given = lists(0, 2, t=23, groups=2)
    expected = reference(*xs, block_counts=2, block_size=7)
    assert_close(native_sparse_attention(*xs, block_counts=2, block_size=7), expected)
    assert abs(expected - reference(*xs, block_counts=2, block_size=4)).max() > 1e-2
    expected = reference(*xs, given, spec=APPLY, block_size=7)
    assert_close(apply_native_sparse_attention(*xs, given, block_size=7), expected)
    assert abs(expected - reference(*xs, given, spec=APPLY, block_size=4)).max() > 1e-2


# Lists of blocks


def test_lists_count_blocks_once_and_skip_what_is_none():
    q, k, v = arrays(groups=1, heads=2)
    run = functools.partial(apply_native_sparse_attention, q, k, v, block_size=4)
    plain = run(lists(0, 2, t=23))
    np.testing.assert_array_equal(run(lists(-1, 2, 0, 2, t=23)), plain)
    traced = jax.jit(run)  # indices beyond the blocks are refused where they are known
    for same in ((2, 0, 2, 0), (-1, 2, 0, -7), (0, 2, 6, 2**31 - 1)):
        np.testing.assert_array_equal(traced(lists(*same, t=23)), plain)
    np.testing.assert_array_equal(run(lists(0, 2, 99, t=23), block_counts=2), plain)
    counts = jnp.where(jnp.arange(23) < 12, 2, 0)[None, :, None]
    some = run(lists(0, 2, 1, t=23), block_counts=counts)
    np.testing.assert_array_equal(some[:, :12], plain[:, :12])
    assert not some[:, 12:].any()
    # of the future nothing is seen, and the own block is not added
    assert not run(lists(2, t=23))[:, :8].any()
    assert not run(lists(t=23)).any()


def test_lists_replace_the_selection():
    *xs, cmp, slc, swa = arrays(gates=3)
    given = SPEC.cases()[2].values(jnp.float32, jax.random.key(3))["block_indices"][:, :21]
    given = jnp.pad(given, ((0, 0), (0, 2), (0, 0), (0, 0)))
    options = {"block_indices": given, "block_size": 4, "window_size": 3}
    selected = apply_native_sparse_attention(*xs, given, block_size=4)
    assert_close(native_sparse_attention(*xs, None, slc, **options), slc[..., None] * selected)
    expected = reference(*xs, cmp, slc, swa, **options)
    assert_close(native_sparse_attention(*xs, cmp, slc, swa, **options), expected)
