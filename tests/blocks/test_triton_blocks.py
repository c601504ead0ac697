"""Pieces of the Triton kernels, in Triton's interpreter, against formulas and the XLA twins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel.callib import triton_call
from ejkernel.kernels._xla._blocks import philox as xla_philox

triton = pytest.importorskip("triton")
tl = triton.language

from ejkernel.kernels._triton._blocks import (  # noqa: E402
    addresses,
    logits,
    mask,
    philox,
    softmax,
)

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)
ALL = 0xFFFFFFFF


@pytest.fixture(autouse=True, scope="module")
def _interpreted():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def shape(*size, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(size, dtype)


# Softmax

ROWS, KEYS, WIDTH, CHUNKS = 4, 16, 4, 3


@triton.jit
def softmax_kernel(
    x, chunk, values, sinks, out, lse, weights,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
    FACTOR: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attention over the keys of one chunk after another, then the weights from the logsumexp."""
    o_r = tl.arange(0, ROWS)
    o_k = tl.arange(0, KEYS)
    o_w = tl.arange(0, WIDTH)
    b_x = tl.load(x + o_r[:, None] * KEYS + o_k[None, :])
    b_v = tl.load(values + o_k[:, None] * WIDTH + o_w[None, :])
    b_c = tl.load(chunk + o_k)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for c in range(CHUNKS):
        part = tl.where((b_c == c)[None, :], b_x, float("-inf"))
        m, l, p, alpha = softmax.update(m, l, part, FACTOR)
        acc = acc * alpha[:, None] + tl.sum(p[:, :, None] * b_v[None, :, :], 1)
    m = m * FACTOR
    if sinks is not None:
        m, l, alpha = softmax.add_sinks(m, l, sinks, 0)
        acc *= alpha[:, None]
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    tl.store(out + o_r[:, None] * WIDTH + o_w[None, :], acc)
    tl.store(lse + o_r, softmax.logsumexp(m, l))
    exponents = softmax.exponents(b_x, softmax.logsumexp(m, l)[:, None], FACTOR, EXACT)
    tl.store(weights + o_r[:, None] * KEYS + o_k[None, :], tl.math.exp2(exponents))


def in_chunks(logits, chunk, values, sinks=None, scale=1.0, exact=False):
    """`logits` in natural units; the kernel gets them divided by `scale`."""
    made = triton_call(
        softmax_kernel,
        inputs={
            "x": logits / np.float32(scale),
            "chunk": np.asarray(chunk, np.int32),
            "values": values,
            "sinks": None if sinks is None else softmax.Sinks(sinks, 0, len(sinks), 4),
        },
        outputs={"out": shape(ROWS, WIDTH), "lse": shape(ROWS), "weights": shape(ROWS, KEYS)},
        grid=(1,),
        ROWS=ROWS,
        KEYS=KEYS,
        WIDTH=WIDTH,
        CHUNKS=CHUNKS,
        FACTOR=scale,
        EXACT=exact,
    )
    return list(made.values())


def at_once(logits, values, sinks=None):
    """`logsumexp` over keys and sinks in float64; 0 and -inf for a row without any."""
    x = np.asarray(logits, np.float64)
    if sinks is not None:
        x = np.concatenate([x, np.broadcast_to(sinks, (ROWS, len(sinks)))], axis=1)
    top = x.max(axis=1, keepdims=True)
    top = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(x - top).sum(axis=1)) + top[:, 0]
    weights = np.exp(x - np.where(np.isneginf(lse), 0.0, lse)[:, None])[:, :KEYS]
    return weights @ values.astype(np.float64), lse, weights


def make(seed, hide, scale=1.0, offset=(0.0, 0.0, 0.0), chunk=None):
    """Logits with -inf where hidden (in row 0 everywhere, when anything is), and values."""
    rng = np.random.default_rng(seed)
    chunk = np.arange(KEYS) % CHUNKS if chunk is None else np.asarray(chunk)
    logits = rng.standard_normal((ROWS, KEYS)) * scale + np.asarray(offset)[chunk]
    key, row = np.arange(KEYS), np.arange(ROWS)[:, None]
    gone = ((key * 7 + row) % KEYS < hide) | ((row == 0) & (hide > 0))
    logits = np.where(gone, -np.inf, logits).astype(np.float32)
    return logits, chunk, rng.standard_normal((KEYS, WIDTH)).astype(np.float32)


def assert_same(actual, expected, rtol=2e-5, atol=2e-6):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol)


@SETTINGS
@given(
    seed=st.integers(0, 2**16),
    chunk=st.lists(st.integers(0, CHUNKS - 1), min_size=KEYS, max_size=KEYS),
    hide=st.integers(0, KEYS),
    offset=st.tuples(*[st.sampled_from([0.0, 90.0, -90.0])] * CHUNKS),
    sinks=st.none() | st.lists(st.sampled_from([0.5, -3.0, 80.0, -np.inf]), min_size=1, max_size=4),
    exact=st.booleans(),
)
@example(seed=1, chunk=[0] * KEYS, hide=0, offset=(0.0, 0.0, 0.0), sinks=None, exact=False)
@example(seed=2, chunk=[0, 1] * 8, hide=KEYS, offset=(0.0, 0.0, 0.0), sinks=None, exact=True)
@example(seed=3, chunk=[2] * KEYS, hide=5, offset=(0.0, 0.0, 0.0), sinks=[0.5, -3.0], exact=False)
@example(seed=4, chunk=[0, 1] * 8, hide=KEYS, offset=(0.0, 0.0, 0.0), sinks=[-np.inf], exact=True)
@example(seed=5, chunk=[0, 1] * 8, hide=0, offset=(-90.0, 90.0, 0.0), sinks=[80.0], exact=False)
@example(
    seed=6, chunk=[0, 1] * 8, hide=3, offset=(90.0, -90.0, 0.0), sinks=[-np.inf, 0.5], exact=True
)
def test_chunking_never_changes_the_answer(seed, chunk, hide, offset, sinks, exact):
    logits, chunk, values = make(seed, hide, offset=offset, chunk=chunk)
    sinks = None if sinks is None else np.asarray(sinks, np.float32)
    actual = in_chunks(logits, chunk, values, sinks, exact=exact)
    out, lse, weights = at_once(logits, values, sinks)
    # weights are exp of lse, and a float32 of 90 is that coarse
    assert_same(actual, (out, lse, weights), rtol=5e-5, atol=1e-5)
    if sinks is None:
        expected = jax.nn.logsumexp(jnp.asarray(logits), axis=1)
        np.testing.assert_allclose(actual[1], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [0.125, 3.0])
def test_logits_may_be_in_any_units(scale):
    logits, chunk, values = make(7, hide=3)
    assert_same(in_chunks(logits, chunk, values, scale=scale), at_once(logits, values))


def test_a_key_that_is_not_a_number_spoils_its_row_only():
    logits, chunk, values = make(9, hide=0)
    logits[1, 5] = np.nan
    out, lse, _ = in_chunks(logits, chunk, values)
    np.testing.assert_array_equal(np.isnan(lse), [False, True, False, False])
    np.testing.assert_array_equal(np.isnan(out).any(axis=1), [False, True, False, False])


# Philox


@triton.jit
def words_kernel(seed, counters, out, N: tl.constexpr):
    o = tl.arange(0, N)
    c0 = tl.load(counters + o)
    c1 = tl.load(counters + N + o)
    c2 = tl.load(counters + 2 * N + o)
    c3 = tl.load(counters + 3 * N + o)
    w0, w1, w2, w3 = philox.words(seed, c0, c1, c2, c3)
    tl.store(out + o, w0)
    tl.store(out + N + o, w1)
    tl.store(out + 2 * N + o, w2)
    tl.store(out + 3 * N + o, w3)


word = st.sampled_from([0, 1, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, ALL]) | st.integers(0, ALL)


def words(key, counters):
    given = np.asarray(counters, np.uint32).T.copy()
    made = triton_call(
        words_kernel,
        inputs={"seed": np.asarray(key, np.uint32), "counters": given},
        outputs={"out": shape(*given.shape, dtype=jnp.uint32)},
        grid=(1,),
        N=given.shape[1],
    )
    return np.asarray(made["out"])


@SETTINGS
@given(key=st.tuples(word, word), counters=st.lists(st.tuples(*[word] * 4), min_size=4, max_size=4))
@example(key=(0, 0), counters=[(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 1)])
@example(key=(ALL, ALL), counters=[(ALL, ALL, ALL, ALL)] * 4)
@example(key=(ALL, 0), counters=[(0xFFFF, 0, 0x10000, 0), (ALL, 0, ALL, 0)] * 2)
def test_words_are_those_of_every_backend(key, counters):
    columns = tuple(np.asarray(c, np.uint32) for c in zip(*counters, strict=True))
    expected = np.stack(xla_philox.words(jnp.asarray(key, jnp.uint32), columns))
    np.testing.assert_array_equal(words(key, counters), expected)


def test_a_known_answer():
    key, counter = (0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    expected = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]  # kat_vectors of Random123
    np.testing.assert_array_equal(words(key, [counter] * 2)[:, 0], expected)


@triton.jit
def keep_kernel(
    dropout, offset, place, out, BQ: tl.constexpr, BK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A program for each block of keys."""
    first = tl.program_id(0) * BK
    o_q = tl.load(place + 2) + tl.arange(0, BQ)
    i_b, i_h = philox.indices(offset, tl.load(place), tl.load(place + 1))
    kept = philox.keep(dropout, i_b, i_h, o_q, first, BQ, BK)
    o = tl.arange(0, BQ)[:, None] * KEYS + first + tl.arange(0, BK)[None, :]
    tl.store(out + o, kept.to(tl.int32))


def keep(seed, place, block, threshold, offset=None):
    made = triton_call(
        keep_kernel,
        inputs={
            "dropout": philox.Dropout(seed, threshold, 1.0),
            "offset": offset,
            "place": np.asarray(place, np.int32),
        },
        outputs={"out": shape(4, 16, dtype=jnp.int32)},
        grid=(16 // block,),
        BQ=4,
        BK=block,
        KEYS=16,
    )
    return np.asarray(made["out"])


@pytest.mark.parametrize("prob", [0.1, 0.5])
@pytest.mark.parametrize("block", [4, 8, 16])
@pytest.mark.parametrize("place", [(0, 0, 0), (3, 2, 4096)])
def test_kept_pairs_are_those_of_every_backend(prob, block, place):
    seed = jnp.asarray([5, 0x80000001], jnp.uint32)
    made = keep(seed, place, block, int(prob * 2.0**32))
    batch, head, first = place
    expected = xla_philox.keep(
        seed,
        prob,
        batch=jnp.uint32(batch),
        head=jnp.uint32(head),
        query=jnp.arange(4, dtype=jnp.uint32) + first,
        first_key=jnp.uint32(0),
        num_keys=16,
    )
    np.testing.assert_array_equal(made, expected)
    assert 0 < made.sum() < 64
    offset = np.asarray([batch, head], np.uint32)  # of the first tile in the user's call
    shifted = keep(seed, (0, 0, first), block, int(prob * 2.0**32), offset)
    np.testing.assert_array_equal(shifted, made)


def test_a_word_that_equals_the_threshold_is_kept():
    seed = np.asarray([3, 4], np.uint32)
    first = int(words(seed, [(0, 0, 0, 0)] * 2)[0, 0])
    assert keep(seed, (0, 0, 0), 16, first)[0, 0]
    assert not keep(seed, (0, 0, 0), 16, first + 1)[0, 0]


# Masks


@triton.jit
def window_kernel(q, k, window, out, N: tl.constexpr):
    o = tl.arange(0, N)
    b_q, b_k = tl.load(q + o)[:, None], tl.load(k + o)[None, :]
    seen = mask.inside_window(b_q, b_k, window)
    tl.store(out + o[:, None] * N + o[None, :], seen.to(tl.int32))


LIMIT = 2**31
POSITIONS = {
    "usual": np.arange(-4, 4),
    # what canonical calls may have: a limit of 2^30 added to them fits into 32 bits
    "largest": np.asarray([2**29 - 1, 0, 5, 1 - 2**29, 2**29 - 2, 7, -(2**28), 2**28]),
}


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize(
    "limits", [(0, 0), (3, None), (None, 2), (2, 5), (LIMIT - 1, None), (None, LIMIT - 1)], ids=str
)
def test_pairs_inside_a_window(where, limits):
    q_pos = POSITIONS[where]
    k_pos = np.roll(q_pos, 3)
    left, right = limits
    seen = triton_call(
        window_kernel,
        inputs={
            "q": q_pos.astype(np.int32),
            "k": k_pos.astype(np.int32),
            "window": mask.window(limits, None),
        },
        outputs={"out": shape(8, 8, dtype=jnp.int32)},
        grid=(1,),
        N=8,
    )["out"]
    distance = k_pos[None, :] - q_pos[:, None]  # int64
    expected = np.ones((8, 8), bool)
    if left is not None:
        expected &= distance >= -left
    if right is not None:
        expected &= distance <= right
    np.testing.assert_array_equal(seen, expected)


@triton.jit
def real_kernel(tokens, out, count, N: tl.constexpr):
    real = mask.real_tokens(tokens, 1, tl.program_id(0) * N, count, N)
    tl.store(out + tl.program_id(0) * N + tl.arange(0, N), real.to(tl.int32))


@pytest.mark.parametrize("more", [False, True])
def test_tokens_that_are_no_padding(more):
    ids = np.asarray([[0] * 7, [3, -1, 0, 2, -5, 1, 1]], np.int32)
    others = np.asarray([[1, 1, -1, 0, 0, -2, 4]], np.int32) if more else None
    made = triton_call(
        real_kernel,
        inputs={"tokens": mask.Tokens(ids, 7, others, 0 if more else None, None, None), "count": 7},
        outputs={"out": shape(8, dtype=jnp.int32)},
        grid=(2,),
        N=4,
    )["out"]
    expected = np.append(ids[1] >= 0, False)
    if more:
        expected &= np.append(others[0] >= 0, False)
    np.testing.assert_array_equal(made, expected)


@triton.jit
def same_kernel(q, k, out, N: tl.constexpr):
    o = tl.arange(0, N)
    seen = mask.same_segment(tl.load(q + o)[:, None], tl.load(k + o)[None, :])
    tl.store(out + o[:, None] * N + o[None, :], seen.to(tl.int32))


def test_pairs_of_one_segment():
    q_ids = np.asarray([0, 0, 1, -1, 7, -2, LIMIT - 1, -LIMIT], np.int32)
    k_ids = np.asarray([0, 1, -1, -2, 7, LIMIT - 1, -LIMIT, 2], np.int32)
    bound = {"inputs": {"q": q_ids, "k": k_ids}, "outputs": {"out": shape(8, 8, dtype=jnp.int32)}}
    seen = triton_call(same_kernel, **bound, grid=(1,), N=8)["out"]
    expected = (q_ids[:, None] == k_ids[None, :]) & (q_ids >= 0)[:, None]
    np.testing.assert_array_equal(seen, expected)


# Loads


@triton.jit
def tile_kernel(x, rows, row, count, valid, out, ROWS: tl.constexpr, CHECKED: tl.constexpr):
    if valid is not None:
        real = tl.load(valid + tl.arange(0, ROWS)) != 0
        tile = addresses.load_tile(x, rows, tl.load(row), count, real, ROWS, CHECKED)
    else:
        tile = addresses.load_tile(x, rows, tl.load(row), count, None, ROWS, CHECKED)
    o = tl.arange(0, ROWS)[:, None] * rows.PADDED + tl.arange(0, rows.PADDED)[None, :]
    tl.store(out + o, tile)


@pytest.mark.parametrize("valid", [None, [1, 0, 1, 1]], ids=["all", "some"])
@pytest.mark.parametrize("columns", [3, 4])
@pytest.mark.parametrize(
    ("row", "checked"), [(0, True), (4, True), (6, True), (8, True), (0, False), (4, False)]
)
def test_tiles_are_zero_beyond_the_edges(row, columns, checked, valid):
    x = np.arange(1, 81, dtype=np.float32).reshape(8, 10)  # rows are ten apart
    count = 7 if checked else 8
    if valid is not None:  # what is not valid may hold anything
        x[[i for i in range(8) if i - row in range(4) and not valid[i - row]]] = np.nan
    tile = triton_call(
        tile_kernel,
        inputs={
            "x": x,
            "rows": addresses.Rows(10, columns, 4),
            "count": count,
            "row": np.asarray([row], np.int32),
            "valid": None if valid is None else np.asarray(valid, np.int32),
        },
        outputs={"out": shape(4, 4)},
        grid=(1,),
        ROWS=4,
        CHECKED=checked,
    )["out"]
    inside = np.zeros((16, 10), np.float32)
    inside[:count] = np.nan_to_num(x[:count])
    expected = inside[row : row + 4, :4] * (np.arange(4) < columns)
    np.testing.assert_array_equal(tile, expected)


@triton.jit
def rows_kernel(x, row, num_rows, rows, out, stored, ROWS: tl.constexpr, OTHER: tl.constexpr):
    o = tl.arange(0, ROWS)
    tl.store(out + o, addresses.load_row(x, tl.load(row), num_rows, ROWS, OTHER))
    tile = tl.full([ROWS, 4], 1.0, tl.float32)
    addresses.store_tile(stored, rows, tl.load(row), num_rows, tile, ROWS)


@pytest.mark.parametrize("row", [0, 3, 5, 8])
def test_nothing_is_loaded_or_stored_beyond_the_end(row):
    x = np.arange(5, 11, dtype=np.int32)
    made = triton_call(
        rows_kernel,
        inputs={
            "x": x,
            "row": np.asarray([row], np.int32),
            "num_rows": 6,
            "rows": addresses.Rows(5, 3, 4),
        },
        outputs={"out": shape(4, dtype=jnp.int32), "stored": shape(12, 5, dtype=jnp.bfloat16)},
        zeroed=["stored"],
        grid=(1,),
        ROWS=4,
        OTHER=-1,
    )
    np.testing.assert_array_equal(made["out"], np.concatenate([x, [-1] * 8])[row : row + 4])
    index = np.arange(12)[:, None]
    expected = (index >= row) & (index < min(row + 4, 6)) & (np.arange(5) < 3)
    np.testing.assert_array_equal(made["stored"], expected)


@triton.jit
def finite_kernel(x, rows, N: tl.constexpr):
    b_x = tl.load(x + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(rows + tl.arange(0, N), addresses.finite_rows(b_x).to(tl.int32))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max, -0.0])
def test_results_that_are_not_finite_are_found(odd):
    x = np.full((4, 4), np.finfo(np.float32).min, np.float32)
    x[2, 1] = odd
    bound = {"inputs": {"x": x}, "outputs": {"rows": shape(4, dtype=jnp.int32)}}
    rows = triton_call(finite_kernel, **bound, grid=(1,), N=4)["rows"]
    np.testing.assert_array_equal(rows, np.isfinite(x).all(1))


# Caps


@triton.jit
def tanh_kernel(x, out, slope, N: tl.constexpr, FINE: tl.constexpr):
    o = tl.arange(0, N)
    y = logits.soft_cap(tl.load(x + o), 1.0, 1.0, FINE)
    tl.store(out + o, y)
    tl.store(slope + o, logits.cap_slope(y * 3.0, 3.0))


def tanh(x, fine=True):
    bound = {"inputs": {"x": x}, "outputs": {"out": shape(x.size), "slope": shape(x.size)}}
    made = triton_call(tanh_kernel, **bound, grid=(1,), N=x.size, FINE=fine)
    return np.asarray(made["out"]), np.asarray(made["slope"])


def test_tanh_for_half_precision():
    x = np.linspace(-100.0, 100.0, 8192, dtype=np.float32)
    np.testing.assert_allclose(tanh(x, fine=False)[0], np.tanh(x.astype(np.float64)), atol=2e-7)


def test_tanh_is_exact_to_float32():
    x = np.concatenate(
        [
            np.linspace(-20.0, 20.0, 2001),
            np.linspace(-1.0, 1.0, 2001),
            np.geomspace(1e-30, 1.0, 2000),
            np.linspace(0.3749, 0.3751, 100),  # where one formula follows the other
        ]
    )
    x = np.resize(x, 8192).astype(np.float32)
    (y, slope), exact = tanh(x), np.tanh(x.astype(np.float64))
    ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert (np.abs(y - exact) / ulp).max() < 3
    np.testing.assert_allclose(y, jnp.tanh(x), rtol=5e-7)
    np.testing.assert_allclose(slope, 1 - exact**2, atol=5e-7)


@pytest.mark.parametrize("fine", [True, False])
def test_tanh_at_the_ends(fine):
    found, _ = tanh(np.asarray([0.0, np.inf, -np.inf, np.nan], np.float32), fine)
    np.testing.assert_array_equal(found, [0.0, 1.0, -1.0, np.nan])


@triton.jit
def scaled_cap_kernel(x, out, N: tl.constexpr, FINE: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, logits.soft_cap(tl.load(x + o), 0.125, 30.0, FINE))


@pytest.mark.parametrize("fine", [True, False])
def test_a_cap_is_one_of_scaled_scores(fine):
    x = np.linspace(-2000.0, 2000.0, 4096, dtype=np.float32)
    bound = {"inputs": {"x": x}, "outputs": {"out": shape(x.size)}}
    found = triton_call(scaled_cap_kernel, **bound, grid=(1,), N=x.size, FINE=fine)["out"]
    np.testing.assert_allclose(
        found, 30.0 * np.tanh(x.astype(np.float64) / 240.0), atol=30.0 * 2e-7
    )


@triton.jit
def slope_kernel(x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, logits.cap_slope(tl.load(x + o), 2.0))


def test_hidden_pairs_have_no_slope():
    x = np.asarray([-np.inf, 0.0, 1.0, -2.0], np.float32)
    bound = {"inputs": {"x": x}, "outputs": {"out": shape(4)}}
    made = triton_call(slope_kernel, **bound, grid=(1,), N=4)["out"]
    np.testing.assert_array_equal(made, [0.0, 1.0, 0.75, 0.0])
