"""`attention`: its weights are the weights of its output, and of `flash_attention`'s."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.errors import UnsupportedError
from ejkernel.kernels._reference import philox
from ejkernel.modules import (
    Attention,
    AttentionConfig,
    attention,
    create_default_executor,
    flash_attention,
)
from ejkernel.types import MaskInfo
from tests import host

B, T, S, H, G, D, E = 2, 5, 7, 4, 2, 8, 6


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def operands(t=T, s=S, batch=B):
    return normal(1, (batch, t, H, D)), normal(2, (batch, s, G, D)), normal(3, (batch, s, G, E))


MASK = np.random.default_rng(4).random((B, 1, T, S)) < 0.5
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window_cap": {"sliding_window": (2, 1), "logits_soft_cap": 1.5},
    "mask_bias": {"attention_mask": MASK, "bias": host.normal(5, (1, H, T, S))},
    "lengths": {
        "causal": True,
        "cum_seqlens_q": host.asarray([0, 5, 8]),
        "cum_seqlens_k": host.asarray([0, 2, 9]),
    },
    "segments_alibi": {
        "q_segment_ids": host.asarray([[0, 0, 1, -1, 2]] * B),
        "kv_segment_ids": host.asarray([[0, 1, 1, -1, 0, 3, 3]] * B),
        "alibi_slopes": host.asarray([0.5, 0.25, 0.125, 0.0625]),
    },
    "sinks": {"softmax_aux": host.normal(6, (H, 2)), "sliding_window": 0},
    "dropout": {"dropout_prob": 0.4, "dropout_seed": 2**40 + 9, "causal": True},
    "mask_info": {
        "mask_info": MaskInfo(q_lengths=host.asarray([5, 3]), kv_lengths=host.asarray([7, 0]))
    },
}


def times_values(weights, v):
    """[b, h, t, s] x [b, s, g, e] in float64."""
    v = np.repeat(np.asarray(v, np.float64), H // G, axis=2)
    return np.einsum("bhts,bshe->bthe", np.asarray(weights, np.float64), v)


@pytest.mark.parametrize("option", OPTIONS)
def test_matches_flash_attention(option):
    """The weights make the output, and those of a row sum to one less its sinks' share, or to 0."""
    q, k, v = operands()
    options = host.to_jax(OPTIONS[option])
    out, weights = attention(q, k, v, **options)
    assert out.shape == (B, T, H, E)
    assert weights.shape == (B, H, T, S)
    np.testing.assert_allclose(out, times_values(weights, v), rtol=1e-5, atol=2e-6)
    expected, lse = flash_attention(q, k, v, **options, return_lse=True)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-6)
    if "dropout_prob" in OPTIONS[option]:
        return
    total = np.asarray(weights).sum(axis=-1)
    wanted = np.where(np.isneginf(lse), 0.0, 1.0)
    if "softmax_aux" in OPTIONS[option]:
        sinks = np.logaddexp.reduce(OPTIONS[option]["softmax_aux"], axis=-1)[None, :, None]
        wanted = 1.0 - np.exp(sinks - np.asarray(lse))
    np.testing.assert_allclose(total, wanted, rtol=1e-5, atol=1e-6)
    some_empty = {"mask_info", "lengths", "segments_alibi"}
    assert (wanted == 0).any() == (option in some_empty)


def test_weights_agree_with_the_dropout_mask():
    """Dropped pairs weigh 0, kept ones 1 / (1 - prob) times what they weigh without dropout."""
    q, k, v = operands()
    _, weights = attention(q, k, v, causal=True)
    _, dropped = attention(q, k, v, **OPTIONS["dropout"])
    b, h, i, j = np.ix_(*(np.arange(n) for n in (B, H, T, S)))
    words = philox.words((9, 2**8), j >> 2, i, h, b)  # 2**40 + 9
    kept = np.choose(j & 3, words) >= int(0.4 * 2**32)
    assert 0.4 < kept.mean() < 0.8
    np.testing.assert_allclose(dropped, weights * kept / 0.6, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("option", ["plain", "mask_bias", "sinks", "dropout", "lengths"])
def test_gradients_of_the_output_match_flash_attention(option):
    options = dict(host.to_jax(OPTIONS[option]))
    arrays = dict(zip(("query", "key", "value"), operands(), strict=True))
    arrays |= {n: options.pop(n) for n in ("bias", "softmax_aux") if n in options}
    dout = normal(7, (B, T, H, E))

    @jax.jit
    def both(arrays):
        def plain(arrays):
            return (attention(**arrays, **options)[0] * dout).sum()

        def flash(arrays):
            return (flash_attention(**arrays, **options) * dout).sum()

        return jax.grad(plain)(arrays), jax.grad(flash)(arrays)

    made, expected = both(arrays)
    for name in arrays:
        assert np.any(expected[name])
        np.testing.assert_allclose(made[name], expected[name], rtol=2e-5, atol=1e-5, err_msg=name)


def test_gradients_of_the_weights():
    """Through the second output, against softmax written out; rows without a key stay finite."""
    q, k, v = operands()
    mask, dweights = jnp.asarray(MASK).at[:, :, 2].set(False), normal(8, (B, H, T, S))

    def by_hand(q, k):
        scores = jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, H // G, axis=2)) * D**-0.5
        scores = jnp.where(mask, scores, -1e30)
        return (jnp.where(mask, jax.nn.softmax(scores, axis=-1), 0.0) * dweights).sum()

    def plain(q, k):
        return (attention(q, k, v, mask)[1] * dweights).sum()

    made, expected = jax.jit(lambda *x: tuple(jax.grad(f, (0, 1))(*x) for f in (plain, by_hand)))(
        q, k
    )
    for a, e in zip(made, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=1e-5)


def test_outputs_have_the_dtype_of_the_query():
    q, k, v = (x.astype(jnp.bfloat16) for x in operands())
    out, weights = attention(q, k, v)
    assert out.dtype == weights.dtype == jnp.bfloat16
    _, wide = attention(*(x.astype(jnp.float32) for x in (q, k, v)))
    np.testing.assert_allclose(weights.astype(jnp.float32), wide, rtol=0.01, atol=0.002)


@pytest.mark.parametrize(("t", "s", "batch"), [(0, S, B), (T, 0, B), (T, S, 0), (1, 1, 1)], ids=str)
def test_empty_axes(t, s, batch):
    out, weights = attention(*operands(t, s, batch))
    assert out.shape == (batch, t, H, E)
    assert weights.shape == (batch, H, t, s)
    assert not np.isnan(out).any()
    if s == 0:
        assert not out.any()


@pytest.mark.parametrize(("s", "batch"), [(0, B), (S, 0)])
def test_forward_mode_of_flash_attention_on_empty_axes(s, batch):
    """Its formula is this op's: what has no key, or no row, has no tangent."""
    q, k, v = operands(T, s, batch)
    out, tangent = jax.jvp(lambda q: flash_attention(q, k, v), (q,), (normal(9, q.shape),))
    assert out.shape == tangent.shape == (batch, T, H, E)
    assert not tangent.any()


def test_the_executor_and_the_function_are_one():
    q, k, v = operands()
    executor = create_default_executor()
    made = executor(Attention(), q, k, v, causal=True, cfg=AttentionConfig(platform="xla"))
    for a, e in zip(made, attention(q, k, v, causal=True), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6)


def test_there_is_only_xla():
    with pytest.raises(UnsupportedError, match=r"attention.*pallas"):
        attention(*operands(), platform="pallas")


def test_ambiguous_sinks_name_this_function():
    with pytest.raises(ValueError, match=r"`attention`: `softmax_aux`.*ambiguous"):
        attention(*operands(), softmax_aux=jnp.zeros(H))
