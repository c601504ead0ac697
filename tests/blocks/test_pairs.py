"""Tiles of query-key pairs, put together again, are what the oracle says of the whole."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel.kernels._reference import flash_attention as reference
from ejkernel.kernels._reference import philox as reference_philox
from ejkernel.kernels._shared import products
from ejkernel.kernels._specs.flash_attention import SPEC
from ejkernel.kernels._xla._blocks import logits
from ejkernel.types import MaskInfo

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)
BATCH, T, S, HEADS, GROUPS, D, E = 2, 7, 9, 4, 2, 2, 3
REPEAT = HEADS // GROUPS

# sizes along batch, key heads, queries, keys; none but the 7 divides its axis of tokens
BLOCKS = [logits.Blocks(*sizes) for sizes in ((1, 2, 3, 4), (2, 1, 7, 8))]
blocks_of = st.sampled_from(BLOCKS)
seeds = st.integers(0, 2**16)


@functools.cache
def operands(batch):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((batch, T, HEADS, D), (batch, S, GROUPS, D), (batch, S, GROUPS, E))
    arrays = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
    return dict(zip(("query", "key", "value"), arrays, strict=True))


def make(batch=BATCH, **options):
    """Canonical arguments of a call; `mask_info` is unpacked as the public function does."""
    return SPEC.canonicalize(SPEC.complete(operands(batch) | options))


@functools.partial(jax.jit, static_argnames=("blocks", "method"))
def all_tiles(args, blocks, method, dots=None):
    """Every tile in both orders of axes, each from its traced indices; and all bounds."""
    p = logits.Pairs(args, blocks)
    shapes = {
        "ts": (blocks.b, blocks.g, p.repeat, blocks.q, blocks.k),
        "st": (blocks.b, blocks.g, blocks.k, p.repeat, blocks.q),
    }

    def tile(at, order):
        if method == "visible":
            seen = p.visible(at, order)
            return jnp.ones((1,) * 5, bool) if seen is None else seen
        if method == "logits":
            return p.logits(p._pair(dots, at, order), at, order)
        return p.dropout(at, order)

    def both(index):
        at = logits.Tile(*index)
        made = {order: tile(at, order) for order in shapes}
        assert all(x.ndim == 5 for x in made.values())
        return {order: jnp.broadcast_to(x, shapes[order]) for order, x in made.items()}

    counts = (p.batch // blocks.b, p.groups // blocks.g, p.num_q, p.num_k)
    made = jax.lax.map(both, jnp.asarray(list(np.ndindex(*counts)), jnp.int32))
    # blocks of keys for each block of queries, and the other way round
    of_queries = [[p.key_bounds(b, i) for i in range(p.num_q)] for b in range(counts[0])]
    of_keys = [[p.query_bounds(b, j) for j in range(p.num_k)] for b in range(counts[0])]
    return made, (jnp.asarray(of_queries), jnp.asarray(of_keys))


def padded(blocks):
    return (-(-T // blocks.q) * blocks.q, -(-S // blocks.k) * blocks.k)


def assembled(tiles, blocks):
    """[b, h, T, S] with padding, from the tiles of each order."""
    padded_t, padded_s = padded(blocks)
    counts = (-1, GROUPS // blocks.g, padded_t // blocks.q, padded_s // blocks.k)
    for order, made in tiles.items():
        made = np.asarray(made)
        made = made if order == "ts" else made.transpose(0, 1, 2, 4, 5, 3)
        made = made.reshape(*counts, blocks.b, blocks.g, REPEAT, blocks.q, blocks.k)
        made = made.transpose(0, 4, 1, 5, 6, 2, 7, 3, 8)  # b, g, r, t, s
        yield made.reshape(-1, HEADS, padded_t, padded_s)


def oracle_mask(args):
    """Pairs with a weight: the logits are small, so no visible pair's weight is zero."""
    _, _, weights = reference.attend(args)
    return np.asarray(weights) > 0


# Masks


def row_lengths(rng, length):
    """Each row has a length of its own, perhaps 0, perhaps all."""
    return np.concatenate([[0], np.cumsum(rng.integers(0, length + 1, BATCH))])


def packed_lengths(rng, length):
    """Three sequences, perhaps empty, perhaps with tokens outside at both ends."""
    return np.sort(rng.integers(0, length + 1, 4))


def ids(rng, length):
    return jnp.asarray(rng.integers(-1, 3, (BATCH, length)), jnp.int32)


def positions(rng, rows, length):
    return jnp.asarray(rng.integers(-4, 12, (rows, length)), jnp.int32)


def mask_of(rng, shape):
    return {"attention_mask": jnp.asarray(rng.random(shape) < 0.6)}


def size(rng):
    """A side of a window; few values, as each is compiled."""
    return int(rng.choice([0, 3]))


def cum(rng, make_lengths):
    return {
        "cum_seqlens_q": jnp.asarray(make_lengths(rng, T), jnp.int32),
        "cum_seqlens_k": jnp.asarray(make_lengths(rng, S), jnp.int32),
    }


def segment_ids(rng):
    return {"q_segment_ids": ids(rng, T), "kv_segment_ids": ids(rng, S)}


OPTIONS = {
    "none": lambda rng: {},
    "causal": lambda rng: {"causal": True},
    "window": lambda rng: {"sliding_window": size(rng)},
    "window_left": lambda rng: {"sliding_window": (size(rng), -1)},
    "window_right": lambda rng: {"sliding_window": (-1, size(rng))},
    "causal_window": lambda rng: {"causal": True, "sliding_window": size(rng)},
    "mask": lambda rng: mask_of(rng, (BATCH, HEADS, T, S)),
    "mask_keys": lambda rng: mask_of(rng, (BATCH, 1, 1, S)),
    "mask_queries": lambda rng: mask_of(rng, (1, 1, T, 1)),
    "mask_heads": lambda rng: mask_of(rng, (1, HEADS, 1, 1)),
    "segments": segment_ids,
    "rows": lambda rng: cum(rng, row_lengths) | {"causal": True},
    "packed": lambda rng: cum(rng, packed_lengths) | {"batch": 1},
    "packed_causal": lambda rng: (
        cum(rng, packed_lengths) | {"batch": 1, "sliding_window": 3, "causal": True}
    ),
    "positions": lambda rng: {
        "causal": True,
        "sliding_window": (4, -1),
        "mask_info": MaskInfo(
            q_positions=positions(rng, BATCH, T), kv_positions=positions(rng, 1, S)
        ),
    },
    "query_positions": lambda rng: {
        "sliding_window": (2, 3),
        "mask_info": MaskInfo(q_positions=positions(rng, 1, T)),
    },
    "everything": lambda rng: (
        segment_ids(rng)
        | cum(rng, row_lengths)
        | mask_of(rng, (BATCH, HEADS, T, S))
        | {"causal": True, "sliding_window": (6, 1)}
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
@SETTINGS
@given(seed=seeds, blocks=blocks_of)
@example(seed=0, blocks=BLOCKS[0])
@example(seed=1, blocks=BLOCKS[1])
def test_visible_tiles_are_the_mask(option, seed, blocks):
    """In both orders; what is padded is hidden, and blocks outside the bounds hold no pair."""
    args = make(**OPTIONS[option](np.random.default_rng(seed)))
    batch = args.query.shape[0]
    blocks = blocks._replace(b=min(blocks.b, batch))
    expected = np.zeros((batch, HEADS, *padded(blocks)), bool)
    expected[..., :T, :S] = oracle_mask(args)
    tiles, bounds = all_tiles(args, blocks, "visible")
    for made in assembled(tiles, blocks):
        np.testing.assert_array_equal(made, expected)
    assert_bounds_hold(bounds, blocks, expected)


def assert_bounds_hold(bounds, blocks, mask):
    batch, _, t, s = mask.shape
    sizes = (batch // blocks.b, blocks.b, HEADS, t // blocks.q, blocks.q, s // blocks.k, blocks.k)
    needed = mask.reshape(sizes).any(axis=(1, 2, 4, 6))  # [nb, nq, nk]
    for found, table in zip(bounds, (needed, needed.mT), strict=True):
        block = np.arange(table.shape[-1])
        lower, upper = np.asarray(found)[..., :1], np.asarray(found)[..., 1:]
        assert not (table & ((block < lower) | (block >= upper))).any()


def test_nothing_to_hide_is_no_mask():
    p = logits.Pairs(make(), logits.Blocks(2, 2, T, S))
    assert p.visible(logits.Tile(0, 0, 0, 0), "ts") is None


def test_static_masks_have_static_bounds():
    """A causal call on one block, or without a mask, loops between Python ints."""
    p = logits.Pairs(make(causal=True), logits.Blocks(2, 2, 3, 4))
    assert isinstance(p.seen, np.ndarray)
    assert [p.key_bounds(0, i) for i in range(3)] == [(0, 2), (0, 2), (0, 3)]
    assert [p.query_bounds(0, j) for j in range(3)] == [(0, 3), (0, 3), (2, 3)]


# Logits

SLOPES = np.asarray([0.5, -0.25, 0.125, 2.0], np.float32)
LOGITS = {
    "scale": lambda rng: {"softmax_scale": 0.3},
    "bias": lambda rng: {"bias": normal(rng, (BATCH, HEADS, T, S))},
    "bias_heads": lambda rng: {"bias": normal(rng, (1, HEADS, 1, S))},
    "bias_rows": lambda rng: {"bias": normal(rng, (BATCH, 1, T, 1))},
    "alibi": lambda rng: {"alibi_slopes": jnp.asarray(SLOPES)},
    "alibi_positions": lambda rng: {
        "alibi_slopes": jnp.asarray(SLOPES),
        "mask_info": MaskInfo(
            q_positions=positions(rng, BATCH, T), kv_positions=positions(rng, 1, S)
        ),
    },
    "cap": lambda rng: {"logits_soft_cap": 0.7},
    "all": lambda rng: {
        "softmax_scale": -1.5,
        "bias": normal(rng, (BATCH, HEADS, 1, S)),
        "alibi_slopes": jnp.asarray(SLOPES),
        "logits_soft_cap": 1.5,
    },
}


def normal(rng, shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def oracle_logits(args, dots):
    """float64, from the specification."""
    x = dots.astype(np.float64) * args.softmax_scale
    cap = args.logits_soft_cap
    x = x if cap is None else cap * np.tanh(x / cap)
    if args.bias is not None:
        x = x + np.asarray(args.bias)
    if args.alibi_slopes is not None:
        q_pos = np.arange(T)[None] + S - T if args.q_positions is None else args.q_positions
        k_pos = np.arange(S)[None] if args.kv_positions is None else args.kv_positions
        distance = np.asarray(k_pos)[:, None, :] - np.asarray(q_pos)[:, :, None]
        x = x + SLOPES[:, None, None] * distance[:, None]
    return x


@pytest.mark.parametrize("option", LOGITS)
@SETTINGS
@given(seed=seeds, blocks=blocks_of)
@example(seed=0, blocks=BLOCKS[0])
@example(seed=1, blocks=BLOCKS[1])
def test_logits_of_tiles(option, seed, blocks):
    rng = np.random.default_rng(seed)
    args = make(**LOGITS[option](rng))
    dots = rng.standard_normal((BATCH, HEADS, *padded(blocks))).astype(np.float32)
    split = dots.reshape(BATCH, GROUPS, REPEAT, *padded(blocks))
    expected = oracle_logits(args, dots[..., :T, :S])
    for made in assembled(all_tiles(args, blocks, "logits", split)[0], blocks):
        np.testing.assert_allclose(made[..., :T, :S], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 0.7])
def test_slope_of_cap_is_its_derivative(cap):
    rng = np.random.default_rng(0)
    offsets = {"bias": normal(rng, (1, HEADS, 1, S)), "alibi_slopes": jnp.asarray(SLOPES)}
    args = make(logits_soft_cap=cap, softmax_scale=1.0, **offsets)
    p, at = logits.Pairs(args, logits.Blocks(BATCH, GROUPS, T, S)), logits.Tile(0, 0, 0, 0)
    dots = jnp.linspace(-3.0, 3.0, BATCH * HEADS * T * S)
    dots = dots.reshape(BATCH, GROUPS, REPEAT, T, S)
    _, slope = jax.jvp(lambda x: p.logits(x, at, "ts"), (dots,), (jnp.ones_like(dots),))
    made = np.broadcast_to(p.slope_of_cap(p.capped(dots)), dots.shape)
    np.testing.assert_allclose(made, slope, rtol=1e-4, atol=1e-6)


# Dropout


def oracle_keep(seed, prob, batch, head):
    """One word a pair, from the reference generator, for 12 keys."""
    b, h, i, j = np.ix_(*(np.arange(n) for n in (BATCH, HEADS, T, 12)))
    key = (seed & 0xFFFFFFFF, seed >> 32)
    words = reference_philox.words(key, j >> 2, i, h + head, b + batch)
    return np.choose(j & 3, words) >= int(prob * 2**32)


@SETTINGS
@given(
    seed=st.integers(0, 2**64 - 1),
    blocks=st.sampled_from([logits.Blocks(*n) for n in ((2, 2, 7, 12), (1, 1, 3, 4))]),
    offset=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
@example(seed=0, blocks=logits.Blocks(2, 2, 7, 12), offset=(0, 0))
@example(seed=2**40 + 17, blocks=logits.Blocks(1, 1, 3, 4), offset=(3, 5))
@example(seed=2**64 - 1, blocks=logits.Blocks(2, 2, 7, 12), offset=(0, 7))
def test_dropout_of_tiles_is_the_mask_of_the_call(seed, blocks, offset):
    """Same mask for every block size, order and shard; kept weights are scaled up."""
    args = make(dropout_prob=0.3, dropout_seed=seed)
    args = dataclasses.replace(args, dropout_offset=jnp.asarray(offset, jnp.uint32))
    expected = oracle_keep(seed, 0.3, *offset) / (1 - 0.3)
    for made in assembled(all_tiles(args, blocks, "dropout")[0], blocks):
        np.testing.assert_allclose(made[..., :T, :12], expected, rtol=1e-6)


def test_dropout_without_offset_starts_at_zero():
    args, blocks = make(dropout_prob=0.6, dropout_seed=5), logits.Blocks(1, 1, 3, 4)
    for made in assembled(all_tiles(args, blocks, "dropout")[0], blocks):
        np.testing.assert_array_equal(made[..., :T, :12] > 0, oracle_keep(5, 0.6, 0, 0))


def test_no_dropout_is_no_factor():
    assert logits.Pairs(make(), BLOCKS[0]).dropout(logits.Tile(0, 0, 0, 0), "ts") is None


# Layouts


def test_layouts_split_heads_by_group_and_pad_with_zeros():
    args = make()
    p = logits.Pairs(args, BLOCKS[0])
    lse = jax.random.normal(jax.random.key(9), (BATCH, HEADS, T))
    q, k, rows = p.queries(args.query), p.keys(args.value), p.rows(lse)
    assert q.shape == (BATCH, GROUPS, REPEAT, p.padded_t, D)
    assert k.shape == (BATCH, GROUPS, p.padded_s, E)
    for g in range(GROUPS):
        np.testing.assert_array_equal(k[:, g, :S], args.value[:, :, g])
        for r in range(REPEAT):
            head = g * REPEAT + r
            np.testing.assert_array_equal(q[:, g, r, :T], args.query[:, :, head])
            np.testing.assert_array_equal(rows[:, g, r, :T], lse[:, head])
    assert not np.any(q[..., T:, :])
    assert not np.any(k[..., S:, :])
    assert not np.any(rows[..., T:])


def test_blocks_of_operands():
    args = make(softmax_aux=jnp.arange(HEADS * 2, dtype=jnp.float32).reshape(HEADS, 2))
    p = logits.Pairs(args, logits.Blocks(1, 1, 3, 4))
    at = logits.Tile(1, 1, 2, 1)
    q, k = p.queries(args.query), p.keys(args.key)
    np.testing.assert_array_equal(p.q_block(q, at), q[1:2, 1:2, :, 6:9])
    np.testing.assert_array_equal(p.k_block(k, at), k[1:2, 1:2, 4:8])
    sinks = p.sinks()
    assert sinks.shape == (1, GROUPS, REPEAT, 2)
    np.testing.assert_array_equal(p.head_block(sinks, at), [[[[4.0, 5.0], [6.0, 7.0]]]])
    shared = logits.Pairs(make(softmax_aux=jnp.asarray([[1.0, 2.0]])), p.blocks).sinks()
    np.testing.assert_array_equal(p.head_block(shared, at), [[[[1.0, 2.0]]]])
    assert p.head_block(None, at) is None


def test_helpers():
    x = jnp.asarray([1.0, jnp.inf, jnp.nan, -jnp.inf])
    np.testing.assert_array_equal(products.finite(x), [1.0, 0.0, 0.0, 0.0])
    padded = logits.pad(np.ones((2, 3), np.int32), 1, 5, -1)
    assert isinstance(padded, np.ndarray)
    np.testing.assert_array_equal(padded, [[1, 1, 1, -1, -1]] * 2)
    assert products.wide(jnp.bfloat16) == jnp.float32
