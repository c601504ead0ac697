"""`ring_attention` on one device, what "auto" means, and the zigzag order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import kernel_registry
from ejkernel.kernels._ring import plan
from ejkernel.kernels._ring.plan import Kind, Plan
from ejkernel.modules import flash_attention, from_zigzag, ring_attention, to_zigzag
from tests import host


def arrays(t=12, s=12, heads=4, groups=2):
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = ((1, t, heads, 8), (1, s, groups, 8), (1, s, groups, 8))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def test_one_device_holds_all_tokens_in_their_own_order():
    xs = arrays(t=7)  # an odd length has no zigzag order to be wrong about
    expected = flash_attention(*xs, causal=True)
    for layout in ("contiguous", "zigzag"):
        np.testing.assert_allclose(ring_attention(*xs, layout=layout), expected, atol=1e-6)


def test_keys_that_nobody_sees_may_be_anything():
    query, key, value = arrays(t=6)
    last = jnp.full((1, 2, 2, 8), jnp.nan)
    ids = {"q_segment_ids": jnp.zeros((1, 6), int), "kv_segment_ids": jnp.arange(14)[None] // 12}
    spoiled = (jnp.concatenate([x, last], axis=1) for x in (key, value))
    out = ring_attention(query, *spoiled, causal=False, **ids)
    np.testing.assert_allclose(out, flash_attention(query, key, value), atol=1e-6)


def test_no_key_at_all():
    query, key, value = arrays(s=0)
    out, lse = ring_attention(query, key, value, return_lse=True)
    assert not out.any()
    assert jnp.isneginf(lse).all()
    sinks = jnp.asarray([[0.5, 1.0]])
    _, lse = ring_attention(query, key, value, softmax_aux=sinks, return_lse=True)
    np.testing.assert_allclose(lse, jax.nn.logsumexp(sinks), rtol=1e-6)


BAD = {
    "strategy": ({"strategy": "star"}, "`strategy` must be one of auto, ring, ulysses, allgather"),
    "layout": ({"layout": "striped"}, "`layout` must be one of contiguous, zigzag; got 'striped'"),
    "columns": ({"bias": host.zeros((1, 1, 12, 5))}, "`bias` must have 1 or 12 columns"),
    "mask": ({"attention_mask": host.ones((12, 12))}, "mask"),
    "window": ({"sliding_window": -3}, "`sliding_window`"),
    "specs": ({"out_specs": object()}, "go together"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name):
    options, words = host.to_jax(BAD[name])
    with pytest.raises(ValueError, match=f"`ring_attention`.*{words}"):
        ring_attention(*arrays(), **options)


# What "auto" means


def call(devices, t=16, heads=8, groups=8, **options):
    spec = kernel_registry.spec("ring_attention")
    made = spec.canonicalize(spec.complete({"strategy": "auto"} | options | dict(
        zip(("query", "key", "value"), arrays(t, t, heads, groups), strict=True))))  # fmt: skip
    return dataclasses.replace(made, devices=devices)


AUTO = {
    "one_device": ({"devices": 1}, "ring"),
    "long_shard": ({"devices": 4, "t": 1024}, "ring"),
    "shared_key_heads": ({"devices": 4, "t": 256, "groups": 2}, "ring"),
    "short_shard": ({"devices": 4}, "ulysses"),
    "window": ({"devices": 4, "sliding_window": 4}, "ring"),
    "heads_do_not_divide": ({"devices": 3}, "allgather"),
    "dropout": ({"devices": 4, "t": 1024, "dropout_prob": 0.5, "dropout_seed": 1}, "ulysses"),
    "asked_for": ({"devices": 4, "t": 1024, "strategy": "allgather"}, "allgather"),
}


@pytest.mark.parametrize("name", AUTO)
def test_auto_chooses_by_shapes(name):
    options, expected = AUTO[name]
    assert plan.strategy(call(**options)) == expected


# The plan


@pytest.mark.parametrize("window", [(None, 0), (5, 0), (3, 9), (None, None), (0, 0), (4, None)])
@pytest.mark.parametrize(("t", "s"), [(4, 4), (3, 5), (5, 3)])
def test_kinds_say_what_is_seen(window, t, s):
    made = Plan(devices=3, halves=2, t=t, s=s, window=window, distances=False)
    chunks, (left, right) = 6, window
    q_pos = np.arange(chunks * t) + chunks * (s - t)
    distance = np.arange(chunks * s)[None] - q_pos[:, None]
    seen = np.ones(distance.shape, bool)
    seen &= True if right is None else distance <= right
    seen &= True if left is None else distance >= -left
    for q in range(chunks):
        for k in range(chunks):
            block = seen[q * t : (q + 1) * t, k * s : (k + 1) * s]
            kind = made.kind(np.int64(q), np.int64(k))
            assert (kind == Kind.SKIP) == (not block.any())
            assert (kind == Kind.FULL) == block.all()
            if kind == Kind.ALIGNED:
                assert distance[(q + 1) * t - 1, (k + 1) * s - 1] == 0


def test_a_window_ends_the_tour_early():
    options = {"devices": 8, "halves": 1, "t": 16, "s": 16, "distances": False}
    assert [Plan(window=(w, 0), **options).last for w in (0, 1, 16, 17, 33)] == [0, 1, 1, 2, 3]
    assert Plan(window=(None, 0), **options).last == 7


# The zigzag order


def test_zigzag_pairs_the_first_chunk_with_the_last():
    x = jnp.arange(12)[None]
    assert to_zigzag(x, 3).tolist() == [[0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]]
    assert from_zigzag(to_zigzag(x, 3), 3).tolist() == x.tolist()
    assert to_zigzag(x.T, 2, axis=0)[:6, 0].tolist() == [0, 1, 2, 9, 10, 11]
    assert to_zigzag(x, 1).tolist() == x.tolist()


@pytest.mark.parametrize("convert", [to_zigzag, from_zigzag])
def test_zigzag_needs_equal_chunks(convert):
    with pytest.raises(ValueError, match=r"axis 1 must be a multiple of 2 \* 4 devices; got 12"):
        convert(jnp.zeros((2, 12)), 4)
