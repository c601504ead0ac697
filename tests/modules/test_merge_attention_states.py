"""`merge_attention_states`: keys split in two and merged are the keys as a whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention, merge_attention_states

B, T, S, H, G, D, E = 2, 5, 8, 4, 2, 8, 6
CUT = 3


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.fixture(scope="module", autouse=True)
def arrays():
    # JAX arrays cannot be made while tests are collected: see conftest.py
    global QUERY, KEY, VALUE, BIAS
    QUERY, KEY = normal(1, (B, T, H, D)), normal(2, (B, S, G, D))
    VALUE, BIAS = normal(3, (B, S, G, E)), normal(4, (1, H, T, S))


def mask_of(kind):
    """Per query: both sides, only the first, only the second, neither, both again."""
    mask = np.random.default_rng(5).random((B, 1, T, S)) < 0.7
    mask[..., [0, CUT]] = True
    if kind == "one_sided":
        mask[:, :, 1, CUT:] = mask[:, :, 2, :CUT] = mask[:, :, 3] = False
    elif kind == "second_empty":
        mask[..., CUT:] = False
    elif kind == "all_empty":
        mask[:] = False
    return jnp.asarray(mask)


def whole(q, k, v, bias, mask):
    return flash_attention(q, k, v, mask, bias, return_lse=True)


def in_two(q, k, v, bias, mask):
    first = flash_attention(
        q, k[:, :CUT], v[:, :CUT], mask[..., :CUT], bias[..., :CUT], return_lse=True
    )
    second = flash_attention(
        q, k[:, CUT:], v[:, CUT:], mask[..., CUT:], bias[..., CUT:], return_lse=True
    )
    return merge_attention_states(*first, *second)


KINDS = ["both", "one_sided", "second_empty", "all_empty"]
compared = jax.jit(lambda *args: (in_two(*args), whole(*args)))


@pytest.mark.parametrize("kind", KINDS)
def test_two_halves_are_the_whole(kind):
    mask = mask_of(kind)
    (out, lse), (expected, expected_lse) = compared(QUERY, KEY, VALUE, BIAS, mask)
    assert out.shape == (B, T, H, E)
    assert lse.shape == (B, H, T)
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=2e-6)
    empty = ~np.asarray(mask).any(axis=(1, 3))  # [b, t]
    assert not np.asarray(out)[empty].any()
    assert np.isneginf(np.asarray(lse).transpose(0, 2, 1)[empty]).all()


@jax.jit
def both_gradients(arrays, mask):
    dout, dlse = normal(6, (B, T, H, E)), normal(7, (B, H, T))

    def loss(attend, arrays):
        out, lse = attend(*arrays, mask)
        return (out * dout).sum() + jnp.where(jnp.isneginf(lse), 0.0, lse * dlse).sum()

    return tuple(jax.grad(functools.partial(loss, f))(arrays) for f in (in_two, whole))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_two_halves_are_those_of_the_whole(kind):
    arrays = (QUERY, KEY, VALUE, BIAS)
    made, expected = both_gradients(arrays, mask_of(kind))
    for name, a, e in zip(("query", "key", "value", "bias"), made, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=1e-5, err_msg=name)
        assert np.any(e) == (kind != "all_empty")


def test_by_the_formula():
    out_a, out_b = normal(8, (B, T, H, E)), normal(9, (B, T, H, E))
    lse_a, lse_b = normal(10, (B, H, T)), normal(11, (B, H, T))
    out, lse = merge_attention_states(out_a, lse_a, out_b, lse_b)
    share = np.exp(np.asarray(lse_a, np.float64))
    share = (share / (share + np.exp(np.asarray(lse_b, np.float64)))).transpose(0, 2, 1)[..., None]
    np.testing.assert_allclose(out, share * out_a + (1 - share) * out_b, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, np.logaddexp(lse_a, lse_b), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("empty_first", [True, False])
def test_an_empty_side_changes_nothing(empty_first):
    """Whatever finite output stands beside lse = -inf."""
    out, lse = normal(12, (B, T, H, E)), normal(13, (B, H, T))
    nothing = (normal(14, (B, T, H, E)), jnp.full((B, H, T), -jnp.inf))
    parts = (*nothing, out, lse) if empty_first else (out, lse, *nothing)
    merged, merged_lse = merge_attention_states(*parts)
    np.testing.assert_allclose(merged, out, rtol=1e-6)
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-6)


def test_bfloat16_outputs_are_merged_in_float32():
    dtype = jnp.bfloat16
    q, k, v = (x.astype(dtype) for x in (QUERY, KEY, VALUE))
    out, lse = in_two(q, k, v, BIAS.astype(dtype), mask_of("one_sided"))
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    wide = (x.astype(jnp.float32) for x in (q, k, v, BIAS.astype(dtype)))
    expected, expected_lse = whole(*wide, mask_of("one_sided"))
    ulp = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=4 * ulp, atol=4 * ulp)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_the_residuals_of_one_call_can_be_merged_under_vmap():
    out_a, out_b = normal(15, (3, B, T, H, E)), normal(16, (3, B, T, H, E))
    lse_a, lse_b = normal(17, (3, B, H, T)), normal(18, (3, B, H, T))
    made = jax.vmap(merge_attention_states)(out_a, lse_a, out_b, lse_b)
    expected = merge_attention_states(out_a[1], lse_a[1], out_b[1], lse_b[1])
    for a, e in zip(made, expected, strict=True):
        np.testing.assert_allclose(a[1], e, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (
            ((B, T, H, E), (B, H, T), (B, T + 1, H, E), (B, H, T)),
            ["`out_b`", "t=5", "(2, 6, 4, 6)"],
        ),
        (((B, T, H, E), (B, H, T), (B, T, H, E), (B, H, T + 1)), ["`lse_b`", "t=5", "(2, 4, 6)"]),
        (
            ((B, T, H, E), (B, T, H), (B, T, H, E), (B, T, H)),
            ["`lse_a`", "[b, h, t]", "h=4", "t=5", "got (2, 5, 4)"],
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, words):
    parts = (jnp.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match="merge_attention_states") as caught:
        merge_attention_states(*parts)
    assert all(word in str(caught.value) for word in words)
