"""Philox-4x32-10 against published vectors, and a keep mask that no blocking changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel.kernels._reference import philox as reference
from ejkernel.kernels._xla._blocks import philox

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)
ALL = 0xFFFFFFFF

# counter, key, words: kat_vectors of Random123
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL, ALL, ALL, ALL), (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

word = st.sampled_from([0, 1, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, ALL]) | st.integers(0, ALL)
keys = st.tuples(word, word)


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


xla_words = jax.jit(philox.words)


def as_seed(key):
    return jnp.asarray(key, jnp.uint32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN, ids=["zeros", "ones", "pi"])
def test_known_answers(counter, key, expected):
    assert tuple(int(w) for w in reference.words(key, *counter)) == expected
    words = xla_words(as_seed(key), tuple(np.uint32(c) for c in counter))
    assert all(w.dtype == jnp.uint32 for w in words)
    assert tuple(int(w) for w in words) == expected


@SETTINGS
@given(key=keys, counters=st.lists(st.tuples(word, word, word, word), min_size=3, max_size=3))
@example(key=(ALL, 0), counters=[(0, 0, 0, 0), (0xFFFF, 0, 0x10000, 0), (ALL, 0, ALL, 0)])
@example(key=(0, ALL), counters=[(1, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 1)])
def test_the_block_equals_the_reference(key, counters):
    columns = tuple(np.asarray(c, np.uint32) for c in zip(*counters, strict=True))
    np.testing.assert_array_equal(
        np.stack(xla_words(as_seed(key), columns)), np.stack(reference.words(key, *columns))
    )


@SETTINGS
@given(a=st.lists(word, min_size=4, max_size=4))
@example(a=[0, ALL, 0xFFFF, 0x10000])
@example(a=[0xFFFF0000, 0x0001FFFF, 0x80000000, 0x7FFFFFFF])
def test_high_and_low_words_of_a_product(a):
    a = np.asarray(a, np.uint32)
    for constant in (0xD2511F53, 0xCD9E8D57, ALL, 1):
        high, low = philox._mul_hi_lo(jnp.asarray(a), constant)
        product = a.astype(np.uint64) * np.uint64(constant)
        np.testing.assert_array_equal(high, product >> np.uint64(32))
        np.testing.assert_array_equal(low, product & np.uint64(ALL))


BATCH, HEADS, QUERIES, LENGTH = 2, 3, 4, 16


def keep(seed, prob, batch, head, query, first_key, num_keys):
    return philox.keep(
        seed,
        prob,
        batch=jnp.asarray(batch, jnp.uint32)[:, None, None],
        head=jnp.asarray(head, jnp.uint32)[None, :, None],
        query=jnp.asarray(query, jnp.uint32)[None, None],
        first_key=jnp.asarray(first_key, jnp.uint32),
        num_keys=num_keys,
    )


keep = jax.jit(keep, static_argnames=("prob", "num_keys"))


def oracle(key, prob, batch, head, query, keys):
    """One pair at a time: word `j & 3` of counter (j >> 2, query, head, batch)."""
    b, h, i, j = np.ix_(batch, head, query, keys)
    words = np.stack(np.broadcast_arrays(*reference.words(key, j >> 2, i, h, b)))
    chosen = np.take_along_axis(words, np.broadcast_to(j & 3, words.shape[1:])[None], axis=0)[0]
    return chosen >= int(np.floor(prob * 2.0**32))


probs = st.sampled_from([0.1, 0.5])


@SETTINGS
@given(key=keys, prob=probs, num_keys=st.sampled_from([4, 8, 16]), moved=st.booleans())
@example(key=(0, 0), prob=0.5, num_keys=16, moved=False)
@example(key=(7, 0), prob=0.5, num_keys=4, moved=False)
@example(key=(7, 9), prob=0.1, num_keys=8, moved=True)
def test_the_mask_does_not_depend_on_the_cut(key, prob, num_keys, moved):
    """Blocks of keys and of queries, assembled, are the oracle's mask of the whole."""
    base = 5 if moved else 0
    batch, head, query = np.arange(BATCH) + base, np.arange(HEADS) + 2 * base, np.arange(QUERIES)
    rows = [query[:2] + base, query[2:] + base]
    whole = np.concatenate(
        [
            np.concatenate(
                [
                    keep(as_seed(key), prob, batch, head, part, start, num_keys)
                    for start in range(0, LENGTH, num_keys)
                ],
                axis=-1,
            )
            for part in rows
        ],
        axis=2,
    )
    expected = oracle(key, prob, batch, head, query + base, np.arange(LENGTH))
    assert whole.shape == (BATCH, HEADS, QUERIES, LENGTH)
    np.testing.assert_array_equal(whole, expected)


def test_the_threshold_is_a_floor_and_the_word_itself_is_kept():
    """A word equal to the threshold is kept; one above the word, it is dropped."""
    seed = as_seed((3, 4))
    zero = jnp.zeros((), jnp.uint32)
    first = int(xla_words(seed, (zero,) * 4)[0])

    def kept(prob):
        mask = philox.keep(
            seed, prob, batch=zero, head=zero, query=zero, first_key=zero, num_keys=4
        )
        return bool(mask[0])

    assert kept(first / 2**32)
    assert kept((first + 0.5) / 2**32)
    assert not kept((first + 1) / 2**32)
    assert kept(0.0)
    assert not kept(1 - 2.0**-33)


@pytest.mark.parametrize("prob", [0.1, 0.5])
def test_the_share_of_kept_keys(prob):
    """Mean within five standard deviations, over all pairs and over each index alone."""
    mask = np.asarray(
        keep(as_seed((11, 0)), prob, np.arange(BATCH), np.arange(HEADS), np.arange(64), 0, 256)
    )
    for axes in (None, (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        mean = mask.mean(axis=axes)
        count = mask.size / mean.size
        assert np.abs(mean - (1 - prob)).max() < 5 * np.sqrt(prob * (1 - prob) / count)


def test_every_index_and_seed_word_changes_the_mask():
    base = {"batch": [0], "head": [0], "query": [0], "first_key": 0}

    def bits(key=(1, 2), **change):
        return np.asarray(keep(as_seed(key), 0.5, num_keys=16, **(base | change))).ravel().tolist()

    changed = [
        bits(),
        bits((2, 2)),
        bits((1, 3)),
        bits(batch=[1]),
        bits(head=[1]),
        bits(query=[1]),
        bits(first_key=16),
    ]
    assert len({tuple(b) for b in changed}) == len(changed)
