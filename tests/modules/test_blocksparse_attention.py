"""`blocksparse_attention`: what is skipped, edges, patterns, errors and memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel.errors import UnsupportedError
from ejkernel.modules import block_mask, blocksparse_attention, flash_attention
from ejkernel.ops import FwdParams
from tests import host

T, S, H, G, D, SIZE = 22, 27, 4, 2, 8, 8
NQ, NK = 3, 4


def arrays(seed=0, batch=2):
    keys = jax.random.split(jax.random.key(seed), 3)
    return (
        jax.random.normal(keys[0], (batch, T, H, D)),
        jax.random.normal(keys[1], (batch, S, G, D)),
        jax.random.normal(keys[2], (batch, S, G, D)),
    )


def some_blocks(*lead):
    mask = np.random.default_rng(3).random((*lead, NQ, NK)) < 0.5
    mask[..., 0, :] = False
    return jnp.asarray(mask)


def dense(query, key, value, mask, **options):
    """The same call of dense attention."""
    mask = mask[(None,) * (4 - mask.ndim)]
    mask = jnp.repeat(jnp.repeat(mask, SIZE, axis=2), SIZE, axis=3)[:, :, :T, :S]
    return flash_attention(query, key, value, attention_mask=mask, **options)


def loss(fn):
    return lambda *xs: jnp.sum(jnp.sin(fn(*xs)) * jnp.arange(1.0, 1 + D))


def assert_close(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5)


def test_hand_derived_values():
    """Two queries a block, equal scores: means of the listed values."""
    query, key = jnp.ones((1, 4, 1, 1)), jnp.zeros((1, 6, 1, 1))
    value = jnp.arange(6.0).reshape(1, 6, 1, 1) ** 2
    mask = jnp.asarray([[True, False, True], [False, False, False]])
    out, lse = blocksparse_attention(query, key, value, mask, 2, return_lse=True)
    np.testing.assert_allclose(out.ravel(), [(0 + 1 + 16 + 25) / 4] * 2 + [0, 0], rtol=1e-6)
    np.testing.assert_allclose(lse.ravel()[:2], np.log(4), rtol=1e-6)
    assert np.isneginf(lse.ravel()[2:]).all()


def test_a_traced_mask_compiles_once():
    xs = arrays()
    ours = lambda q, k, v, m: blocksparse_attention(q, k, v, m, SIZE, causal=True)
    run = jax.jit(jax.value_and_grad(loss(ours), argnums=(0, 1, 2)))
    for mask in (some_blocks(), jnp.zeros((NQ, NK), bool), jnp.ones((NQ, NK), bool)):
        fn = functools.partial(dense, mask=mask, causal=True)
        expected = jax.value_and_grad(loss(fn), argnums=(0, 1, 2))(*xs)
        assert_close(run(*xs, mask), expected)
    assert run._cache_size() == 1


def test_garbage_in_blocks_that_no_row_lists_changes_nothing():
    query, key, value = arrays()
    mask = some_blocks(H).at[:, :, 1].set(False).at[:, 1].set(False)
    bad_key, bad_value = (x.at[:, SIZE : 2 * SIZE].set(jnp.nan) for x in (key, value))
    bad_query = query.at[:, SIZE : 2 * SIZE].set(jnp.nan)
    gradient = jax.value_and_grad(
        loss(lambda *xs: blocksparse_attention(*xs, mask, SIZE)), argnums=(0, 1, 2)
    )
    assert_close(gradient(bad_query, bad_key, bad_value), gradient(query, key, value))


def test_one_head_does_not_read_the_blocks_of_another():
    query, key, value = arrays()
    mask = jnp.ones((H, NQ, NK), bool).at[1, :, 2].set(False)
    spoiled = value.at[:, 2 * SIZE : 3 * SIZE, 0].set(jnp.inf)
    out = blocksparse_attention(query, key, spoiled, mask, SIZE)
    assert jnp.isfinite(out[:, :, 1:]).all()  # head 0 lists the block that head 1 leaves out
    assert not jnp.isfinite(out[:, :, 0]).any()


@pytest.mark.parametrize(
    "lead", [(), *(pytest.param(x, marks=pytest.mark.slow) for x in ((H,), (2, H)))]
)
def test_forward_mode_and_vmap(lead):
    xs, directions, mask = arrays(), arrays(seed=1), some_blocks(*lead)
    ours = lambda *a: blocksparse_attention(*a, mask, SIZE)
    theirs = functools.partial(dense, mask=mask)
    actual, expected = (jax.jvp(jax.jit(fn), xs, directions) for fn in (ours, theirs))
    assert_close(actual, expected)
    stacked = [jnp.stack([a, b]) for a, b in zip(xs, directions, strict=True)]
    gradient = jax.jit(jax.vmap(jax.grad(loss(ours), argnums=(0, 1, 2))))(*stacked)
    one = jax.grad(loss(theirs), argnums=(0, 1, 2))
    assert_close(gradient, jax.tree.map(lambda *x: jnp.stack(x), one(*xs), one(*directions)))


def test_heads_and_rows_split_over_devices():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("x",))
    xs, mask = arrays(), some_blocks(H)
    spec = PartitionSpec(None, None, "x")
    ours = lambda *a: blocksparse_attention(
        *a, mask, SIZE, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec
    )
    expected = jax.grad(loss(functools.partial(dense, mask=mask)), argnums=(0, 1, 2))(*xs)
    assert_close(jax.jit(jax.grad(loss(ours), argnums=(0, 1, 2)))(*xs), expected)


def test_smaller_blocks_that_list_the_same_pairs_give_the_same():
    xs, mask = arrays(), some_blocks()
    finer = jnp.repeat(jnp.repeat(mask, 2, axis=0), 2, axis=1)[:6, :7]
    assert_close(blocksparse_attention(*xs, finer, 4), blocksparse_attention(*xs, mask, SIZE))


@pytest.mark.parametrize(("t", "s"), [(0, 9), (9, 0), (1, 1)])
def test_empty_and_single_axes(t, s):
    query, key, value = (jnp.ones((1, n, 2, 4)) * i for i, n in ((1, t), (2, s), (3, s)))
    mask = jnp.ones((-(-t // 4), -(-s // 4)), bool)
    fn = lambda q, k, v: blocksparse_attention(q, k, v, mask, 4, return_lse=True)
    (out, lse), pull = jax.vjp(fn, query, key, value)
    assert out.shape == query.shape
    assert lse.shape == (1, 2, t)
    assert_close(out, jnp.full(out.shape, 3.0 if s else 0.0))
    assert all(jnp.isfinite(g).all() for g in pull((jnp.ones_like(out), jnp.zeros_like(lse))))


def test_temporaries_are_linear_in_the_length():
    """A list of blocks and one tile: far from the 4 * t * t bytes of one head's scores."""
    t, size = 8192, 128
    x = jax.ShapeDtypeStruct((1, t, 1, 16), jnp.float32)
    mask = jax.ShapeDtypeStruct((t // size, t // size), bool)
    gradient = jax.grad(lambda *xs: blocksparse_attention(*xs, size).sum(), argnums=(0, 1, 2))
    used = jax.jit(gradient).lower(x, x, x, mask).compile().memory_analysis().temp_size_in_bytes
    assert used < 16 * 4 * t * 16 + 8 * 4 * size * size


def test_only_listed_blocks_are_computed():
    """A loop whose steps are counted by the values it sees: nan spreads only from listed blocks."""
    query, key, value = arrays(batch=1)
    everything = jnp.ones((NQ, NK), bool)
    out = blocksparse_attention(query, key, value.at[:, 0].set(jnp.nan), everything, SIZE)
    assert jnp.isnan(out).all()
    fewer = everything.at[1, 0].set(False)
    out = blocksparse_attention(query, key, value.at[:, 0].set(jnp.nan), fewer, SIZE)
    assert jnp.isfinite(out[:, SIZE : 2 * SIZE]).all()
    assert jnp.isnan(out[:, :SIZE]).all()


def test_a_pattern_equals_its_table():
    xs = arrays()
    pattern = block_mask.bigbird(window=0, num_random=1, seed=5) & block_mask.causal()
    table = jnp.asarray(pattern.build(T, S, SIZE))
    assert 0 < table.mean() < 1
    actual = jax.jit(lambda *a: blocksparse_attention(*a, block_size=SIZE, mask_builder=pattern))
    assert_close(actual(*xs), blocksparse_attention(*xs, table, SIZE))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sparsity_mask": None}, ValueError, "got neither"),
        ({"mask_builder": block_mask.causal()}, ValueError, "got both"),
        ({"mask_builder": "causal"}, TypeError, "mask_builder"),
        ({"block_size": 0}, ValueError, "at least 1; got 0"),
        ({"block_size": 16}, ValueError, "2 x 2 blocks for 22 queries"),
        ({"sparsity_mask": host.ones((NQ, NK + 1), bool)}, ValueError, "got 3 x 5"),
        ({"sparsity_mask": host.ones((3, NQ, NK), bool)}, ValueError, "1 or 4 heads; got 3"),
        ({"sparsity_mask": host.ones((3, 1, NQ, NK), bool)}, ValueError, "sparsity_mask"),
        ({"sparsity_mask": host.ones(NK, bool)}, ValueError, "per head"),
        ({"query": host.ones((2, T, 3, D))}, ValueError, "3 heads of `query` must be a multiple"),
        ({"value": host.ones((2, S, G, D), jnp.bfloat16)}, TypeError, "dtype of `query`"),
        ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale"),
        ({"sliding_window": -3}, ValueError, "sliding_window"),
        ({"softmax_aux": host.ones(H)}, ValueError, "ambiguous"),
        ({"q_segment_ids": host.zeros((2, T), jnp.int32)}, ValueError, "kv_segment_ids"),
        ({"attention_mask": host.ones((T, S), bool)}, ValueError, "mask"),
        ({"fwd_params": FwdParams(q_blocksize=32)}, ValueError, "`block_size` of the mask"),
        ({"platform": "cudnn"}, UnsupportedError, "cudnn"),
    ],
)
def test_errors(change, error, message):
    call = dict(zip(("query", "key", "value"), arrays(), strict=True))
    call |= {"sparsity_mask": some_blocks(), "block_size": SIZE} | host.to_jax(change)
    with pytest.raises(error, match=message):
        blocksparse_attention(**call)
