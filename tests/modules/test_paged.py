"""Attention over pages and ranges: lengths, tables, garbage, scales, memory; and cache writes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import modules
from ejkernel.errors import EjkernelWarning, UnsupportedError
from ejkernel.modules import UpdatePagedCache, create_default_executor
from ejkernel.modules.operations.flash_attention import flash_attention
from ejkernel.modules.operations.page_attention import PageAttention, page_attention
from ejkernel.modules.operations.ragged_decode_attention import (
    RaggedDecodeAttention,
    ragged_decode_attention,
)
from ejkernel.modules.operations.ragged_page_attention import ragged_page_attention
from ejkernel.modules.operations.update_paged_cache import (
    pages_from_interleaved,
    pages_to_interleaved,
    update_paged_cache,
)
from ejkernel.ops.execution.executor import default_executor
from tests import host
from tests.kernels import harness

W, BLOCKS, HEADS, GROUPS, D, E = 4, 3, 4, 2, 8, 6
ROOM = W * BLOCKS
LENGTHS = np.array([0, 1, W - 1, W, W + 1, ROOM])
BATCH = len(LENGTHS)


def dense(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return (
        jax.random.normal(keys[0], (BATCH, HEADS, D)),
        jax.random.normal(keys[1], (BATCH, ROOM, GROUPS, D)),
        jax.random.normal(keys[2], (BATCH, ROOM, GROUPS, E)),
    )


def paged(x, tables, pages, fill=np.nan):
    """Keys [b, s, g, d] of each row in the pages of its table; the rest is `fill`."""
    cache = np.full((pages, x.shape[2], W, x.shape[3]), fill, np.float32)
    for row, length in enumerate(LENGTHS):
        for j in range(length):
            cache[tables[row, j // W], :, j % W] = x[row, j]
    return jnp.asarray(cache)


def setup(fill=np.nan):
    """Query, caches, lengths, tables with garbage beyond lengths, and dense keys and values."""
    q, k, v = dense()
    pages = BATCH * BLOCKS + 3
    tables = np.random.default_rng(0).permutation(pages)[: BATCH * BLOCKS].reshape(BATCH, BLOCKS)
    caches = [paged(np.asarray(x), tables, pages, fill) for x in (k, v)]
    unused = np.arange(BLOCKS)[None] * W >= LENGTHS[:, None]
    junk = np.array([-1, 10**9, -(2**31)])
    tables = np.where(unused, junk[None, :], tables)
    return q, *caches, jnp.asarray(LENGTHS), jnp.asarray(tables, jnp.int32), k, v


SUMS = np.concatenate([[0], np.cumsum(LENGTHS)])


def flash_rows(q, k, v, **options):
    """`flash_attention` of one query a row over the row's real keys."""
    out, lse = flash_attention(
        q[:, None],
        k,
        v,
        causal=True,
        cum_seqlens_q=jnp.arange(BATCH + 1),
        cum_seqlens_k=jnp.asarray(SUMS),
        return_lse=True,
        **options,
    )
    return out[:, 0], lse[..., 0]


OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 2},
    "pair": {"sliding_window": (5, -1), "softmax_scale": 0.7},
    "everything": {
        "sliding_window": 6,
        "logits_soft_cap": 2.0,
        "softmax_aux": host.asarray(np.linspace(-1.0, 1.0, HEADS)[:, None]),
        "alibi_slopes": host.asarray(np.linspace(0.1, 0.5, HEADS)),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_dense_attention_over_the_same_keys(name):
    q, kc, vc, lens, tables, k, v = setup()
    expected = flash_rows(q, k, v, **host.to_jax(OPTIONS[name]))
    pages = page_attention(q, kc, vc, lens, tables, return_lse=True, **host.to_jax(OPTIONS[name]))
    hidden = jnp.arange(ROOM)[None, :, None, None] >= lens[:, None, None, None]
    k, v = (jnp.where(hidden, jnp.nan, x) for x in (k, v))
    starts = jnp.zeros_like(lens)
    ragged = ragged_decode_attention(
        q, k, v, starts, lens, return_lse=True, **host.to_jax(OPTIONS[name])
    )
    for actual in (pages, ragged):
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-6)
    assert (pages[0][0] == 0).all()
    assert pages[1].dtype == jnp.float32
    assert np.isneginf(pages[1][0]).all() == ("softmax_aux" not in OPTIONS[name])


def test_what_nobody_sees_changes_no_bit():
    results = []
    for fill in (0.0, np.nan, np.inf):
        q, kc, vc, lens, tables, *_ = setup(fill)
        results.append(page_attention(q, kc, vc, lens, tables, sliding_window=6, return_lse=True))
    q, kc, vc, lens, tables, *_ = setup(0.0)
    tables = jnp.where(jnp.arange(BLOCKS)[None] * W >= lens[:, None], 0, tables)
    results.append(page_attention(q, kc, vc, lens, tables, sliding_window=6, return_lse=True))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_what_somebody_sees_shows():
    q, kc, vc, lens, tables, *_ = setup(0.0)
    spoiled = vc.at[tables[4, 1], 0, 0, 2].set(jnp.nan)
    out = page_attention(q, kc, spoiled, lens, tables)
    found = np.isnan(out).any(axis=-1)
    expected = np.zeros((BATCH, HEADS), bool)
    expected[4, : HEADS // GROUPS] = True
    np.testing.assert_array_equal(found, expected)


def test_shared_pages_are_read_by_both_rows():
    q, kc, vc, _, tables, k, v = setup()
    tables = tables.at[2].set(tables[5])
    lens = jnp.asarray([0, 0, ROOM, 0, 0, ROOM])
    out = page_attention(q.at[2].set(q[5]), kc, vc, lens, tables)
    np.testing.assert_array_equal(out[2], out[5])
    expected = flash_attention(q[5][None, None], k[5:], v[5:])[0, 0]
    np.testing.assert_allclose(out[2], expected, rtol=2e-5, atol=2e-6)


def test_lengths_are_clamped_to_the_table():
    q, kc, vc, _, tables, *_ = setup(1.0)
    tables = jnp.clip(tables, 0, kc.shape[0] - 1)
    full = page_attention(q, kc, vc, jnp.full(BATCH, ROOM), tables, sliding_window=5)
    over = page_attention(q, kc, vc, jnp.full(BATCH, ROOM + 9), tables, sliding_window=5)
    np.testing.assert_array_equal(full, over)
    assert (page_attention(q, kc, vc, jnp.full(BATCH, -3), tables) == 0).all()


def test_traced_lengths_need_no_host():
    q, kc, vc, lens, tables, k, v = setup()
    run = jax.jit(lambda lens, tables: page_attention(q, kc, vc, lens, tables))
    expected = page_attention(q, kc, vc, lens, tables)
    np.testing.assert_allclose(run(lens, tables), expected, rtol=1e-6, atol=1e-6)
    half = page_attention(q, kc, vc, lens // 2, tables)
    np.testing.assert_allclose(run(lens // 2, tables), half, rtol=1e-6, atol=1e-6)
    ranges = jax.jit(lambda start, end: ragged_decode_attention(q, k, v, start, end))
    start = jnp.minimum(lens, 2)
    expected = ragged_decode_attention(q, k, v, start, lens)
    np.testing.assert_allclose(ranges(start, lens), expected, rtol=1e-6, atol=1e-6)


def test_ranges_do_not_see_what_lies_before_them():
    q, k, v = dense()
    start, end = jnp.asarray([0, 3, 5, 5, 11, 2]), jnp.asarray([1, 9, 5, 4, 12, 30])
    out = ragged_decode_attention(q, k, v, start, end)
    hidden = jnp.arange(ROOM)[None] < start[:, None]
    hidden = (hidden | (jnp.arange(ROOM)[None] >= end[:, None]))[..., None, None]
    seen = ~hidden[:, :, 0, 0][:, None, None]
    expected = flash_attention(q[:, None], k, v, seen)[:, 0]
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)
    k, v = (jnp.where(hidden, jnp.nan, x) for x in (k, v))
    np.testing.assert_array_equal(ragged_decode_attention(q, k, v, start, end), out)


def test_a_query_with_a_token_axis_gives_one_back():
    q, k, v = dense()
    ranges = (jnp.zeros(BATCH, jnp.int32), jnp.asarray(LENGTHS))
    out, lse = ragged_decode_attention(q, k, v, *ranges, return_lse=True)
    call = functools.partial(default_executor(), RaggedDecodeAttention())
    for run in (ragged_decode_attention, call):
        long, long_lse = run(q[:, None], k, v, *ranges, return_lse=True)
        np.testing.assert_array_equal(long, out[:, None])
        np.testing.assert_array_equal(long_lse, lse[..., None])


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("query_dtype", ["float32", "bfloat16"])
def test_scales_widen_narrow_pages(dtype, query_dtype):
    q, kc, vc, lens, tables, *_ = setup(0.0)
    q = q.astype(query_dtype)
    factor = 20.0 if dtype == "int8" else 1.0
    kc, vc = ((x * factor).astype(dtype) for x in (kc, vc))
    v_scale = jnp.asarray([0.5, 1.5])
    out = page_attention(q, kc, vc, lens, tables, k_scale=1 / factor, v_scale=v_scale)
    wide = q.astype(jnp.float32)
    kf, vf = kc.astype(jnp.float32) / factor, vc.astype(jnp.float32) * v_scale[:, None, None]
    expected = page_attention(wide, kf, vf, lens, tables)
    assert out.dtype == q.dtype
    rtol = 2e-5 if query_dtype == "float32" else 2e-2
    limit = rtol * np.abs(expected).max()
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=rtol, atol=limit)


def test_hints_change_no_number():
    q, kc, vc, lens, tables, *_ = setup()
    plain = page_attention(q, kc, vc, lens, tables)
    np.testing.assert_array_equal(plain, page_attention(q, kc, vc, lens, tables, None, W))
    np.testing.assert_array_equal(plain, page_attention(q, kc, vc, lens, tables, num_splits=4))
    through = default_executor()(PageAttention(), q, kc, vc, lens, tables)
    np.testing.assert_array_equal(plain, through)


@pytest.mark.parametrize("sizes", [(0, 3, 2), (2, 0, 2), (2, 3, 0)])
def test_nothing_to_attend_to(sizes):
    batch, blocks, pages = sizes
    q = jnp.ones((batch, HEADS, D))
    kc, vc = jnp.ones((pages, GROUPS, W, D)), jnp.ones((pages, GROUPS, W, E))
    lens = jnp.full(batch, 5 if batch == 0 else 0) if pages else jnp.full(batch, 5)
    tables = jnp.zeros((batch, blocks), jnp.int32)
    out, lse = page_attention(q, kc, vc, lens, tables, return_lse=True)
    assert out.shape == (batch, HEADS, E)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_no_keys_in_ranges():
    q, k, v = jnp.ones((2, HEADS, D)), jnp.ones((2, 0, GROUPS, D)), jnp.ones((2, 0, GROUPS, E))
    ends = jnp.asarray([0, 4])
    assert (ragged_decode_attention(q, k, v, 0 * ends, ends) == 0).all()


def test_vmap_over_queries():
    q, kc, vc, lens, tables, *_ = setup()
    many = jnp.stack([q, 2 * q])
    out = jax.vmap(lambda q: page_attention(q, kc, vc, lens, tables))(many)
    expected = page_attention(many[1], kc, vc, lens, tables)
    np.testing.assert_allclose(out[1], expected, rtol=1e-6, atol=1e-6)


def test_errors_say_what_to_do():
    q, kc, vc, lens, tables, k, v = setup()
    with pytest.raises(ValueError, match="`block_size` must be the page size of `key_cache`, 4"):
        page_attention(q, kc, vc, lens, tables, block_size=8)
    with pytest.raises(TypeError, match="`key_cache` must have the dtype of `query`"):
        page_attention(q, kc.astype(jnp.bfloat16), vc, lens, tables)
    with pytest.raises(ValueError, match="`k_scale` must have shape"):
        page_attention(q, kc, vc, lens, tables, k_scale=jnp.ones(3))
    with pytest.raises(ValueError, match="`num_splits` must be at least 1"):
        page_attention(q, kc, vc, lens, tables, num_splits=0)
    with pytest.raises(ValueError, match="one query a row"):
        ragged_decode_attention(jnp.stack([q, q], 1), k, v, lens, lens)
    with pytest.raises(UnsupportedError, match="no derivative with respect to `query`"):
        jax.grad(lambda q: page_attention(q, kc, vc, lens, tables).sum())(q)


def temporaries(fn, *args):
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_a_few_pages_a_row():
    batch, heads, groups, d, size, blocks = 4, 8, 2, 64, 16, 512
    shape = jax.ShapeDtypeStruct

    def call(blocks):
        cache = shape((batch * blocks, groups, size, d), jnp.float32)
        rows = shape((batch, heads, d), jnp.float32), cache, cache, shape((batch,), jnp.int32)
        return *rows, shape((batch, blocks), jnp.int32)

    args = call(blocks)
    keys = batch * blocks * size * groups * d * 4
    used = temporaries(page_attention, *args)
    assert used < keys // 2
    assert temporaries(page_attention, *call(8 * blocks)) < used + keys // 100
    dense_keys = shape((batch, blocks * size, groups, d), jnp.float32)
    ends = shape((batch,), jnp.int32)
    used = temporaries(ragged_decode_attention, args[0], dense_keys, dense_keys, ends, ends)
    assert used < keys // 2


# Packed queries


STARTS = np.array([0, 0, 1, 4, 6, 7, 19])  # 0, 1, 3, 2, 1 and 12 queries
TOKENS = 22  # three belong to nobody


def packed(fill=np.nan):
    _, kc, vc, lens, tables, k, _ = setup(fill)
    queries = jax.random.normal(jax.random.key(9), (TOKENS, HEADS, D))
    value = jax.random.normal(jax.random.key(10), (BATCH, ROOM, GROUPS, D))
    vc = paged(
        np.asarray(value), np.clip(np.asarray(tables), 0, kc.shape[0] - 1), kc.shape[0], fill
    )
    return queries, pages_to_interleaved(kc, vc), lens, tables, jnp.asarray(STARTS), k, value


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_queries_equal_dense_attention(name):
    queries, pages, lens, tables, starts, k, v = packed()
    out, lse = ragged_page_attention(
        queries, pages, lens, tables, starts, BATCH, return_lse=True, **host.to_jax(OPTIONS[name])
    )
    expected, expected_lse = flash_attention(
        queries[None],
        jnp.concatenate([k[b, :n] for b, n in enumerate(LENGTHS)])[None],
        jnp.concatenate([v[b, :n] for b, n in enumerate(LENGTHS)])[None],
        causal=True,
        cum_seqlens_q=starts,
        cum_seqlens_k=jnp.asarray(SUMS),
        return_lse=True,
        **host.to_jax(OPTIONS[name]),
    )
    mine = slice(0, STARTS[-1])
    np.testing.assert_allclose(out[mine], expected[0, mine], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse[mine], expected_lse[0].T[mine], rtol=2e-5, atol=2e-6)
    assert (out[STARTS[-1] :] == 0).all()
    assert np.isneginf(lse[STARTS[-1] :]).all()


def test_sequences_that_do_not_count_give_nothing():
    queries, pages, lens, tables, starts, *_ = packed()
    run = jax.jit(lambda count: ragged_page_attention(queries, pages, lens, tables, starts, count))
    full, some = run(jnp.asarray(BATCH)), run(jnp.asarray([3]))
    np.testing.assert_array_equal(some[: STARTS[3]], full[: STARTS[3]])
    assert (some[STARTS[3] :] == 0).all()
    assert (run(jnp.asarray(0)) == 0).all()


def test_surplus_queries_see_nothing():
    queries, pages, lens, tables, starts, *_ = packed()
    full = ragged_page_attention(queries, pages, lens, tables, starts, BATCH)
    short = ragged_page_attention(queries, pages, lens.at[5].set(5), tables, starts, BATCH)
    assert (short[7 : 7 + ROOM - 5] == 0).all()
    assert np.isfinite(short).all()
    # the last five queries now stand at the first five positions
    moved = queries.at[7:12].set(queries[14:19])
    expected = ragged_page_attention(moved, pages, lens, tables, starts, BATCH)[7:12]
    np.testing.assert_allclose(short[14:19], expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(short[:7], full[:7])


def test_packed_decode_equals_page_attention():
    q, kc, vc, lens, tables, *_ = setup(0.0)
    vc = jnp.concatenate([vc, vc[..., : D - E]], -1)
    starts = jnp.arange(BATCH + 1)
    out = ragged_page_attention(q, pages_to_interleaved(kc, vc), lens, tables, starts, BATCH)
    expected = page_attention(q, kc, vc, lens, tables)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)


def test_memory_of_packed_queries_is_a_few_pages_a_row():
    count, tokens, heads, groups, d, size, blocks = 4, 256, 8, 2, 64, 16, 512
    shape = jax.ShapeDtypeStruct

    def call(blocks):
        return (
            shape((tokens, heads, d), jnp.float32),
            shape((count * blocks, size, 2 * groups, d), jnp.float32),
            shape((count,), jnp.int32),
            shape((count, blocks), jnp.int32),
            shape((count + 1,), jnp.int32),
            shape((), jnp.int32),
        )

    pages = call(blocks)[1].size * 4
    used = temporaries(ragged_page_attention, *call(blocks))
    assert used < pages
    assert temporaries(ragged_page_attention, *call(8 * blocks)) < used + pages // 100


# Writing


def written():
    keys = jax.random.split(jax.random.key(5), 4)
    caches = [jax.random.normal(keys[i], (3, GROUPS, W, n)) for i, n in enumerate((D, E))]
    new = [jax.random.normal(keys[2 + i], (5, GROUPS, n)) for i, n in enumerate((D, E))]
    return (*caches, *new, jnp.asarray([7, -1, 0, 12, 10]))


def expect(caches, new, slots):
    caches = [np.array(c) for c in caches]
    for cache, rows in zip(caches, new, strict=True):
        for slot, row in zip(slots.tolist(), rows, strict=True):
            if 0 <= slot < 3 * W:
                cache[slot // W, :, slot % W] = row
    return caches


def test_update_writes_slots_and_skips_the_rest():
    *arrays, slots = written()
    expected = expect(arrays[:2], arrays[2:], slots)
    with pytest.warns(EjkernelWarning, match="donate_cache=True"):
        eager = update_paged_cache(*arrays, slots)
    jitted = jax.jit(update_paged_cache)(*arrays, slots)
    given = update_paged_cache(*(x + 0 for x in arrays[:2]), *arrays[2:], slots, donate_cache=True)
    for actual in (eager, jitted, given):
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(a, e)


def test_donated_caches_are_not_copied():
    *arrays, slots = written()
    made = jax.jit(update_paged_cache, donate_argnums=(0, 1)).lower(*arrays, slots).compile()
    memory = made.memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in arrays[:2])
    text = made.as_text()
    assert re.search(r"input_output_alias=\{ \{0\}: \(0.*\{1\}: \(1", text)
    of_a_cache = r" = f32\[3,2,4,[86]\]\S* copy\("
    assert not re.search(of_a_cache, text)
    assert re.search(
        of_a_cache, jax.jit(update_paged_cache).lower(*arrays, slots).compile().as_text()
    )
    caches = [x + 0 for x in arrays[:2]]
    update_paged_cache(*caches, *arrays[2:], slots, donate_cache=True)
    assert all(x.is_deleted() for x in caches)


def test_update_then_attend():
    q, kc, vc, lens, tables, k, v = setup(0.0)
    slot = tables[5, 2] * W + 3
    kc0, vc0 = (x.at[tables[5, 2], :, 3].set(9.0) for x in (kc, vc))
    kc1, vc1 = jax.jit(update_paged_cache)(kc0, vc0, k[5:, -1], v[5:, -1], slot[None])
    expected = page_attention(q, kc, vc, lens, tables)
    np.testing.assert_array_equal(page_attention(q, kc1, vc1, lens, tables), expected)


def test_update_wants_the_dtype_of_the_cache():
    kc, vc, k, v, slots = written()
    with pytest.raises(TypeError, match="`keys` must have the dtype of `key_cache`"):
        jax.jit(update_paged_cache)(kc, vc, k.astype(jnp.bfloat16), v, slots)


@pytest.mark.parametrize("op", ["update_kv_pages", "update_latent_pages"])
def test_pages_of_other_layouts_are_written_in_place(op):
    update, case = getattr(modules, op), harness.find_case(op, "plain")
    pages, *new = case.values(jnp.float32, jax.random.key(4)).values()
    with pytest.warns(EjkernelWarning, match=f"`{op}`: .*donate_cache=True"):
        expected = update(pages, *new)
    made = jax.jit(update, donate_argnums=0).lower(pages, *new).compile()
    assert made.memory_analysis().alias_size_in_bytes == pages.nbytes
    of_pages = rf" = f32\[{','.join(map(str, pages.shape))}\]\S* copy\("
    assert not re.search(of_pages, made.as_text())
    given = pages + 0
    np.testing.assert_array_equal(update(given, *new, donate_cache=True), expected)
    assert given.is_deleted()
    np.testing.assert_array_equal(made(pages, *new), expected)


def test_layouts_agree():
    """What a step writes into one layout is what it writes into the other."""
    kc, _, k, _, slots = written()
    vc, v = 2 * kc, 3 * k
    both = jax.jit(modules.update_kv_pages)(pages_to_interleaved(kc, vc), k, v, slots)
    caches = jax.jit(update_paged_cache)(kc, vc, k, v, slots)
    np.testing.assert_array_equal(both, pages_to_interleaved(*caches))


@pytest.mark.parametrize(
    ("op", "shapes", "error", "message"),
    [
        ("update_kv_pages", [(3, W, 3, D), (5, 2, D), (5, 2, D)], ValueError, "4 heads.* got 3"),
        ("update_kv_pages", [(3, W, 4, D), (5, 2, D), (5, 1, D)], ValueError, "`values`"),
        ("update_latent_pages", [(3, W, 9), (5, 6), (5, 2)], ValueError, "width of 8.* got 9"),
        ("update_latent_pages", [(3, W, 8), (5, 6), (4, 2)], ValueError, "`ropes`"),
        (
            "update_latent_pages",
            [(3, W, 8), (5, 6), None],
            TypeError,
            "dtype of `kv_pages`",
        ),
    ],
)
def test_errors_of_writers_name_the_argument(op, shapes, error, message):
    arrays = [jnp.ones((5, 2), jnp.bfloat16) if s is None else jnp.ones(s) for s in shapes]
    with pytest.raises(error, match=f"`{op}`: .*{message}"):
        jax.jit(getattr(modules, op))(*arrays, jnp.arange(5))


def test_layouts_of_pages():
    keys = jax.random.split(jax.random.key(8), 2)
    kc, vc = (jax.random.normal(key, (3, GROUPS, W, D)) for key in keys)
    both = pages_to_interleaved(kc, vc)
    assert both.shape == (3, W, 2 * GROUPS, D)
    np.testing.assert_array_equal(both[1, 2, 2], kc[1, 1, 2])
    np.testing.assert_array_equal(both[1, 2, 3], vc[1, 1, 2])
    for a, e in zip(pages_from_interleaved(both), (kc, vc), strict=True):
        np.testing.assert_array_equal(a, e)
    with pytest.raises(ValueError, match="one shape and dtype"):
        pages_to_interleaved(kc, vc[:2])
    with pytest.raises(ValueError, match="2 \\* g"):
        pages_from_interleaved(both[:, :, :3])


def test_an_executor_refuses_to_donate():
    cache = jnp.zeros((2, 1, 4, 8))
    new = jnp.ones((1, 1, 8))
    with pytest.raises(ValueError, match="donate_cache"):
        create_default_executor()(
            UpdatePagedCache(), cache, cache, new, new, jnp.asarray([1]), donate_cache=True
        )
