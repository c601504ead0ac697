"""`scaled_dot_product_attention` against `jax.nn.dot_product_attention`, which it replaces."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.errors import UnsupportedError
from ejkernel.modules import flash_attention, scaled_dot_product_attention

B, H, G, D = 2, 4, 2, 8
SHAPES = {"square": (6, 6), "long_keys": (5, 8), "long_queries": (8, 5)}


def operands(t, s, groups=G, batch=(B,)):
    shapes = ((*batch, t, H, D), (*batch, s, groups, D), (*batch, s, groups, D))
    return tuple(normal(100 + seed, shape) for seed, shape in enumerate(shapes))


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def bits(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.6)


def lengths(*values):
    return jnp.asarray(values, jnp.int32)


OPTIONS = {
    "plain": lambda t, s: {},
    "scale": lambda t, s: {"scale": 0.7},
    "causal": lambda t, s: {"is_causal": True},
    "window": lambda t, s: {"local_window_size": 2},
    "window_pair": lambda t, s: {"local_window_size": (3, 1)},
    "window_zero": lambda t, s: {"local_window_size": 0},
    "window_zero_pair": lambda t, s: {"local_window_size": (0, 0)},
    "window_list": lambda t, s: {"local_window_size": [3, 1]},
    "window_after": lambda t, s: {"local_window_size": (-1, 2), "mask": bits(2, (B, H, t, s))},
    "window_before": lambda t, s: {"local_window_size": (3, -2), "is_causal": True},
    "window_nothing": lambda t, s: {"local_window_size": -1},
    "integer_bias": lambda t, s: {"bias": jnp.arange(s) % 5 - 2 + 0 * lengths(*[0] * t)[:, None]},
    "causal_window": lambda t, s: {"is_causal": True, "local_window_size": (2, 4)},
    "bias": lambda t, s: {"bias": normal(1, (B, H, t, s))},
    "mask": lambda t, s: {"mask": bits(2, (B, H, t, s))},
    "key_lengths": lambda t, s: {"key_value_seq_lengths": lengths(s - 2, 0)},
    "query_lengths": lambda t, s: {"query_seq_lengths": lengths(t - 3, t)},
    "everything": lambda t, s: {
        "bias": normal(3, (1, H, t, s)),
        "mask": bits(4, (B, 1, t, s)),
        "scale": -0.4,
        "is_causal": True,
        "query_seq_lengths": lengths(t, t - 1),
        "key_value_seq_lengths": lengths(s - 1, s),
        "local_window_size": 3,
    },
}


def visible_rows(t, s, batch=B, **options):
    """[b, t, h]: queries that see a key, with i and j compared as they are (top-left)."""
    i, j = np.arange(t)[:, None], np.arange(s)[None]
    seen = np.ones((batch, H, t, s), bool)
    if options.get("is_causal"):
        seen &= j <= i
    if (window := options.get("local_window_size")) is not None:
        left, right = [window] * 2 if isinstance(window, int) else window
        seen &= (i - left <= j) & (j <= i + right)
    if (mask := options.get("mask")) is not None:
        seen &= np.asarray(mask)
    if (kv := options.get("key_value_seq_lengths")) is not None:
        seen &= (j < np.asarray(kv)[:, None, None])[:, None]
    if (q := options.get("query_seq_lengths")) is not None:
        seen &= (i < np.asarray(q)[:, None, None])[:, None]
    return seen.any(axis=-1).transpose(0, 2, 1)


def theirs(arrays, options, **more):
    """JAX's answer; bias and mask are given to it in full, so that few shapes are compiled."""
    t, s = arrays[0].shape[-3], arrays[1].shape[-3]
    full = {n: jnp.broadcast_to(options[n], (B, H, t, s)) for n in ("bias", "mask") if n in options}
    return jax.nn.dot_product_attention(*arrays, **options | full, implementation="xla", **more)


def ours(arrays, options, **more):
    return scaled_dot_product_attention(*arrays, **options, **more)


def assert_rows(actual, expected, rows, empty, tol=2e-5):
    np.testing.assert_allclose(
        np.asarray(actual)[rows], np.asarray(expected)[rows], rtol=tol, atol=tol
    )
    np.testing.assert_array_equal(np.asarray(actual)[~rows], empty)


def assert_matches(arrays, options):
    t, s = arrays[0].shape[-3], arrays[1].shape[-3]
    out, residual = ours(arrays, options, return_residual=True)
    expected, expected_residual = theirs(arrays, options, return_residual=True)
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    assert residual.shape == expected_residual.shape
    assert residual.dtype == jnp.float32
    rows = visible_rows(t, s, **options)
    assert_rows(out, expected, rows, 0.0)
    assert_rows(residual, expected_residual, rows, -np.inf)


MOVED = ["causal", "window_after", "window_pair", "window_zero", "query_lengths", "everything"]
FEW = ("causal", "query_lengths")


@pytest.mark.parametrize(
    ("option", "shape"),
    [(name, "long_keys") for name in OPTIONS]
    + [pytest.param(n, "long_queries", marks=[] if n in FEW else pytest.mark.slow) for n in MOVED]
    + [(name, "square") for name in ("causal", "key_lengths", "window_after")],
)
def test_matches_jax(option, shape):
    t, s = SHAPES[shape]
    assert_matches(operands(t, s), OPTIONS[option](t, s))


@pytest.mark.parametrize("axes", list(itertools.product((0, 1), repeat=4)), ids=str)
def test_bias_and_mask_of_every_broadcast_shape(axes):
    t, s = SHAPES["long_keys"]
    full = (B, H, t, s)
    shape = tuple(n if keep else 1 for n, keep in zip(full, axes, strict=True))
    other = tuple(1 if keep else n for n, keep in zip(full, axes, strict=True))
    assert_matches(operands(t, s), {"bias": normal(5, shape), "mask": bits(6, other)})


@pytest.mark.parametrize("rank", [2, 3])
def test_lower_ranks_get_leading_axes(rank):
    t, s = SHAPES["long_keys"]
    shape = (H, t, s)[3 - rank :]
    options = {"bias": normal(7, shape), "mask": bits(8, shape)}
    out = ours(operands(t, s), options)
    expected = theirs(operands(t, s), options)
    rows = visible_rows(t, s, mask=options["mask"].reshape((1,) * (4 - rank) + shape))
    assert_rows(out, expected, rows, 0.0)


def test_one_key_head_serves_all():
    q, k, v = operands(5, 8, groups=1)
    expected = theirs((q, jnp.repeat(k, G, axis=2), jnp.repeat(v, G, axis=2)), {})
    np.testing.assert_allclose(ours((q, k, v), {}), expected, rtol=2e-5, atol=2e-5)


def test_a_key_head_for_each_query_head():
    """Head h of JAX's two answers is right for h even, with key heads 0 and 2, or for h odd."""
    q, k, v = operands(5, 8, groups=H)
    even, odd = (theirs((q, k[:, :, i::2], v[:, :, i::2]), {}) for i in range(2))
    expected = jnp.where(jnp.arange(H)[:, None] % 2 == 0, even, odd)
    np.testing.assert_allclose(ours((q, k, v), {}), expected, rtol=2e-5, atol=2e-5)


def test_without_a_batch_axis():
    arrays = operands(5, 8, batch=())
    options = {"is_causal": True, "bias": normal(9, (H, 5, 8))}
    out, residual = ours(arrays, options, return_residual=True)
    assert out.shape == (5, H, D)
    assert residual.shape == (5, H)
    batch = tuple(jnp.stack([x, x + 1]) for x in arrays)  # JAX is known with a batch
    expected, expected_residual = theirs(batch, options, return_residual=True)
    np.testing.assert_allclose(out, expected[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(residual, expected_residual[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(ours(arrays, options), out, rtol=1e-6)


def test_the_residual_is_rows_by_heads_in_float32():
    """[b, t, h], also for bfloat16; JAX rounds it to the dtype of the keys."""
    arrays = tuple(x.astype(jnp.bfloat16) for x in operands(5, 8))
    out, residual = ours(arrays, {}, return_residual=True)
    assert out.dtype == jnp.bfloat16
    assert residual.shape == (B, 5, H)
    assert residual.dtype == jnp.float32
    wide = tuple(x.astype(jnp.float32) for x in arrays)
    expected, expected_residual = theirs(wide, {}, return_residual=True)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(residual, expected_residual, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("jax_name", "alias", "value"),
    [
        ("is_causal", "causal", True),
        ("local_window_size", "sliding_window", 2),
        ("scale", "softmax_scale", 0.7),
    ],
)
def test_aliases_mean_what_jax_means(jax_name, alias, value):
    """Top-left, though `flash_attention` aligns the same words bottom-right."""
    arrays = operands(5, 8)
    expected, _ = theirs(arrays, {jax_name: value}, return_residual=True)
    for options in ({alias: value}, {jax_name: value, alias: value}):
        out, _ = ours(arrays, options, return_residual=True)
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def test_top_left_is_not_bottom_right():
    arrays = operands(5, 8)
    out, _ = ours(arrays, {"is_causal": True}, return_residual=True)
    np.testing.assert_allclose(out[:, 0], np.repeat(arrays[2][:, 0], H // G, axis=1), rtol=1e-5)
    assert np.abs(np.asarray(out - flash_attention(*arrays, causal=True))).max() > 0.1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"is_causal": True, "causal": False}, ["is_causal=True", "causal=False"]),
        ({"scale": 0.5, "softmax_scale": 0.25}, ["scale=0.5", "softmax_scale=0.25"]),
        (
            {"local_window_size": 2, "sliding_window": (1, 2)},
            ["local_window_size=2", "sliding_window=(1, 2)"],
        ),
    ],
)
def test_contradictions_are_refused(options, words):
    with pytest.raises(ValueError, match="contradicts") as caught:
        scaled_dot_product_attention(*operands(5, 8), **options)
    assert all(word in str(caught.value) for word in ["scaled_dot_product_attention", *words])


def test_equal_spellings_of_a_window_do_not_contradict():
    arrays = operands(5, 8)
    out = scaled_dot_product_attention(*arrays, local_window_size=2, sliding_window=(2, 2))
    np.testing.assert_allclose(out, theirs(arrays, {"local_window_size": 2}), rtol=2e-5, atol=2e-5)


def test_names_order_and_defaults_are_jaxs():
    wanted = inspect.signature(jax.nn.dot_product_attention).parameters
    made = inspect.signature(scaled_dot_product_attention).parameters
    assert list(made)[: len(wanted)] == list(wanted)
    for name, parameter in wanted.items():
        assert made[name].kind == parameter.kind
        assert made[name].default == parameter.default


@pytest.mark.parametrize("name", ["cum_seqlens_q", "cum_seqlens_k", "mask_info", "attention_mask"])
def test_arguments_of_flash_attention_alone_are_refused(name):
    """Its alignment is another, so packed lengths would mean something else here."""
    arrays = operands(6, 6)
    with pytest.raises(ValueError, match=f"`{name}` belongs to `flash_attention`") as caught:
        scaled_dot_product_attention(*arrays, is_causal=True, **{name: lengths(0, 6, 12)})
    assert "scaled_dot_product_attention" in str(caught.value)
    out = scaled_dot_product_attention(*arrays, **{name: None})
    np.testing.assert_array_equal(out, scaled_dot_product_attention(*arrays))


ERRORS = {
    "mask": ({"mask": np.zeros((5, 8), np.float32)}, "`mask` must be bool .* pass it as `bias=`"),
    "mask_shape": ({"mask": np.ones((B, 3, 5, 8), bool)}, "`mask` must broadcast to"),
    "bias_shape": ({"bias": np.ones((5, 7), np.float32)}, "`bias` must broadcast to"),
    "scale": ({"scale": float("nan")}, "`scale` must be finite"),
    "window": ({"local_window_size": (1, 2, 3)}, r"`local_window_size` must be .*got \(1, 2, 3\)"),
    "window_alias": ({"sliding_window": (1.5, 2)}, "`local_window_size` must be an int or a pair"),
    "lengths": ({"query_seq_lengths": np.ones(2)}, "`query_seq_lengths` must be .2. integers"),
    "implementation": ({"implementation": "nonsense"}, "`implementation` must be"),
    "ids": (
        {"q_segment_ids": np.zeros((B, 5), int), "key_value_seq_lengths": np.ones(2, int)},
        "`q_segment_ids` cannot be given with `key_value_seq_lengths`",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_its_own_arguments(name):
    options, words = ERRORS[name]
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        scaled_dot_product_attention(*operands(5, 8), **options)
    assert str(caught.value).startswith("`scaled_dot_product_attention`: ")


def test_refusals_of_kernels_name_the_implementation():
    with pytest.raises(UnsupportedError, match=r"`scaled_dot_product_attention` .*implementation="):
        scaled_dot_product_attention(*operands(5, 8), implementation="cudnn")


def test_positions_of_alibi_are_top_left_too():
    """The residual does not depend on whether a window that hides nothing is given."""
    arrays, slopes = operands(5, 8), jnp.linspace(0.1, 0.5, H)
    results = [
        ours(arrays, {"alibi_slopes": slopes} | more, return_residual=True)
        for more in ({}, {"local_window_size": 100})
    ]
    for a, e in zip(*results, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


def test_an_array_scale_works_and_is_differentiable():
    arrays = operands(5, 8)

    def of(function):
        weight = normal(12, arrays[0].shape)
        loss = lambda scale: (function(arrays, {"scale": scale}) * weight).sum()
        return jax.jit(jax.value_and_grad(loss))(jnp.float32(0.7))

    for a, e in zip(of(ours), of(theirs), strict=True):
        np.testing.assert_allclose(a, e, rtol=5e-5, atol=5e-5)


def test_ranks_that_are_not_attention_are_refused():
    q, k, v = operands(5, 8)
    with pytest.raises(ValueError, match=r"query.*key.*got \(5, 8\)"):
        scaled_dot_product_attention(q[0, :, 0], k, v)


# Choosing an implementation


def test_an_implementation_asked_for_never_falls_back():
    arrays = operands(5, 8)
    xla = scaled_dot_product_attention(*arrays, implementation="xla")
    np.testing.assert_allclose(xla, theirs(arrays, {}), rtol=2e-5, atol=2e-5)
    with pytest.raises(UnsupportedError, match="cudnn"):
        scaled_dot_product_attention(*arrays, implementation="cudnn")
    with pytest.raises(ValueError, match="nonsense"):
        scaled_dot_product_attention(*arrays, implementation="nonsense")


def test_platform_is_an_argument_of_every_function():
    arrays = operands(5, 8)
    out = scaled_dot_product_attention(*arrays, platform="xla")
    np.testing.assert_allclose(out, theirs(arrays, {}), rtol=2e-5, atol=2e-5)
    with pytest.raises(UnsupportedError, match="cudnn"):
        scaled_dot_product_attention(*arrays, platform="cudnn")


def test_further_options_of_flash_attention():
    """A sink of minus infinity changes nothing; one of zero adds exp(0) to the denominator."""
    arrays = operands(5, 8)
    out, residual = ours(arrays, {}, return_residual=True)
    sinks = jnp.asarray([[0.0]])
    with_sinks, total = ours(arrays, {"softmax_aux": sinks}, return_residual=True)
    np.testing.assert_allclose(total, np.logaddexp(residual, 0.0), rtol=1e-5)
    share = np.exp(np.asarray(residual - total))[..., None]
    np.testing.assert_allclose(with_sinks, np.asarray(out) * share, rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="no_such_option"):
        scaled_dot_product_attention(*arrays, no_such_option=1)


# Gradients


def gradients(function, arrays, options, rows):
    """Of q, k, v and bias, with a cotangent only where a query sees a key."""
    bias = {name: options[name] for name in ("bias",) if name in options}

    dout = normal(10, arrays[0].shape) * jnp.asarray(rows)[..., None]

    @jax.jit
    def pull(arrays, bias):
        return jax.vjp(lambda arrays, bias: function(arrays, options | bias), arrays, bias)[1](dout)

    return jax.tree.leaves(pull(arrays, bias))


@pytest.mark.parametrize(
    ("option", "shape"),
    [
        ("bias", "long_keys"),
        ("everything", "long_keys"),
        ("causal", "long_queries"),
    ],
)
def test_gradients_match_jax(option, shape):
    t, s = SHAPES[shape]
    arrays, options = operands(t, s), OPTIONS[option](t, s)
    rows = visible_rows(t, s, **options)
    made, expected = (gradients(f, arrays, options, rows) for f in (ours, theirs))
    assert len(made) == len(expected) == 3 + ("bias" in options)
    for a, e in zip(made, expected, strict=True):
        assert a.shape == e.shape
        np.testing.assert_allclose(a, e, rtol=5e-5, atol=5e-5)


def test_empty_rows_have_no_gradient():
    """A cotangent on rows without a key moves nothing."""
    arrays, options = operands(5, 8), {"key_value_seq_lengths": lengths(0, 3)}
    empty = ~visible_rows(5, 8, **options)
    assert empty[0].all()
    for gradient in gradients(ours, arrays, options, empty):
        assert not np.any(gradient)


def test_the_residual_is_differentiable():
    q, k, v = operands(5, 8)
    weight = normal(11, (B, 5, H))

    def by_hand(q, k):
        scores = jnp.einsum("bthd,bshd->bths", q, jnp.repeat(k, H // G, axis=2)) * D**-0.5
        return (jax.nn.logsumexp(scores, axis=-1) * weight).sum()

    def through_residual(q, k):
        return (scaled_dot_product_attention(q, k, v, return_residual=True)[1] * weight).sum()

    made = jax.jit(jax.grad(through_residual, argnums=(0, 1)))(q, k)
    expected = jax.jit(jax.grad(by_hand, argnums=(0, 1)))(q, k)
    for a, e in zip(made, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5)
