"""Pages, packed tokens and splits of the Triton kernels, in the interpreter, against formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel.callib import triton_call

triton = pytest.importorskip("triton")
tl = triton.language

from ejkernel.kernels._triton._blocks import packed, paging, softmax, splits  # noqa: E402

SETTINGS = settings(max_examples=12, deadline=None, derandomize=True)
PAGES, BLOCKS, WIDTH = 7, 5, 3
BAD = (-(2**31), -1, PAGES, 2**30, 2**31 - 1)


@pytest.fixture(autouse=True, scope="module")
def _interpreted():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def shape(*size, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(size, dtype)


# Pages


@triton.jit
def rows_kernel(cache, rows, table, high, out, BK: tl.constexpr):
    """Tile j of the keys of sequence 1, of its head 1."""
    first = tl.program_id(0) * BK
    o_k = first + tl.arange(0, BK)
    i_s = first * 0 + 1
    page = paging.page_ids(table, i_s, first, BK)
    base = cache + rows.HEAD
    b = paging.load_rows(base, rows, table, page, first, o_k < high, BK)
    o_d = tl.arange(0, rows.PADDED)
    tl.store(out + o_k[:, None] * rows.PADDED + o_d[None, :], b)


@SETTINGS
@given(
    ids=st.lists(st.integers(0, PAGES - 1) | st.sampled_from(BAD), min_size=5, max_size=5),
    size=st.sampled_from([3, 4, 16, 32]),
    block=st.sampled_from([4, 16]),
    high=st.integers(0, 200),
    slots_first=st.booleans(),
)
@example(ids=[*BAD], size=16, block=4, high=80, slots_first=True)
@example(ids=[*BAD], size=3, block=16, high=15, slots_first=False)
def test_a_tile_has_the_keys_of_its_pages(ids, size, block, high, slots_first):
    """Whether pages are [w, g, d] or [g, w, d], and however many of them a tile spans."""
    high = min(high, BLOCKS * size)
    values = np.arange(1.0, 1 + PAGES * size * 2 * WIDTH, dtype=np.float32)
    if slots_first:
        cache = values.reshape(PAGES, size, 2, WIDTH)
        steps, heads = (size * 2 * WIDTH, 2 * WIDTH, WIDTH), cache[:, :, 1]
    else:
        cache = values.reshape(PAGES, 2, size, WIDTH)
        steps, heads = (size * 2 * WIDTH, WIDTH, size * WIDTH), cache[:, 1]
    tiles = -(-BLOCKS * size // block) + 1  # one beyond the table
    tables = np.stack([np.zeros(BLOCKS), ids]).astype(np.int32)
    out = triton_call(
        rows_kernel,
        inputs={
            "cache": jnp.asarray(cache),
            "rows": paging.rows(steps, WIDTH),
            "table": paging.table(jnp.asarray(tables), PAGES, size),
            "high": high,
        },
        outputs={"out": shape(tiles * block, 16)},
        grid=(tiles,),
        BK=block,
    )["out"]
    expected = np.zeros((tiles * block, 16), np.float32)
    keys = heads[np.clip(ids, 0, PAGES - 1)].reshape(-1, WIDTH)
    expected[:high, :WIDTH] = keys[:high]
    np.testing.assert_array_equal(out, expected)


# Packed tokens


@triton.jit
def tiles_kernel(sequences, count, out, TOKENS: tl.constexpr):
    """Sequence, first token and number of tokens of each tile."""
    i_s, i_q = packed.find_sequence(sequences, tl.program_id(0), count, TOKENS)
    tokens = packed.tokens_of(sequences, i_s)
    left = tl.minimum(tokens.count - i_q * TOKENS, TOKENS)
    out += tl.program_id(0) * 3
    tl.store(out, i_s)
    tl.store(out + 1, tokens.first + i_q * TOKENS)
    tl.store(out + 2, tl.where(i_q < 0, 0, left))


@SETTINGS
@given(
    counts=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    num_seqs=st.integers(0, 4),
    tokens=st.sampled_from([1, 2, 3, 8]),
    junk=st.integers(-5, 99),
)
@example(counts=[0, 0, 0, 9], num_seqs=4, tokens=8, junk=0)
@example(counts=[1, 8, 7, 1], num_seqs=4, tokens=1, junk=0)
@example(counts=[9, 9, 9, 9], num_seqs=2, tokens=2, junk=99)
def test_tiles_hold_every_token_of_every_sequence_once(counts, num_seqs, tokens, junk):
    starts = np.concatenate([[0], np.cumsum(counts)])
    total = int(starts[num_seqs])
    starts[num_seqs + 1 :] = junk  # what does not count may be anything
    sequences = packed.Packed(
        jnp.asarray(starts, jnp.int32), jnp.asarray([num_seqs], jnp.int32), total
    )
    grid = total // tokens + len(counts)
    found = triton_call(
        tiles_kernel,
        inputs={"sequences": sequences, "count": len(counts)},
        outputs={"out": shape(grid, 3, dtype=jnp.int32)},
        grid=(grid,),
        TOKENS=tokens,
    )["out"]
    owner = np.repeat(np.arange(num_seqs), counts[:num_seqs])
    seen = [
        (token, sequence)
        for sequence, first, count in np.asarray(found)
        for token in range(first, first + count)
    ]
    assert sorted(seen) == list(enumerate(owner))


# Splits


@triton.jit
def parts_kernel(low, high, out, SPLITS: tl.constexpr, BK: tl.constexpr):
    i_p = tl.program_id(0)
    start, stop = splits.part(tl.load(low), tl.load(high), i_p, SPLITS, BK)
    tl.store(out + 2 * i_p, start)
    tl.store(out + 2 * i_p + 1, stop)


@SETTINGS
@given(low=st.integers(0, 70), high=st.integers(0, 70), count=st.sampled_from([1, 2, 3, 7]))
@example(low=16, high=65, count=7)
@example(low=5, high=5, count=2)
@example(low=64, high=1, count=3)
def test_parts_cover_the_tiles_of_a_range_once(low, high, count):
    found = triton_call(
        parts_kernel,
        inputs={"low": jnp.asarray([low]), "high": jnp.asarray([high])},
        outputs={"out": shape(count, 2, dtype=jnp.int32)},
        grid=(count,),
        SPLITS=count,
        BK=16,
    )["out"]
    visited = [tile for start, stop in np.asarray(found) for tile in range(start, stop)]
    assert visited == list(range(low // 16, max(-(-high // 16), low // 16)))


@SETTINGS
@given(
    seed=st.integers(0, 2**16),
    count=st.sampled_from([2, 3, 9]),
    empty=st.integers(0, 9),
    offset=st.sampled_from([0.0, 90.0, -1e6]),
    sinks=st.booleans(),
    factor=st.sampled_from([1.0, 0.25]),
)
@example(seed=1, count=3, empty=3, offset=0.0, sinks=False, factor=1.0)
@example(seed=2, count=2, empty=2, offset=0.0, sinks=True, factor=1.0)
@example(seed=3, count=9, empty=4, offset=-1e6, sinks=False, factor=0.25)
def test_merged_parts_are_the_softmax_over_all_keys(seed, count, empty, offset, sinks, factor):
    """Two sequences, a key head with three query heads; some parts are without keys."""
    rng, heads, keys = np.random.default_rng(seed), 3, 4
    tiles = packed.tiles(heads, 1, 16, 1)
    x = rng.standard_normal((2, count, heads, keys)) + offset * rng.integers(0, 2, (2, count, 1, 1))
    x = (x / factor).astype(np.float32)
    gone = rng.permutation(count)[: min(empty, count)]
    x[:, gone] = -np.inf
    v = rng.standard_normal((2, count, heads, keys, WIDTH)).astype(np.float32)
    m = x.max(axis=-1)
    p = np.exp((x - np.where(np.isneginf(m), 0, m)[..., None]) * factor)
    acc = (p[..., None] * v).sum(axis=-2).astype(np.float32)
    acc[:, gone] = np.nan  # which nobody wrote
    extra = rng.standard_normal((heads, 2)).astype(np.float32)
    made = splits.merge(
        splits.Partials(
            *(jnp.asarray(y) for y in (acc, m, np.asarray(p.sum(axis=-1), np.float32)))
        ),
        packed.Packed(None, None, 2),
        splits.Final(
            softmax.Sinks(jnp.asarray(extra), 2, 2, 2) if sinks else None,
            jnp.asarray([2.0]),
            factor,
            WIDTH,
            16,
        ),
        tiles,
        {"out": shape(2, heads, WIDTH), "lse": shape(2, heads)},
    )
    logits = np.moveaxis(x.astype(np.float64) * factor, 1, 2).reshape(2, heads, -1)
    values = np.moveaxis(v, 1, 2).reshape(2, heads, -1, WIDTH)
    if sinks:
        tail = np.broadcast_to(extra, (2, heads, 2))
        logits = np.concatenate([logits, tail], axis=-1)
        values = np.concatenate([values, np.zeros((2, heads, 2, WIDTH))], axis=-2)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top[..., 0]
    out = 2.0 * (weights[..., None] * values).sum(axis=-2)
    out /= np.where(total == 0, 1.0, total)[..., None]
    np.testing.assert_allclose(made["out"], out, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(made["lse"], lse, rtol=2e-6, atol=2e-6)
