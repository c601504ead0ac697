"""Pieces of the TPU kernels against formulas, dense masks and their XLA twins."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel.callib import _pallas
from ejkernel.kernels._pallas.tpu._blocks import block_ranges, grid, logits, philox, softmax, tiles
from ejkernel.kernels._reference import philox as reference_philox
from ejkernel.kernels._xla._blocks import block_ranges as xla_ranges
from ejkernel.kernels._xla._blocks import philox as xla_philox
from ejkernel.kernels._xla._blocks import softmax as xla_softmax
from tests.blocks import pages

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)
LIMIT = 2**31
NOTHING = types.SimpleNamespace(mask=None, bias=None, slopes=None)

seeds = st.integers(0, 2**16)
windows = st.sampled_from(
    [(None, None), (0, 0), (3, None), (None, 0), (2, 5), (None, 4), (5, 0), (None, 40), (30, 2)]
)
sizes = st.sampled_from([(1, 1), (4, 2), (2, 4), (4, 4), (16, 16)])
lengths = st.sampled_from([(8, 8), (5, 11), (11, 5), (1, 9), (9, 1), (16, 3), (32, 32)])


# Softmax

ROWS, KEYS, CHUNKS = 8, 16, 3


def in_chunks(logits, chunk, values, sink, scale):
    m = jnp.full((ROWS, tiles.LANES), softmax.LEAST)
    l, acc = jnp.zeros((ROWS, KEYS)), jnp.zeros((ROWS, values.shape[1]))
    for c in range(CHUNKS):
        part = jnp.where(chunk[None] == c, logits / scale, -jnp.inf)
        m, l, p, alpha = softmax.update(m, l, part, scale * softmax.LOG2_E)
        acc = acc * tiles.wide(alpha, acc.shape[1]) + tiles.product(p, values)
    factor, lse = softmax.finish(m, l, scale * softmax.LOG2_E, sink)
    return acc * tiles.wide(factor, acc.shape[1]), lse[:, 0]


def on_xla(logits, values, sink):
    state = xla_softmax.init((ROWS,), values.shape[1], jnp.float32)
    m, weights, _ = xla_softmax.weigh(state.m, logits)
    state = xla_softmax.State(m, weights.sum(-1), weights @ values)
    sinks = None if sink is None else sink.reshape(1)
    return xla_softmax.finish(xla_softmax.add_sinks(state, sinks))


@example(seed=0, hidden=1.0, drop=0.0, sink=None, scale=1.0)  # no key at all
@example(seed=0, hidden=1.0, drop=0.0, sink=-2.0, scale=1.0)
@example(seed=1, hidden=0.5, drop=200.0, sink=90.0, scale=0.1)
@example(seed=2, hidden=0.0, drop=-200.0, sink=None, scale=3.0)
@SETTINGS
@given(
    seed=seeds,
    hidden=st.sampled_from([0.0, 0.5, 0.9]),
    drop=st.sampled_from([0.0, 200.0, -200.0]),
    sink=st.sampled_from([None, -300.0, 2.0]),
    scale=st.sampled_from([1.0, 0.1]),
)
def test_softmax_in_chunks_is_the_softmax(seed, hidden, drop, sink, scale):
    rng = np.random.default_rng(seed)
    chunk = rng.integers(0, CHUNKS, KEYS)
    x = rng.normal(size=(ROWS, KEYS)) - drop * chunk
    x = np.where(rng.random(x.shape) < hidden, -np.inf, x).astype(np.float32)
    values = rng.normal(size=(KEYS, 4)).astype(np.float32)
    sink = None if sink is None else jnp.float32(sink)
    out, lse = in_chunks(jnp.asarray(x), jnp.asarray(chunk), jnp.asarray(values), sink, scale)
    expected, expected_lse = on_xla(jnp.asarray(x), jnp.asarray(values), sink)
    # a logit is known to a part of its own size
    limit = 4e-7 * (8 + np.abs(x[np.isfinite(x)]).max(initial=0.0))
    np.testing.assert_allclose(out, expected, rtol=0, atol=limit)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=limit)


# Random numbers


@example(seed=(0xFFFFFFFF, 0xFFFFFFFF), first=0, batch=3, head=7, prob=0.0)
@example(seed=(0, 1 << 31), first=LIMIT - 32, batch=0, head=0, prob=0.999)
@SETTINGS
@given(
    seed=st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    first=st.integers(0, 1000).map(lambda n: 4 * n),
    batch=st.integers(0, 1000),
    head=st.integers(0, 100),
    prob=st.sampled_from([0.1, 0.5, 0.9]),
)
def test_dropped_pairs_are_those_of_the_twin(seed, first, batch, head, prob):
    query, key = (jnp.asarray(x, jnp.int32) for x in np.mgrid[3:11, first : first + 16])
    signed = [jax.lax.bitcast_convert_type(jnp.uint32(x), jnp.int32) for x in seed]
    place = jnp.int32(batch), jnp.int32(head)
    kept = philox.keep(tuple(signed), *place, query, key, int(prob * 2.0**32))
    expected = xla_philox.keep(
        jnp.asarray(seed, jnp.uint32),
        prob,
        batch=jnp.int32(batch),
        head=jnp.int32(head),
        query=query[:, 0],
        first_key=jnp.int32(first),
        num_keys=16,
    )
    np.testing.assert_array_equal(kept, expected)


def test_random_bits_are_those_of_the_reference():
    query, key = np.mgrid[3:11, 5:21].astype(np.int32)
    words = reference_philox.words([7, 9], key >> 2, query, 2, 1)
    expected = np.choose(key & 3, words) >= np.uint64(int(0.3 * 2.0**32))
    seed, place = (jnp.int32(7), jnp.int32(9)), (jnp.int32(1), jnp.int32(2))
    kept = philox.keep(seed, *place, jnp.asarray(query), jnp.asarray(key), int(0.3 * 2**32))
    np.testing.assert_array_equal(kept, expected)


# Tables


def dense(q_pos, k_pos, window, ids=()):
    left, right = window
    gap = np.asarray(k_pos, np.int64)[:, None, :] - np.asarray(q_pos, np.int64)[:, :, None]
    seen = np.ones(gap.shape, bool)
    seen &= True if left is None else gap >= -left
    seen &= True if right is None else gap <= right
    for q, k in ids:
        seen = seen & (q[:, :, None] == k[:, None, :]) & (q >= 0)[:, :, None]
    return seen


def check_table(table, seen, blocks, exact):
    """What a table promises about a dense mask, [b, held, streamed]; `exact`: nothing is wasted."""
    size, step = blocks
    for rows, mask in zip(np.broadcast_to(table, (len(seen), *table.shape[1:])), seen, strict=True):
        for i, (first, full, ragged, last) in enumerate(rows):
            assert first <= full <= ragged <= last
            part = mask[i * size : (i + 1) * size]
            some = [part[:, j : j + step].any() for j in range(0, part.shape[1], step)]
            assert not any(some[:first])
            assert not any(some[last:])
            assert part[:, full * step : ragged * step].all()
            assert ragged * step <= part.shape[1] or full == ragged
            assert not exact or all(some[first:last])


@example(length=(1, 9), window=(0, 0), blocks=(4, 4))
@example(length=(11, 5), window=(None, 0), blocks=(4, 2))  # queries before the first key
@SETTINGS
@given(length=lengths, window=windows, blocks=sizes)
def test_constant_tables(length, window, blocks):
    t, s = length
    queries, keys = block_ranges.Side(t, s - t, (), None), block_ranges.Side(s, 0, (), None)
    table = block_ranges.table(queries, keys, window, blocks, True)
    positions = np.arange(t)[None] + s - t, np.arange(s)[None]
    check_table(table, dense(*positions, window), blocks, True)
    q, k = (
        xla_ranges.extent(np.pad(x, ((0, 0), (0, -x.shape[1] % n)), mode="edge"), n)
        for x, n in zip(positions, blocks, strict=True)
    )
    first, last = xla_ranges.hull(xla_ranges.near(q, k, window))
    np.testing.assert_array_equal(table[..., 3] - table[..., 0], last - first)
    np.testing.assert_array_equal(table[..., 0], np.where(first < last, first, 0))


cuts = st.sampled_from([((5, 11), (2, 4)), ((11, 8), (4, 2))])  # each shape is compiled: few


@example(cut=((5, 11), (2, 4)), window=(None, 0), seed=0, far=True, packed=False)
@SETTINGS
@given(cut=cuts, window=windows, seed=seeds, far=st.booleans(), packed=st.booleans())
def test_computed_tables(cut, window, seed, far, packed):
    (t, s), blocks = cut
    rng = np.random.default_rng(seed)
    draw = lambda n: (
        np.sort(rng.integers(-1, 3, (2, n)), 1) if packed else rng.integers(-1, 3, (2, n))
    )
    ids = draw(t), draw(s)
    ends = (-LIMIT, LIMIT) if far else (0, 12)
    positions = [rng.integers(*ends, (2, n)) for n in (t, s)]
    held, streamed = (
        block_ranges.Side(n, 0, (jnp.asarray(i, jnp.int32),), jnp.asarray(p, jnp.int32))
        for n, i, p in zip((t, s), ids, positions, strict=True)
    )
    table = np.asarray(block_ranges.table(held, streamed, window, blocks, True))
    check_table(table, dense(*positions, window, [ids]), blocks, False)


# Bands


def in_band(band, shape):
    gap = np.arange(shape[1])[None] - np.arange(shape[0])[:, None]
    seen = np.ones(shape, bool)
    seen &= True if band.low is None else gap >= band.low
    seen &= True if band.high is None else gap <= band.high
    return seen & (True if band.count is None else np.arange(shape[1])[None] < band.count)


@example(length=(32, 32), window=(None, 0), blocks=(16, 16))
@example(length=(32, 32), window=(5, 0), blocks=(16, 16))
@example(length=(5, 11), window=(None, None), blocks=(4, 4))  # only the end of the keys
@SETTINGS
@given(length=lengths, window=windows, blocks=sizes)
def test_bands_are_the_masked_blocks(length, window, blocks):
    (t, s), (size, step) = length, blocks
    queries, keys = block_ranges.Side(t, s - t, (), None), block_ranges.Side(s, 0, (), None)
    described = queries, keys, window, blocks, True
    table = block_ranges.table(*described)
    bands, index = block_ranges.bands(table, *described)
    assert len(bands) <= block_ranges.MOST_BANDS
    rows, lanes = len(table[0]) * size, -(-s // step) * step
    seen = dense(np.arange(rows)[None] + s - t, np.arange(lanes)[None], window)[0]
    seen &= np.arange(lanes)[None] < s
    for i, (first, full, ragged, last) in enumerate(table[0]):
        masked = {*range(first, full), *range(ragged, last)}
        if bands:
            assert sorted(j for j in index[0, i] if j >= 0) == sorted(masked)
        for band, j in zip(bands, index[0, i], strict=True):
            block = seen[i * size : (i + 1) * size, j * step : (j + 1) * step]
            assert j < 0 or (block == in_band(band, blocks)).all()


def test_the_common_masks_have_few_bands():
    side = block_ranges.Side(4096, 0, (), None)
    for window, count in (((None, 0), 1), ((511, 0), 2), ((600, 0), 3), ((None, None), 0)):
        described = side, side, window, (512, 512), True
        assert len(block_ranges.bands(block_ranges.table(*described), *described)[0]) == count
    described = side, side, (None, 0), (128, 1024), True
    assert (
        block_ranges.bands(block_ranges.table(*described), *described)[0] == ()
    )  # eight: too many


bands = st.builds(
    block_ranges.Band,
    st.one_of(st.none(), st.integers(-20, 20)),
    st.one_of(st.none(), st.integers(-20, 20)),
    st.one_of(st.none(), st.integers(1, 16)),
)


@example(band=block_ranges.Band(None, 0, None), row=8, grain=4)
@example(band=block_ranges.Band(1, None, 9), row=0, grain=4)
@SETTINGS
@given(band=bands, row=st.sampled_from([0, 4, 8]), grain=st.sampled_from([1, 4, 8]))
def test_parts_of_bands(band, row, grain):
    """A part sees nothing beyond its extent, and inside it the same as before."""
    rows, lanes = 4, 16
    seen = in_band(band, (row + rows, lanes))[row:]
    start, stop = band.extent(row, (rows, lanes), grain)
    if not seen.any():
        return
    assert start % grain == stop % grain == 0
    assert not seen[:, :start].any()
    assert not seen[:, stop:].any()
    columns = np.flatnonzero(seen.any(0))
    assert start > columns[0] - grain
    assert stop < columns[-1] + 1 + grain
    shape = (rows, stop - start)
    part = band.moved(row, start, shape)
    np.testing.assert_array_equal(in_band(part, shape), seen[:, start:stop])
    limits = part.low, part.high, part.count
    assert in_band(part, shape).all() == (limits == (None, None, None))


# Pairs


def rules_of(window, holds_keys=False, offset=0, num_streamed=None):
    return logits.Rules(
        holds_keys=holds_keys,
        scale=0.5,
        cap=2.0,
        left=window[0],
        right=window[1],
        offset=offset,
        num_ids=0,
        positions=False,
        num_streamed=num_streamed,
        threshold=None,
        kept=1.0,
    )


def tile_at(held, streamed, shape, band=None):
    place = jnp.int32(held), jnp.int32(streamed)
    return logits.Tile(0, 0, *place, shape, masked=True, band=band)


@example(window=(None, 0), offset=-3, held=0, streamed=0, holds_keys=False)
@SETTINGS
@given(
    window=windows,
    offset=st.integers(-20, 20),
    held=st.sampled_from([0, 8, 24]),
    streamed=st.sampled_from([0, 16]),
    holds_keys=st.booleans(),
)
def test_visible_pairs(window, offset, held, streamed, holds_keys):
    """Computed from the rules, and from the band that follows from them."""
    shape, real = (8, 16), 25
    rows, lanes = np.arange(8) + held, np.arange(16) + streamed
    query, key = (lanes[None], rows[:, None]) if holds_keys else (rows[:, None], lanes[None])
    gap = np.broadcast_to(key - query - offset, shape)
    left, right = window
    expected = np.ones(shape, bool)
    expected &= True if left is None else gap >= -left
    expected &= True if right is None else gap <= right
    expected &= lanes[None] < real
    rules = rules_of(window, holds_keys, offset, real)
    tile = tile_at(held, streamed, shape)
    np.testing.assert_array_equal(logits.visible(rules, NOTHING, tile), expected)
    np.testing.assert_array_equal(logits.distance(rules, NOTHING, tile), gap)
    sign = -1 if holds_keys else 1
    shift = held - streamed + sign * offset
    before, after = (right, left) if holds_keys else (left, right)
    band = block_ranges.Band(
        None if before is None else shift - before,
        None if after is None else shift + after,
        real - streamed,
    )
    banded = logits.visible(rules, NOTHING, tile_at(held, streamed, shape, band))
    np.testing.assert_array_equal(banded, expected)


def test_logits_have_cap_bias_and_slope_in_that_order():
    dots, bias = jnp.ones((8, 16)) * 3.0, jnp.arange(128.0).reshape(8, 16) / 50
    refs = types.SimpleNamespace(mask=None, bias=jax.new_ref(bias), slopes=jnp.asarray([9.0, 0.1]))
    at = tile_at(4, 2, (8, 16))
    made, capped = logits.logits(rules_of((None, None)), refs, at, dots, jnp.int32(1))
    gap = (np.arange(16) + 2)[None] - (np.arange(8) + 4)[:, None]
    np.testing.assert_allclose(capped, np.full((8, 16), 2 * np.tanh(1.5 / 2)), rtol=1e-5)
    np.testing.assert_allclose(made, capped + bias + 0.1 * gap, rtol=1e-5)


# Tiles


@pytest.mark.parametrize("count", [8, 24, 136, 256])
def test_columns_and_rows(count):
    row = jnp.arange(float(count)).at[3].set(-jnp.inf).at[5].set(jnp.nan)[None]
    column = tiles.to_column(row)
    np.testing.assert_array_equal(tiles.to_row(column), row)
    np.testing.assert_array_equal(tiles.wide(column, 200), np.repeat(row.T, 200, axis=1))


@pytest.mark.parametrize("width", [24, 128, 384])
def test_partial_sums(width):
    x = jax.random.normal(jax.random.key(0), (8, width))
    made = tiles.partial_sums(x)
    assert made.shape[1] <= tiles.LANES
    np.testing.assert_allclose(made.sum(1), x.sum(1), rtol=1e-5, atol=1e-5)


# Pages that a kernel fetches itself


def test_pages_are_fetched_while_others_are_summed():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((7, 8, 128)).astype(np.float32)
    # no page, one, and more than there are buffers; ids behind the count are never fetched
    table = np.asarray([[0, 99, 99, 99], [1, 6, 99, 99], [3, 2, 0, 2]], np.int32)
    with _pallas.detect_races():
        found = pages.sum_of_pages(jnp.asarray(table), jnp.asarray(values))
        assert not _pallas.races_found()
    expected = [values[row[1 : 1 + row[0]]].sum(axis=0) for row in table]
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-6, atol=1e-6)


def test_a_buffer_that_is_read_too_early_is_a_race(monkeypatch):
    stream = grid.stream
    other = lambda visit: lambda j, slot: visit(j, 1 - slot)
    wrong = lambda count, copies, visit: stream(count, copies, other(visit))
    monkeypatch.setattr(grid, "stream", wrong)
    table, values = jnp.asarray([[3, 1, 2, 0]], jnp.int32), jnp.ones((3, 8, 128))
    with _pallas.detect_races():
        pages.sum_of_pages(table, values)
        assert _pallas.races_found()
