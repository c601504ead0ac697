"""Triton's sparse attention: what it visits, its lists, patterns of all sizes, ties and configs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import interpreter

from ejkernel import _settings
from ejkernel._device import Target
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._triton.blocksparse_attention import config, lists
from ejkernel.kernels._triton.native_sparse_attention import call as nsa_call
from ejkernel.kernels._triton.native_sparse_attention import lists as nsa_lists
from ejkernel.kernels._triton.native_sparse_attention import select
from ejkernel.modules import block_mask, blocksparse_attention, flash_attention
from ejkernel.modules import native_sparse_attention as nsa
from tests.backend import BACKEND
from tests.kernels import harness

pytestmark = pytest.mark.skipif(BACKEND != "cpu", reason="runs in the interpreter, on a CPU")
SPEC = kernel_registry.spec("blocksparse_attention")
ENTRY = harness.find_entry("blocksparse_attention", "triton/gpu")
H200 = Target("gpu", "NVIDIA H200", "9.0")
BUILDERS = {
    "local": block_mask.local(1),
    "causal": block_mask.causal(),
    "strided": block_mask.strided(2),
    "global": block_mask.global_(1),
    "random": block_mask.random(1, seed=3),
    "bigbird": block_mask.bigbird(window=0, num_random=1, seed=5) & block_mask.causal(),
}


@pytest.fixture(autouse=True)
def _interpreted():
    with _settings.override(interpret=True):
        yield


def arrays(t, s, heads=2, groups=1, d=8, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((1, t, heads, d), (1, s, groups, d), (1, s, groups, d))
    return [jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)]


def arguments(xs, mask, size, **options):
    values = dict(zip(("query", "key", "value"), xs, strict=True))
    values |= {"sparsity_mask": mask, "block_size": size, **options}
    return SPEC.canonicalize(SPEC.unpack(SPEC.complete(values)))


def assert_close(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5)


# Block-sparse attention


def assert_dense_under_the_mask(builder, size, t, s, tiles=None, **options):
    """Value and gradients of ours, and of dense attention under the expanded mask."""
    xs = arrays(t, s)
    mask = jnp.asarray(builder.build(t, s, size))
    pairs = jnp.repeat(jnp.repeat(mask, size, axis=0), size, axis=1)[None, None, :t, :s]

    def sparse(*xs):
        args = arguments(xs, mask, size, **options)
        cfg = tiles or config.testing(args, "forward")
        (out,), residuals = ENTRY.fn(args, cfg)
        dout = jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        wanted = frozenset({"query", "key", "value"})
        grads = ENTRY.backward(args, cfg, (out,), residuals, (dout,), wanted)
        return out, [grads[n] for n in ("query", "key", "value")]

    def dense(*xs):
        call = functools.partial(flash_attention, attention_mask=pairs, platform="xla", **options)
        out, pull = jax.vjp(call, *xs)
        return out, list(pull(jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)))

    assert_close(jax.jit(sparse)(*xs), jax.jit(dense)(*xs))


def test_tiles_may_be_smaller_than_blocks():
    cfg = config.Config(block_q=32, block_k=16, num_stages=1)
    assert_dense_under_the_mask(
        BUILDERS["bigbird"], 64, 70, 100, cfg, causal=True, sliding_window=(80, 0)
    )


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_tiles_behind_the_last_token_do_not_count(options):
    """Tiles divide the lengths, and the mask's blocks do not."""
    cfg = config.Config(block_q=16, block_k=16, num_stages=1)
    assert_dense_under_the_mask(block_mask.local(1), 32, 48, 48, cfg, **options)


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("name", BUILDERS)
def test_every_pattern_and_block_size_is_dense_attention_under_its_mask(name, size):
    assert_dense_under_the_mask(
        BUILDERS[name], size, 2 * size + 7, 3 * size - 5, causal=True, sliding_window=(size, 0)
    )


@pytest.fixture
def products(monkeypatch):
    """Counts products of tiles."""
    count, dot = [], interpreter.InterpreterBuilder.create_dot

    def counted(*args):
        count.append(1)
        return dot(*args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", counted)
    return count


def test_only_listed_blocks_are_computed(products):
    xs = [x.astype(jnp.bfloat16) for x in arrays(48, 64)]
    mask = jnp.zeros((3, 4), bool).at[0, 0].set(True).at[2, 1:].set(True)
    args = arguments(xs, mask, 16)
    cfg = config.testing(args, "forward")
    (out,), residuals = jax.block_until_ready(ENTRY.fn(args, cfg))
    assert len(products) == 2 * 2 * 4  # two products, two heads, four blocks
    assert not out[:, 16:32].any()
    assert jnp.isneginf(residuals[0][:, :, 16:32]).all()
    products.clear()
    wanted = frozenset({"query", "key", "value"})
    jax.block_until_ready(ENTRY.backward(args, cfg, (out,), residuals, (out,), wanted))
    assert len(products) == (4 + 3) * 2 * 4


def rows_of(made):
    """Full and partial blocks of each row."""
    blocks, counts = (np.asarray(x)[0, 0] for x in made[:2])
    return [(list(r[:a]), list(r[a:b])) for r, (a, b) in zip(blocks, counts, strict=True)]


def test_full_partial_and_empty_blocks_are_told_apart():
    xs = arrays(40, 48)
    mask = np.ones((3, 3), bool)
    mask[2, 0] = False
    made = lists.of_keys(arguments(xs, mask, 16, causal=True))
    # queries 0 to 15 stand at keys 8 to 23; the third block of queries is cut
    assert rows_of(made) == [([], [0, 1]), ([0], [1, 2]), ([], [1, 2])]
    made = lists.of_queries(arguments(xs, mask, 16, causal=True))
    assert rows_of(made) == [([1], [0]), ([], [0, 1, 2]), ([], [1, 2])]


def test_ids_hide_blocks_and_make_them_partial():
    ids = jnp.asarray([[0] * 16 + [0] * 8 + [1] * 8 + [-1] * 16])
    args = arguments(
        arrays(48, 48), jnp.ones((3, 3), bool), 16, q_segment_ids=ids, kv_segment_ids=ids
    )
    assert rows_of(lists.of_keys(args)) == [([0], [1]), ([], [0, 1]), ([], [])]


def test_lists_of_known_masks_are_kept_and_those_of_the_device():
    mask = np.asarray(BUILDERS["random"].build(40, 70, 16))
    xs, lists._known = arrays(40, 70), lists._Kept(most=4, most_bytes=1 << 20)
    for of in (lists.of_keys, lists.of_queries):
        known = [of(arguments(xs, mask, 16, causal=True)) for _ in range(2)]
        traced = jax.jit(lambda m, of=of: of(arguments(xs, m, 16, causal=True))[:2])(mask)
        assert rows_of(known[0]) == rows_of(traced)
    assert len(lists._known) == 2


def test_lists_are_kept_by_number_and_by_bytes():
    """Those asked for last stay; one that is larger than everything is not kept."""
    made = lambda size: lambda: (np.zeros(size, np.int8), np.zeros(0, np.int8))
    kept = lists._Kept(most=3, most_bytes=100)
    for key in "abcd":
        kept.get(key, made(20))
    assert (len(kept), kept.bytes) == (3, 60)
    kept.get("b", made(20))
    kept.get("e", made(70))
    assert (len(kept), kept.bytes) == (2, 90)
    assert kept.get("b", made(1))[0].size == 20
    assert kept.get("f", made(101))[0].size == 101
    assert (len(kept), kept.bytes) == (2, 90)


@pytest.mark.parametrize("options", [{"causal": True}, {"sliding_window": (20, 3)}])
def test_a_window_alone_says_the_pattern(options):
    xs = arrays(40, 45)
    assert_close(
        blocksparse_attention(*xs, block_size=16, platform="xla", **options),
        flash_attention(*xs, platform="xla", **options),
    )


def test_tiles_divide_the_blocks_of_the_mask():
    args = arguments(arrays(96, 96), jnp.ones((2, 2), bool), 48)
    assert config.heuristic(args, "forward", H200).block_q == 16
    with pytest.raises(ValueError, match=r"block_k=32 must divide the `block_size` of the mask"):
        config.check(args, config.Config(block_q=16, block_k=32))
    assert "divide" in config.misfit(args, "forward", config.Config(block_q=32, block_k=16), H200)
    eight = arguments(arrays(16, 16), jnp.ones((2, 2), bool), 8)
    assert "multiple of 16" in ENTRY.why_not(eight)


# Native sparse attention


def test_ties_go_to_the_lower_index(monkeypatch):
    """Equal keys: every earlier block is as important, whatever tile its mean is in."""
    monkeypatch.setattr(select, "_CHUNK", 1)  # two chunks of 16 blocks
    t, size = 90, 4  # 23 blocks
    q, _, v = arrays(t, t, heads=1)
    # integers: the interpreter's products, NumPy's, are exact and so equal in every column
    q = jnp.round(3 * q)
    k = jnp.broadcast_to(jnp.round(3 * jax.random.normal(jax.random.key(2), (8,))), v.shape)
    out = nsa(q, k, v, platform="triton", block_counts=4, block_size=size)
    token = np.arange(t)
    block, own = token // size, (token // size)[:, None]
    seen = ((block < 3) | (block == own)) & (token <= token[:, None])
    seen |= (block < 4) & (own < 4) & (token <= token[:, None])
    expected = (seen / seen.sum(axis=1, keepdims=True)) @ np.asarray(v[0, :, 0])
    assert_close(out[0], np.broadcast_to(expected[:, None], out[0].shape))


def test_a_block_that_many_tokens_select_is_summed_in_pieces(monkeypatch):
    monkeypatch.setattr(nsa_lists, "_AT_ONCE", 16)  # several chunks of tokens and of words
    monkeypatch.setattr(select, "_LISTED_WORDS", 1)
    t, size = 40, 2  # twenty blocks: two words
    spec = kernel_registry.spec("apply_native_sparse_attention")
    q, k, v = arrays(t, t, heads=3)
    own = jnp.arange(t, dtype=jnp.int32)[None, :, None, None] // size
    chosen = jnp.concatenate([jnp.zeros_like(own), own], axis=-1)  # all select the first block
    values = {"query": q, "key": k, "value": v, "block_indices": chosen, "block_size": size}
    args = spec.canonicalize(spec.unpack(spec.complete(values)))
    entry = harness.find_entry("apply_native_sparse_attention", "triton/gpu")
    made = harness.solve(spec, args)
    cfg = harness.configs(entry, args, "testing")
    actual = harness.run_entry(entry, made, cfg, compiler_options=harness.QUICK)
    harness.assert_close_to_oracle(actual, made)


def test_a_tile_has_room_for_the_blocks_of_its_tokens():
    q, k, v = arrays(64, 64)
    spec = kernel_registry.spec("native_sparse_attention")
    values = {"query": q, "key": k, "value": v, "block_size": 4}
    make = lambda **more: spec.canonicalize(spec.unpack(spec.complete(values | more)))
    assert nsa_lists.most_blocks(make(block_counts=3)) == 3
    assert nsa_lists.most_blocks(make(block_counts=99)) == 16
    assert nsa_lists.most_blocks(make(block_counts=jnp.full((1, 64, 1), 2))) == 16


def test_the_memory_of_importances_is_bounded_without_changing_bits(monkeypatch):
    assert select._most_programs(64, 2048) * 64 * 2048 * 4 == 256 << 20  # 131072 tokens
    assert select._most_programs(4, 128) == 1056
    assert select._most_programs(64, 1 << 20) == 132
    q, k, v = arrays(48, 48)
    spec = kernel_registry.spec("native_sparse_attention")
    values = {"query": q, "key": k, "value": v, "block_counts": 3, "block_size": 4}
    args = spec.canonicalize(spec.unpack(spec.complete(values)))
    entry = harness.find_entry("native_sparse_attention", "triton/gpu")
    made = nsa_call.Call(args, entry.config.testing(args, "forward"))
    many = np.asarray(made.words())
    monkeypatch.setattr(select, "_SCRATCH_BYTES", 0)
    monkeypatch.setattr(select, "_LEAST_PROGRAMS", 1)
    assert (np.asarray(made.words()) == many).all()
    assert many.any()
