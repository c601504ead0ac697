"""Latent attention over pages: against `mla_attention`, with garbage, scales and bad tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import _settings
from ejkernel.errors import UnsupportedError
from ejkernel.modules import (
    MLAPageAttention,
    create_default_executor,
    mla_attention,
    mla_page_attention,
)
from tests import host

W, BLOCKS, HEADS, D, E, L, R = 4, 3, 4, 6, 5, 8, 4
ROOM = W * BLOCKS
LENGTHS = np.array([0, 1, W - 1, W, W + 1, ROOM])
COUNT = len(LENGTHS)
STARTS = np.array([0, 0, 1, 4, 6, 7, 19])  # 0, 1, 3, 2, 1 and 12 queries
TOKENS = 22  # three belong to nobody
SUMS = np.concatenate([[0], np.cumsum(LENGTHS)])
SCALE = (D + R) ** -0.5
attend = functools.partial(mla_page_attention, softmax_scale=SCALE)


def setup(fill=np.nan):
    """Queries, rope parts, pages with garbage in what is unused, lengths, tables, and latents."""
    keys = jax.random.split(jax.random.key(0), 3)
    latents = np.asarray(jax.random.normal(keys[0], (COUNT, ROOM, L + R)))
    pages = COUNT * BLOCKS + 3
    tables = np.random.default_rng(0).permutation(pages)[: COUNT * BLOCKS].reshape(COUNT, BLOCKS)
    cache = np.full((pages, W, L + R), fill, np.float32)
    for row, length in enumerate(LENGTHS):
        for j in range(length):
            cache[tables[row, j // W], j % W] = latents[row, j]
    unused = np.arange(BLOCKS)[None] * W >= LENGTHS[:, None]
    tables = np.where(unused, np.array([-1, 10**9, -(2**31)]), tables)
    q_nope = jax.random.normal(keys[1], (TOKENS, HEADS, L))
    q_pe = jax.random.normal(keys[2], (TOKENS, HEADS, R))
    rest = (jnp.asarray(LENGTHS), jnp.asarray(tables, jnp.int32), jnp.asarray(STARTS))
    packed = np.concatenate([latents[b, :n] for b, n in enumerate(LENGTHS)])[None]
    return (q_nope, q_pe, jnp.asarray(cache), *rest), jnp.asarray(packed)


def assert_close(actual, expected, rtol=2e-5):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=0.1 * rtol)


OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 2},
    "everything": {
        "sliding_window": (6, -1),
        "logits_soft_cap": 2.0,
        "softmax_aux": host.asarray(np.linspace(-1.0, 1.0, HEADS)[:, None]),
        "alibi_slopes": host.asarray(np.linspace(0.1, 0.5, HEADS)),
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "everything" else pytest.mark.slow) for n in OPTIONS]
)
def test_equals_latent_attention_of_packed_sequences(name):
    """The caller multiplies w_kc into queries and w_vc into outputs; the rest is the same."""
    (_, q_pe, *rest), latents = setup()
    keys = jax.random.split(jax.random.key(3), 3)
    query = jax.random.normal(keys[0], (TOKENS, HEADS, D))
    w_kc, w_vc = (
        jax.random.normal(k, (L, HEADS, n)) for k, n in zip(keys[1:], (D, E), strict=True)
    )
    q_nope = jnp.einsum("nhd,lhd->nhl", query, w_kc, precision="highest")
    options = host.to_jax(OPTIONS[name]) | {"softmax_scale": SCALE, "return_lse": True}
    out, lse = jax.jit(lambda *xs: attend(*xs, COUNT, **options))(q_nope, q_pe, *rest)
    out = jnp.einsum("nhl,lhe->nhe", out, w_vc, precision="highest")
    expected, expected_lse = mla_attention(
        query[None],
        latents[..., :L],
        w_kc,
        w_vc,
        q_pe[None],
        latents[..., L:],
        causal=True,
        cum_seqlens_q=rest[-1],
        cum_seqlens_k=jnp.asarray(SUMS),
        **options,
    )
    mine = slice(0, STARTS[-1])
    assert_close((out[mine], lse[mine]), (expected[0, mine], expected_lse[0].T[mine]))
    assert (out[STARTS[-1] :] == 0).all()
    assert np.isneginf(lse[STARTS[-1] :]).all()
    assert lse.dtype == jnp.float32


def test_values_by_hand():
    """Two keys with scores 0 and ln 3 over two pages, values 2 and 4; the third key is hidden."""
    pages = jnp.asarray([[[4.0, np.log(3.0)], [np.nan] * 2], [[9.0, 9.0], [2.0, 0.0]]])
    q_nope, q_pe = jnp.zeros((2, 1, 1)), jnp.ones((2, 1, 1))
    lens, starts = jnp.asarray([3]), jnp.asarray([0, 1])
    run = functools.partial(mla_page_attention, q_nope, q_pe, pages, lens, jnp.asarray([[1, 0]]))
    out, lse = run(starts, 1, softmax_scale=1.0, sliding_window=1, return_lse=True)
    np.testing.assert_allclose(out[0, 0], [3.5], rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], np.log(4.0), rtol=1e-6)
    assert out[1, 0, 0] == 0


def test_what_nobody_sees_changes_no_bit():
    results = []
    for fill in (0.0, np.nan, np.inf):
        xs, _ = setup(fill)
        results.append(attend(*xs, COUNT, sliding_window=6, return_lse=True))
    (*xs, lens, tables, starts), _ = setup(0.0)
    tables = jnp.where(jnp.arange(BLOCKS)[None] * W >= lens[:, None], 0, tables)
    again = attend(*xs, lens, tables, starts, COUNT, sliding_window=6, return_lse=True)
    for other in (*results[1:], again):
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert np.isfinite(results[0][0]).all()


def test_garbage_that_is_seen_shows():
    (q_nope, q_pe, pages, lens, tables, starts), _ = setup(0.0)
    pages = pages.at[tables[5, 1], 2, 1].set(jnp.nan)  # position 6 of the last sequence
    out = attend(q_nope, q_pe, pages, lens, tables, starts, COUNT)
    assert np.isfinite(out[:13]).all()
    assert np.isnan(out[13:19]).all()


def test_sequences_that_do_not_count_give_nothing():
    xs, _ = setup()
    run = jax.jit(lambda count: attend(*xs, count))
    full, some = run(jnp.asarray(COUNT)), run(jnp.asarray([3]))
    np.testing.assert_array_equal(some[: STARTS[3]], full[: STARTS[3]])
    assert (some[STARTS[3] :] == 0).all()
    assert (run(jnp.asarray(0)) == 0).all()
    through = create_default_executor()(MLAPageAttention(), *xs, COUNT, softmax_scale=SCALE)
    np.testing.assert_allclose(through, full, rtol=1e-6, atol=1e-6)


def test_surplus_queries_see_nothing():
    (*xs, lens, tables, starts), _ = setup()
    full = attend(*xs, lens, tables, starts, COUNT)
    short = attend(*xs, lens.at[5].set(5), tables, starts, COUNT)
    assert (short[7 : 7 + ROOM - 5] == 0).all()
    assert np.isfinite(short).all()
    np.testing.assert_array_equal(short[:7], full[:7])


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("query_dtype", ["float32", "bfloat16"])
def test_one_scale_widens_narrow_pages(dtype, query_dtype):
    (q_nope, q_pe, pages, *rest), _ = setup(0.0)
    factor = 20.0 if dtype == "int8" else 1.0
    narrow = (pages * factor).astype(dtype)
    narrow_q = (q.astype(query_dtype) for q in (q_nope, q_pe))
    out = attend(*narrow_q, narrow, *rest, COUNT, k_scale=1.5 / factor)
    widened = narrow.astype(jnp.float32) * (1.5 / factor)
    expected = attend(q_nope, q_pe, widened, *rest, COUNT)
    assert out.dtype == jnp.dtype(query_dtype)
    rtol = 2e-5 if query_dtype == "float32" else 4e-2
    limit = rtol * np.abs(expected).max()
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=rtol, atol=limit)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (5, 0, 3, 4), (5, 2, 0, 4), (5, 2, 3, 0)])
def test_nothing_to_attend_to(sizes):
    tokens, count, blocks, pages = sizes
    lens = jnp.full(count, 2 if 0 in (blocks, pages) else 0, jnp.int32)
    starts = jnp.minimum(jnp.arange(count + 1), tokens)
    out, lse = attend(
        jnp.ones((tokens, HEADS, L)),
        jnp.ones((tokens, HEADS, R)),
        jnp.ones((pages, W, L + R)),
        lens,
        jnp.zeros((count, blocks), jnp.int32),
        starts,
        count,
        return_lse=True,
    )
    assert out.shape == (tokens, HEADS, L)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_heads_may_be_split_over_devices():
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    xs, _ = setup()
    sinks = jnp.arange(4.0)[:, None]
    split = attend(
        *xs,
        COUNT,
        softmax_aux=sinks,
        mesh=mesh,
        in_specs={"q_nope": P(None, "model")},
        out_specs=P(None, "model"),
    )
    expected = attend(*xs, COUNT, softmax_aux=sinks)
    np.testing.assert_allclose(split, expected, rtol=1e-6, atol=1e-6)
    place = {"in_specs": {"q_nope": P("model")}, "out_specs": P("model")}
    with pytest.raises(ValueError, match="splits axis 'n' of `q_nope`"):
        attend(*xs, COUNT, mesh=mesh, **place)


def test_memory_is_a_few_pages_a_row():
    count, tokens, heads, latent, rope, size, blocks = 4, 64, 8, 64, 16, 16, 1024
    shape = jax.ShapeDtypeStruct
    pages = shape((count * blocks, size, latent + rope), jnp.float32)
    args = (
        shape((tokens, heads, latent), jnp.float32),
        shape((tokens, heads, rope), jnp.float32),
        pages,
        shape((count,), jnp.int32),
        shape((count, blocks), jnp.int32),
        shape((count + 1,), jnp.int32),
        shape((), jnp.int32),
    )
    memory = jax.jit(attend).lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < pages.size * 4 // 4


def test_double_precision():
    xs, _ = setup(0.0)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) if x.dtype == jnp.float32 else x for x in xs]
        out = attend(*wide, COUNT)
        assert out.dtype == jnp.float64
        assert_close([attend(*xs, COUNT)], [out])


def test_errors_say_what_to_do():
    (q_nope, q_pe, pages, lens, tables, starts), _ = setup()
    call = functools.partial(attend, q_nope, q_pe)
    with pytest.raises(ValueError, match=r"`softmax_scale` is required.*`softmax_scale=\(d \+ 4\)"):
        mla_page_attention(q_nope, q_pe, pages, lens, tables, starts, COUNT)
    with pytest.raises(ValueError, match=r"`kv_pages` must have rows of 8 \+ 4, .* got 11"):
        call(pages[..., :-1], lens, tables, starts, COUNT)
    with pytest.raises(TypeError, match="`kv_pages` must have the dtype of `q_nope`, float32, or"):
        call(pages.astype(jnp.bfloat16), lens, tables, starts, COUNT)
    with pytest.raises(TypeError, match="`q_pe` must have the dtype of `q_nope`"):
        attend(q_nope, q_pe.astype(jnp.bfloat16), pages, lens, tables, starts, COUNT)
    with pytest.raises(ValueError, match=r"`query_start_loc` must be \[7\], one more"):
        call(pages, lens, tables, starts[1:], COUNT)
    with pytest.raises(ValueError, match="`num_seqs` must be one number"):
        call(pages, lens, tables, starts, jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match="`k_scale` must be a number"):
        call(pages, lens, tables, starts, COUNT, k_scale=jnp.ones(2))
    with pytest.raises(ValueError, match="`num_splits` must be at least 1"):
        call(pages, lens, tables, starts, COUNT, num_splits=0)
    rest = (q_pe, pages, lens, tables, starts, COUNT)
    with pytest.raises(UnsupportedError, match="no derivative with respect to `q_nope`"):
        jax.grad(lambda q: attend(q, *rest).sum())(q_nope)


def test_lengths_are_checked_under_debug():
    (*xs, lens, tables, starts), _ = setup()
    with (
        _settings.override(debug=True),
        pytest.raises(ValueError, match="`mla_page_attention`: a sequence must not have more quer"),
    ):
        attend(*xs, lens.at[5].set(5), tables, starts, COUNT)
    with (
        _settings.override(debug=True),
        pytest.raises(ValueError, match="`mla_page_attention`: `block_tables` must name pages in"),
    ):
        attend(*xs, lens, tables.at[5, 0].set(99), starts, COUNT)
