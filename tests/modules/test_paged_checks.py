"""Paged ops: what `EJKERNEL_DEBUG` finds, the registry's functions, and the tuner's small twins."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import _settings
from ejkernel.errors import EjkernelWarning
from ejkernel.kernels import _oracle, kernel_registry
from ejkernel.modules import (
    page_attention,
    ragged_decode_attention,
    ragged_page_attention,
    update_kv_pages,
    update_latent_pages,
    update_paged_cache,
)
from tests import host

PAGES, W, HEADS, GROUPS, D = 6, 4, 4, 2, 8
TABLES = host.asarray([[5, 1], [0, 3], [2, -1]])
LENS = host.asarray([8, 5, 3])
STARTS = host.asarray([0, 1, 4, 6])


def changed(array, place, value):
    array = array.copy()
    array[place] = value
    return array


def random(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def paged(lens=LENS, tables=TABLES):
    cache = PAGES, GROUPS, W, D
    return page_attention(
        random(0, 3, HEADS, D),
        random(1, *cache),
        random(2, *cache),
        jnp.asarray(lens),
        jnp.asarray(tables),
    )


def ragged(lens=LENS, tables=TABLES, starts=STARTS, count=3):
    pages = random(1, PAGES, W, 2 * GROUPS, D)
    lens, tables, starts = host.to_jax((lens, tables, starts))
    return ragged_page_attention(random(0, 6, HEADS, D), pages, lens, tables, starts, count)


def decode(start=(0, 2, 3), end=(8, 5, 3)):
    keys, values = random(1, 3, 8, GROUPS, D), random(2, 3, 8, GROUPS, D)
    query = random(0, 3, HEADS, D)
    return ragged_decode_attention(query, keys, values, jnp.asarray(start), jnp.asarray(end))


def update(slots):
    caches = [random(i, PAGES, GROUPS, W, D) for i in (1, 2)]
    new = [random(i, len(slots), GROUPS, D) for i in (3, 4)]
    return update_paged_cache(*caches, *new, jnp.asarray(slots), donate_cache=True)


def update_kv(slots):
    new = [random(i, len(slots), GROUPS, D) for i in (3, 4)]
    pages = random(1, PAGES, W, 2 * GROUPS, D)
    return update_kv_pages(pages, *new, jnp.asarray(slots), donate_cache=True)


def update_latent(slots):
    new = [random(i, len(slots), width) for i, width in ((3, D), (4, 2))]
    pages = random(1, PAGES, W, D + 2)
    return update_latent_pages(pages, *new, jnp.asarray(slots), donate_cache=True)


BAD = {
    "long": (functools.partial(paged, changed(LENS, 1, 9)), "got 9 for sequence 1"),
    "negative": (functools.partial(paged, changed(LENS, 2, -1)), "got -1 for sequence 2"),
    "page": (
        functools.partial(paged, tables=changed(TABLES, (1, 1), 6)),
        "got 6 at place 1 of seq.* 1",
    ),
    "ragged_long": (functools.partial(ragged, changed(LENS, 0, 9)), "got 9 for sequence 0"),
    "ragged_page": (
        functools.partial(ragged, tables=changed(TABLES, (2, 0), -2)),
        "got -2 at place 0 of sequence 2",
    ),
    "surplus": (functools.partial(ragged, changed(LENS, 1, 2)), "3 queries and a length of 2 .* 1"),
    "decreasing": (
        functools.partial(ragged, starts=changed(STARTS, 2, 0)),
        "1 to 0 for sequence 1",
    ),
    "too_many": (functools.partial(ragged, starts=changed(STARTS, 3, 7)), "4 to 7 for sequence 2"),
    "num_seqs": (functools.partial(ragged, count=4), "`num_seqs` must be in .0, 3., .*got 4"),
    "range": (functools.partial(decode, end=(8, 9, 3)), "got .2, 9. for sequence 1"),
    "backwards": (functools.partial(decode, start=(0, 2, 4)), "got .4, 3. for sequence 2"),
    "slot": (functools.partial(update, [3, -1, 24]), "got 24 for token 2"),
    "twice": (functools.partial(update, [3, -1, -1, 7, 3]), "got 3 for tokens 0 and 4"),
    "kv_slot": (
        functools.partial(update_kv, [3, 24]),
        "`update_kv_pages`: .*got 24 for token 1",
    ),
    "latent_slot": (functools.partial(update_latent, [3, -2]), "`update_latent_pages`: .*got -2"),
}


@pytest.mark.parametrize("name", BAD)
def test_debug_names_the_culprit(name):
    call, words = BAD[name]
    with _settings.override(debug=True), pytest.raises(ValueError, match=words):
        call()


def test_debug_lets_good_calls_pass():
    with _settings.override(debug=True):
        assert np.isfinite(paged()).all()
        assert np.isfinite(ragged(count=2, lens=changed(LENS, 2, 99))).all()
        assert np.isfinite(decode()).all()
        for write in (update, update_kv, update_latent):
            assert all(np.isfinite(x).all() for x in write([3, -1, -1, 23]))
        assert np.isfinite(jax.jit(paged)(LENS, TABLES)).all()


@pytest.mark.parametrize("form", ["jit", "vmap"])
def test_debug_checks_traced_values_when_the_program_runs(form):
    bad = changed(LENS, 1, 9)
    with _settings.override(debug=True):
        call = jax.jit(paged)
        if form == "vmap":
            call, bad = jax.vmap(paged, in_axes=(0, None)), jnp.stack([LENS, bad])
        with pytest.raises(Exception, match=r"`page_attention`: .* got 9 for sequence 1"):
            jax.block_until_ready(call(bad, TABLES))


def test_without_debug_nothing_is_read_or_written_outside():
    assert np.isfinite(paged(LENS + 9, TABLES * 1000)).all()
    assert np.isfinite(jax.jit(ragged)(LENS + 9, TABLES * 1000, STARTS * 7, 99)).all()
    caches = update([24, 99, -7, 2**31 - 1])
    for i, cache in enumerate(caches):
        np.testing.assert_array_equal(cache, random(i + 1, PAGES, GROUPS, W, D))


def test_the_registrys_function_keeps_the_token_axis():
    query, key, value = (
        random(0, 3, HEADS, D),
        random(1, 3, 8, GROUPS, D),
        random(2, 3, 8, GROUPS, D),
    )
    ranges = jnp.zeros(3, jnp.int32), LENS
    function = kernel_registry.get("ragged_decode_attention")
    out, lse = function(query[:, None], key, value, *ranges, return_lse=True)
    expected, expected_lse = function(query, key, value, *ranges, return_lse=True)
    np.testing.assert_array_equal(out, expected[:, None])
    np.testing.assert_array_equal(lse, expected_lse[..., None])


def test_the_registrys_function_gives_caches_away():
    caches = [random(i, PAGES, GROUPS, W, D) for i in (1, 2)]
    call = (random(3, 2, GROUPS, D), random(4, 2, GROUPS, D), jnp.asarray([3, 9]))
    function = kernel_registry.get("update_paged_cache")
    with pytest.warns(EjkernelWarning, match="donate_cache=True"):
        expected = function(*caches, *call)
    assert not any(x.is_deleted() for x in caches)
    actual = function(*caches, *call, donate_cache=True)
    assert all(x.is_deleted() for x in caches)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


TUNED = (
    "page_attention",
    "ragged_page_attention",
    "ragged_page_attention_v3",
    "update_kv_pages",
    "update_latent_pages",
    "update_paged_cache",
)


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=[] if op == "ragged_page_attention" else pytest.mark.slow)
        for op in TUNED
    ],
)
def test_small_twins_of_large_calls_match_the_oracle(op):
    """What the tuner checks a candidate on: small, with the options and head sizes of the call."""
    spec = kernel_registry.spec(op)
    (entry,) = (e for e in kernel_registry.list(op) if e.name == "xla/any")
    args = spec.make(spec.cases()[0], jnp.float32, jax.random.key(0))
    large = {"n": 300, "i": 40, "i1": 41, "m": 64, "p": 2600, "b": 40}
    axes = spec.layout(args).arrays
    grown = args.with_arrays(
        {
            name: jax.ShapeDtypeStruct(
                tuple(large.get(a, n) for a, n in zip(axes[name], x.shape, strict=True)), x.dtype
            )
            for name, x in args.arrays().items()
        }
    )
    twin = spec.reduced(grown, 16)
    assert twin is not None
    assert sum(x.size for x in twin.arrays().values()) < 50_000
    cfg = entry.heuristic(twin, "forward")
    outputs = jax.jit(lambda x: entry.fn(x, cfg)[0])(twin)
    answer = _oracle.answer(spec, twin, outputs, {})
    assert _oracle.mismatch(answer, _oracle.solve(spec, twin, ())) is None
