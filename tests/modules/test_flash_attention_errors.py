"""Bad calls of `flash_attention`: the exception, and that its text says what, why and the way out.

Also the forms of a dropout seed, and values at the edge of what is allowed.
"""

import importlib.util
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import _settings
from ejkernel.errors import EjkernelWarning, UnsupportedError
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._reference import philox
from ejkernel.modules import (
    AttentionConfig,
    FlashAttention,
    FlashAttentionConfig,
    create_default_executor,
    flash_attention,
)
from ejkernel.ops import BwdParams, FwdParams
from ejkernel.types import MaskInfo
from tests import host

B, T, S, H, G, D, E = 2, 5, 6, 4, 2, 8, 8


def on_host(b=B, t=T, s=S, h=H, g=G):
    return {
        "query": host.normal(1, (b, t, h, D)),
        "key": host.normal(2, (b, s, g, D)),
        "value": host.normal(3, (b, s, g, E)),
    }


def operands(t=T):
    return host.to_jax(on_host(t=t))


def ints(*values, dtype=np.int32):
    return np.asarray(values, dtype)


MASK_HINTS = ["mask[:, None, None, :]", "mask[None, None]", "mask[:, None]"]
WINDOW_RULE = ["sliding_window", ">= 0"]
DROPPED = {"dropout_prob": 0.5}
LIMITS = "[0, 2**64)"

# name: (arguments or what makes them, exception, words of its message)
BAD = {
    # arrays of queries, keys and values
    "query_rank": (
        {"query": host.normal(4, (T, H, D))},
        ValueError,
        ["query", "4 axes", "(5, 4, 8)"],
    ),
    "query_int": ({"query": host.ones((B, T, H, D), int)}, TypeError, ["query", "Float", "int32"]),
    "query_list": ({"query": [[1.0]]}, TypeError, ["query", "array", "list"]),
    "key_none": ({"key": None}, TypeError, ["key", "array", "None"]),
    "key_dtype": (
        {"key": host.normal(5, (B, S, G, D), jnp.bfloat16)},
        TypeError,
        ["key", "dtype of `query`", "float32", "bfloat16", "key.astype(query.dtype)"],
    ),
    "value_dtype": (
        {"value": host.normal(5, (B, S, G, E), jnp.float16)},
        TypeError,
        ["value", "float32", "float16", "value.astype(query.dtype)"],
    ),
    "key_batch": (
        {"key": host.normal(5, (3, S, G, D))},
        ValueError,
        ["key", "b=2", "(3, 6, 2, 8)"],
    ),
    "key_head_size": (
        {"key": host.normal(5, (B, S, G, 7))},
        ValueError,
        ["key", "d=8", "(2, 6, 2, 7)"],
    ),
    "value_length": (
        {"value": host.normal(5, (B, 7, G, E))},
        ValueError,
        ["value", "s=6", "(2, 7, 2"],
    ),
    "value_heads": (
        {"value": host.normal(5, (B, S, 1, E))},
        ValueError,
        ["value", "g=2", "(2, 6, 1"],
    ),
    "heads": (
        on_host(h=4, g=3),
        ValueError,
        ["4 heads", "`query`", "multiple", "3 heads", "`key`"],
    ),
    # masks and bias
    "mask_2d": (
        {"attention_mask": host.ones((B, S), bool)},
        ValueError,
        ["attention_mask", "4 axes", "(2, 6)", *MASK_HINTS],
    ),
    "mask_3d": (
        {"attention_mask": host.ones((B, T, S), bool)},
        ValueError,
        ["attention_mask", "4 axes", "(2, 5, 6)", *MASK_HINTS],
    ),
    "bias_2d": (
        {"bias": host.ones((T, S))},
        ValueError,
        ["bias", "4 axes", "(5, 6)", *MASK_HINTS],
    ),
    "mask_shape": (
        {"attention_mask": host.ones((B, 1, T, 7), bool)},
        ValueError,
        ["attention_mask", "broadcast to (2, 4, 5, 6)", "(2, 1, 5, 7)"],
    ),
    "bias_key_heads": (
        {"bias": host.ones((1, G, T, S))},
        ValueError,
        ["bias", "broadcast to (2, 4, 5, 6)", "(1, 2, 5, 6)"],
    ),
    "bias_int": ({"bias": host.ones((1, 1, T, S), int)}, TypeError, ["bias", "Float", "int32"]),
    # windows
    "window_negative": ({"sliding_window": -2}, ValueError, [*WINDOW_RULE, "-2"]),
    "window_minus_one": ({"sliding_window": -1}, ValueError, [*WINDOW_RULE, "-1"]),
    "window_pair": ({"sliding_window": (-2, 0)}, ValueError, [*WINDOW_RULE, "-1", "(-2, 0)"]),
    "window_bool": ({"sliding_window": True}, ValueError, [*WINDOW_RULE, "True"]),
    "window_triple": ({"sliding_window": (1, 2, 3)}, TypeError, ["sliding_window", "(1, 2, 3)"]),
    "window_float": ({"sliding_window": 1.5}, TypeError, ["sliding_window", "int", "1.5"]),
    "window_text": ({"sliding_window": "3"}, TypeError, ["sliding_window", "int", "'3'"]),
    # numbers
    "cap_bool": ({"logits_soft_cap": True}, ValueError, ["logits_soft_cap", "positive", "True"]),
    "cap_zero": ({"logits_soft_cap": 0.0}, ValueError, ["logits_soft_cap", "positive", "0.0"]),
    "cap_negative": ({"logits_soft_cap": -1}, ValueError, ["logits_soft_cap", "positive", "-1"]),
    "cap_nan": (
        {"logits_soft_cap": float("nan")},
        ValueError,
        ["logits_soft_cap", "finite", "nan"],
    ),
    "cap_text": ({"logits_soft_cap": "30"}, TypeError, ["logits_soft_cap", "'30'"]),
    "scale_infinite": (
        {"softmax_scale": float("inf")},
        ValueError,
        ["softmax_scale", "finite", "inf"],
    ),
    "scale_array": (
        {"softmax_scale": host.asarray([0.5, 0.5])},
        ValueError,
        ["softmax_scale", "shape ()", "float32[2]", "Multiply `query`"],
    ),
    "causal_text": ({"causal": "yes"}, TypeError, ["causal", "bool", "'yes'"]),
    "return_lse_int": ({"return_lse": 2}, TypeError, ["return_lse", "bool", "2"]),
    # dropout
    "dropout_one": ({"dropout_prob": 1.0}, ValueError, ["dropout_prob", "[0, 1)", "1.0"]),
    "dropout_negative": ({"dropout_prob": -0.1}, ValueError, ["dropout_prob", "[0, 1)", "-0.1"]),
    "dropout_nan": ({"dropout_prob": float("nan")}, ValueError, ["dropout_prob", "[0, 1)", "nan"]),
    "seed_negative": (DROPPED | {"dropout_seed": -1}, ValueError, ["dropout_seed", LIMITS, "-1"]),
    "seed_large": (
        DROPPED | {"dropout_seed": 2**64},
        ValueError,
        ["dropout_seed", LIMITS, str(2**64)],
    ),
    "seed_float": (DROPPED | {"dropout_seed": 1.5}, TypeError, ["dropout_seed", "1.5"]),
    "seed_bool": (DROPPED | {"dropout_seed": True}, TypeError, ["dropout_seed", "True"]),
    "seed_key": (
        lambda: DROPPED | {"dropout_seed": jax.random.key(0)},
        TypeError,
        ["dropout_seed", "Integer", "key"],
    ),
    "seed_floats": (
        DROPPED | {"dropout_seed": host.ones(2)},
        TypeError,
        ["dropout_seed", "Integer", "float32"],
    ),
    "seed_int32_pair": (
        DROPPED | {"dropout_seed": ints(1, 2)},
        ValueError,
        ["dropout_seed", "scalar", "uint32[2]", "int32[2]"],
    ),
    "seed_three_words": (
        DROPPED | {"dropout_seed": ints(1, 2, 3, dtype=np.uint32)},
        ValueError,
        ["dropout_seed", "scalar", "uint32[2]", "uint32[3]"],
    ),
    "seed_matrix": (
        DROPPED | {"dropout_seed": host.ones((2, 2), np.uint32)},
        ValueError,
        ["dropout_seed", "(2, 2)"],
    ),
    # sinks and slopes
    "sinks_ambiguous": (
        {"softmax_aux": host.zeros(H)},
        ValueError,
        ["softmax_aux", "ambiguous", "(4,)", "softmax_aux[:, None]", "softmax_aux[None]"],
    ),
    "sinks_heads": ({"softmax_aux": host.zeros((3, 2))}, ValueError, ["softmax_aux", "(3, 2)"]),
    "sinks_rank": (
        {"softmax_aux": host.zeros((1, H, 1))},
        ValueError,
        ["softmax_aux", "(1, 4, 1)"],
    ),
    "sinks_int": (
        {"softmax_aux": host.zeros((1, 2), int)},
        TypeError,
        ["softmax_aux", "Float", "int32"],
    ),
    "alibi_length": ({"alibi_slopes": host.zeros(G)}, ValueError, ["alibi_slopes", "h=4", "(2,)"]),
    # lengths
    "one_cum_seqlens": (
        {"cum_seqlens_q": ints(0, 3, 5)},
        ValueError,
        ["cum_seqlens_q", "5 queries", "6 keys", "Pass `cum_seqlens_k`"],
    ),
    "one_cum_seqlens_k": (
        {"cum_seqlens_k": ints(0, 3, 5)},
        ValueError,
        ["cum_seqlens_k", "5 queries", "6 keys", "Pass `cum_seqlens_q`"],
    ),
    "cum_seqlens_entries": (
        {"cum_seqlens_q": ints(0, 3, 5, 5), "cum_seqlens_k": ints(0, 3, 5, 5)},
        ValueError,
        ["cum_seqlens_q", "batch + 1 = 3", "packed", "got 4 entries", "batch 2"],
    ),
    "cum_seqlens_differ": (
        on_host(b=1) | {"cum_seqlens_q": ints(0, 3, 5), "cum_seqlens_k": ints(0, 6)},
        ValueError,
        ["cum_seqlens_k", "3", "(2,)"],
    ),
    "cum_seqlens_none": (
        on_host(b=1) | {"cum_seqlens_q": ints(), "cum_seqlens_k": ints()},
        ValueError,
        ["cum_seqlens_q", "at least one entry", "(0,)"],
    ),
    "cum_seqlens_floats": (
        {"cum_seqlens_q": host.ones(3), "cum_seqlens_k": host.ones(3)},
        TypeError,
        ["cum_seqlens_q", "Int", "float32"],
    ),
    "cum_seqlens_rank": (
        {"cum_seqlens_q": host.ones((1, 3), int), "cum_seqlens_k": host.ones((1, 3), int)},
        ValueError,
        ["cum_seqlens_q", "1 axes", "(1, 3)"],
    ),
    # segment ids
    "one_segment_ids": (
        {"q_segment_ids": host.zeros((B, T), int)},
        ValueError,
        ["q_segment_ids", "5 queries", "6 keys", "Pass `kv_segment_ids`"],
    ),
    "segment_ids_length": (
        {"q_segment_ids": host.zeros((B, T), int), "kv_segment_ids": host.zeros((B, T), int)},
        ValueError,
        ["kv_segment_ids", "s=6", "(2, 5)"],
    ),
    "segment_ids_twice": (
        lambda: {
            "mask_info": MaskInfo.from_segments(host.zeros((B, T), int), host.zeros((B, S), int)),
            "q_segment_ids": host.zeros((B, T), int),
            "kv_segment_ids": host.zeros((B, S), int),
        },
        ValueError,
        ["q_segment_ids", "given twice", "mask_info"],
    ),
    "lengths_twice": (
        lambda: {
            "mask_info": MaskInfo.from_lengths(ints(1, 2), ints(3, 4)),
            "cum_seqlens_q": ints(0, 1, 2),
            "cum_seqlens_k": ints(0, 1, 2),
        },
        ValueError,
        ["cum_seqlens_q", "given twice", "mask_info"],
    ),
    # mask_info
    "mask_info_type": ({"mask_info": "causal"}, TypeError, ["mask_info", "MaskInfo"]),
    "mask_info_array": ({"mask_info": host.ones((B, S))}, TypeError, ["mask_info", "MaskInfo"]),
    "mask_info_mask_length": (
        lambda: {"mask_info": MaskInfo.from_attention_mask(host.ones((1, 1, 3, S), bool))},
        ValueError,
        ["attention_mask", "(1, 1, 3, 6)"],
    ),
    "mask_info_mask_batch": (
        lambda: {"mask_info": MaskInfo.from_attention_mask(host.ones((3, 1, T, S), bool))},
        ValueError,
        ["attention_mask", "(3, 1, 5, 6)"],
    ),
    "mask_info_mask_heads": (
        lambda: {"mask_info": MaskInfo.from_attention_mask(host.ones((1, G, T, S), bool))},
        ValueError,
        ["attention_mask", "(1, 2, 5, 6)"],
    ),
    "mask_info_ids_short": (
        lambda: {
            "mask_info": MaskInfo.from_segments(host.zeros((B, 3), int), host.zeros((B, 4), int))
        },
        ValueError,
        ["q_segment_ids", "(2, 3)"],
    ),
    "mask_info_ids_long": (
        lambda: {
            "mask_info": MaskInfo.from_segments(host.zeros((B, 9), int), host.zeros((B, S), int))
        },
        ValueError,
        ["q_segment_ids", "(2, 9)"],
    ),
    "mask_info_positions": (
        lambda: {"mask_info": MaskInfo(q_positions=host.zeros((1, 3), jnp.int32)), "causal": True},
        ValueError,
        ["q_positions", "(1, 3)"],
    ),
    "mask_info_far_positions": (
        {"mask_info": MaskInfo(kv_positions=np.full((B, S), -(2**29), np.int32))},
        ValueError,
        ["mask_info.kv_positions", "between -2^29 and 2^29", "got -536870912", "subtract"],
    ),
    "mask_info_lengths": (
        lambda: on_host(b=1) | {"mask_info": MaskInfo.from_lengths(ints(1, 2, 1), ints(1, 2, 2))},
        ValueError,
        ["lengths", "(3,)"],
    ),
    "mask_info_lengths_twice": (
        lambda: {"mask_info": MaskInfo(q_lengths=ints(1, 2), cum_seqlens_k=ints(0, 1, 2))},
        ValueError,
        ["mask_info", "both lengths and cum_seqlens"],
    ),
    "mask_info_window": (
        lambda: {"mask_info": MaskInfo(sliding_window=(-5, 2))},
        ValueError,
        ["sliding_window", "-1 for no limit", "(-5, 2)"],
    ),
    # platform and configuration
    "platform_unknown": (
        {"platform": "metal"},
        ValueError,
        ["platform", "'auto'", "'xla'", "'metal'"],
    ),
    "platform_none": ({"platform": None}, ValueError, ["platform", "'auto'", "None"]),
    "cfg_and_fwd": (
        {"cfg": FlashAttentionConfig(), "fwd_params": FwdParams()},
        ValueError,
        ["cfg", "fwd_params", "not both"],
    ),
    "cfg_and_bwd": (
        {"cfg": FlashAttentionConfig(), "bwd_params": BwdParams()},
        ValueError,
        ["cfg", "bwd_params", "not both"],
    ),
    "cfg_platform": (
        {"cfg": FlashAttentionConfig(platform="triton"), "platform": "xla"},
        ValueError,
        ["platform='xla'", "contradicts", "cfg.platform='triton'"],
    ),
    "cfg_platform_unknown": (
        {"cfg": FlashAttentionConfig(platform="metal")},
        ValueError,
        ["'xla'", "'metal'"],
    ),
    "cfg_backend_unknown": (
        {"cfg": FlashAttentionConfig(backend="abacus")},
        ValueError,
        ["backend", "'cpu'", "'abacus'"],
    ),
    "cfg_backend_elsewhere": (
        {"cfg": FlashAttentionConfig(backend="tpu"), "platform": "xla"},
        UnsupportedError,
        ["tpu"],
    ),
    "cfg_of_another_op": (
        {"cfg": AttentionConfig()},
        TypeError,
        ["cfg", "FlashAttentionConfig", "AttentionConfig"],
    ),
    "cfg_is_params": (
        {"cfg": FwdParams()},
        TypeError,
        ["cfg", "FlashAttentionConfig", "FwdParams"],
    ),
    "fwd_params_type": ({"fwd_params": "big"}, TypeError, ["FwdParams", "'big'"]),
    "bwd_params_type": ({"bwd_params": "big"}, TypeError, ["BwdParams", "'big'"]),
    "params_exchanged": ({"bwd_params": FwdParams()}, TypeError, ["bwd_params", "a BwdParams"]),
    # meshes
    "out_specs_missing": (
        lambda: {
            "mesh": jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)),
            "in_specs": (P("x"),),
        },
        ValueError,
        ["in_specs", "out_specs", "go together", "['out_specs'] missing"],
    ),
    "mesh_type": ({"mesh": "tpu"}, TypeError, ["mesh", "jax.sharding.Mesh", "'tpu'", "str"]),
    "specs_alone": (
        {"in_specs": (P("x"),), "out_specs": P("x")},
        ValueError,
        ["in_specs", "out_specs", "go together", "['mesh'] missing"],
    ),
}


def bad_call(name):
    arguments, exception, words = BAD[name]
    return host.to_jax(arguments() if callable(arguments) else arguments), exception, words


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_say_what_is_wrong(name):
    arguments, exception, words = bad_call(name)
    with pytest.raises(exception) as caught:
        flash_attention(**operands() | arguments)
    assert type(caught.value) is exception
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize(
    "name", ["mask_2d", "heads", "window_negative", "sinks_ambiguous", "cap_zero"]
)
def test_messages_name_the_function(name):
    arguments, exception, _ = bad_call(name)
    with pytest.raises(exception, match=r"^`flash_attention`: "):
        flash_attention(**operands() | arguments)


@pytest.mark.parametrize("name", ["mask_2d", "heads", "one_cum_seqlens", "dropout_one"])
def test_the_same_checks_under_jit_and_in_an_executor(name):
    arguments, exception, words = bad_call(name)
    executor, kernel = create_default_executor(), FlashAttention()
    values = operands() | arguments
    arrays = {n: values.pop(n) for n in list(values) if isinstance(values[n], jax.Array)}
    for call in (flash_attention, lambda **kw: executor(kernel, **kw)):
        with pytest.raises(exception) as caught:
            jax.jit(lambda arrays, call=call: call(**arrays, **values))(arrays)
        assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("causal", True),
        ("dropout_prob", 0.1),
        ("logits_soft_cap", 30.0),
        ("sliding_window", 3),
        ("return_lse", True),
        ("deterministic", True),
    ],
)
def test_traced_options_are_refused(name, value):
    with pytest.raises(TypeError) as caught:
        jax.jit(lambda x: flash_attention(**operands(), **{name: x}))(value)
    assert all(word in str(caught.value) for word in (name, "Python value", "traced"))


def test_missing_and_unknown_arguments():
    q, k, _ = operands().values()
    with pytest.raises(TypeError, match="value"):
        flash_attention(q, k)
    with pytest.raises(TypeError, match=r"flash_attention.*value"):
        create_default_executor()(FlashAttention(), q, k)
    with pytest.raises(TypeError, match=r"flash_attention.*no_such_option"):
        create_default_executor()(FlashAttention(), q, k, k, no_such_option=1)


# Platforms


@pytest.mark.parametrize("platform", ["triton", "pallas", "cuda", "cudnn"])
def test_a_platform_asked_for_never_falls_back(platform):
    """By argument, by config and by setting; this process computes on CPU devices."""
    for call in ({"platform": platform}, {"cfg": FlashAttentionConfig(platform=platform)}):
        with pytest.raises(UnsupportedError) as caught:
            flash_attention(**operands(), **call)
        assert "`flash_attention`" in str(caught.value)
        assert platform in str(caught.value)
    flash_attention(**operands())  # compiled, and still not what the setting asks for
    with _settings.override(platform=platform), pytest.raises(UnsupportedError, match=platform):
        flash_attention(**operands())


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_a_platform_that_is_not_installed_says_how_to_get_it():
    with pytest.raises(
        UnsupportedError, match=r"Triton is not installed.*pip install 'ejkernel\[gpu\]'"
    ):
        flash_attention(**operands(), platform="triton")


def test_a_platform_with_several_kernels_refuses_with_every_reason():
    """`except UnsupportedError` catches it, and the text has the reason of each kernel."""

    def never(args, cfg):
        raise AssertionError("ran a kernel that cannot serve the call")

    before = list(kernel_registry.list("flash_attention"))
    register = kernel_registry.register
    register("flash_attention", "cuda", "gpu", priority=7)(never)
    register("flash_attention", "cuda", "cpu", priority=7, requires=lambda args: "hates this")(
        never
    )
    try:
        with pytest.raises(UnsupportedError) as caught:
            flash_attention(**operands(), platform="cuda")
        text = "".join([str(caught.value), *map(str, getattr(caught.value, "exceptions", ()))])
        assert "hates this" in text
        assert "needs a GPU" in text
    finally:
        for entry in set(kernel_registry.list("flash_attention")) - set(before):
            kernel_registry.unregister(entry)


# Meshes


def test_specs_must_fit_the_operation():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def refused(exception, in_specs, out_specs=None):
        out_specs = P("x") if out_specs is None else out_specs
        with pytest.raises(exception) as caught:
            flash_attention(**operands(), mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        return str(caught.value)

    tokens = refused(ValueError, (P(None, "x"),))
    assert all(word in tokens for word in ("in_specs", "'t'", "`query`", "ring_attention"))
    head_size = refused(ValueError, {"key": P(None, None, None, "x")})
    assert all(word in head_size for word in ("in_specs", "'d'", "`key`"))
    axis = refused(ValueError, (P("y"),))
    assert all(word in axis for word in ("'y'", "('x',)", "`query`"))
    name = refused(ValueError, {"keys": P("x")})
    assert all(word in name for word in ("in_specs", "['keys']", "'key'"))
    absent = refused(ValueError, {"query": P("x"), "bias": P("x")})
    assert all(word in absent for word in ("in_specs", "`bias`", "None"))
    bare = refused(TypeError, P("x"))
    assert all(word in bare for word in ("in_specs", "tuple", "mapping"))
    output = refused(ValueError, (P("x"),), P(None, "x"))
    assert all(word in output for word in ("out_specs", "in_specs"))


# Derivatives


@pytest.mark.parametrize("mode", [jax.grad, jax.jacfwd])
def test_constants_have_no_derivative(mode):
    slopes = jnp.asarray([0.5, 0.25, 0.125, 0.0625])

    def loss(slopes):
        return flash_attention(**operands(), alibi_slopes=slopes).sum()

    with pytest.raises(UnsupportedError) as caught:
        mode(loss)(slopes)
    words = ("flash_attention", "`alibi_slopes`", "softmax_aux", "jax.lax.stop_gradient")
    assert all(word in str(caught.value) for word in words)
    assert not np.any(mode(lambda x: loss(jax.lax.stop_gradient(x)))(slopes))


# Values at the edge


WIDE = [2**31 - 1, 2**31, 2**40, (2**31 - 1, -1), (-1, 2**31 - 1)]


@pytest.mark.parametrize("window", [(-1, 2), (1, -1), 1])
def test_a_window_in_a_mask_is_one_in_the_call(window):
    xs = operands()
    within = flash_attention(**xs, mask_info=MaskInfo(sliding_window=window))
    np.testing.assert_array_equal(within, flash_attention(**xs, sliding_window=window))


@pytest.mark.parametrize("window", WIDE, ids=str)
def test_a_window_wider_than_any_length_hides_nothing(window):
    out = flash_attention(**operands(), sliding_window=window)
    expected = flash_attention(**operands())
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_strict_promotion_is_the_users_choice():
    """Masks are bools, and half-width inputs are summed in float32: neither is promoted."""
    values = {name: x.astype(jnp.bfloat16) for name, x in operands().items()}
    mask = jnp.ones((1, 1, 1, S), bool)
    lengths = {"cum_seqlens_q": jnp.asarray([0, 5, 8]), "cum_seqlens_k": jnp.asarray([0, 6, 9])}
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        outs = [
            flash_attention(**operands(), attention_mask=mask),
            flash_attention(**operands(), **lengths),
            flash_attention(**values),
        ]
    assert all(jnp.isfinite(out).all() for out in outs)


# Seeds

SEEDED = {"dropout_prob": 0.5}


def kept_pairs(seed):
    """[b, h, t, s]: with the identity for values, the output is the weights."""
    eye = jnp.broadcast_to(jnp.eye(S)[None, :, None], (B, S, G, S))
    out = flash_attention(**operands() | {"value": eye}, **SEEDED, dropout_seed=seed)
    return np.asarray(out).transpose(0, 2, 1, 3) > 0


def words_keep(low, high):
    b, h, i, j = np.ix_(*(np.arange(n) for n in (B, H, T, S)))
    return np.choose(j & 3, philox.words((low, high), j >> 2, i, h, b)) >= 2**31


@pytest.mark.parametrize(
    ("seed", "low", "high"),
    [
        (0, 0, 0),
        (7, 7, 0),
        (2**32 + 7, 7, 1),
        (2**64 - 1, 2**32 - 1, 2**32 - 1),
        (np.int64(2**40 + 3), 3, 2**8),
        (np.uint32(2**32 - 1), 2**32 - 1, 0),
        (ints(7, dtype=jnp.uint32)[0], 7, 0),
        (ints(2**32 - 2, dtype=jnp.uint32)[0], 2**32 - 2, 0),
        (ints(7, 1, dtype=jnp.uint32), 7, 1),
        (np.asarray([7, 2**32 - 1], np.uint32), 7, 2**32 - 1),
        (ints(-1)[0], 2**32 - 1, 0),
        (np.asarray(-5, np.int32), 2**32 - 5, 0),
        (ints(9)[0], 9, 0),
    ],
    ids=lambda x: f"{getattr(x, 'dtype', 'int')}{np.asarray(x).tolist()}",
)
def test_forms_of_a_seed(seed, low, high):
    """Numbers, and arrays of NumPy and of JAX."""
    of_32_bits = getattr(seed, "dtype", None) in (np.int32, np.uint32)
    for form in (seed, jnp.asarray(seed)) if of_32_bits else (seed,):
        np.testing.assert_array_equal(kept_pairs(form), words_keep(low, high))


def test_a_seed_may_be_traced():
    traced = jax.jit(lambda seed: flash_attention(**operands(), **SEEDED, dropout_seed=seed))
    for seed in (3, 4):
        expected = flash_attention(**operands(), **SEEDED, dropout_seed=seed)
        np.testing.assert_allclose(traced(jnp.uint32(seed)), expected, rtol=1e-5, atol=1e-6)


def test_no_seed_is_seed_zero_and_one_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = kept_pairs(None)
    assert [w.category for w in caught] == [EjkernelWarning]
    assert "`dropout_seed`" in str(caught[0].message)
    assert "seed 0" in str(caught[0].message)
    np.testing.assert_array_equal(kept, words_keep(0, 0))


def test_no_seed_in_a_gradient_is_one_warning_too():
    values = operands(t=3)

    def loss(q):
        return flash_attention(**values | {"query": q}, **SEEDED).sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(jax.grad(loss))(values["query"])
    assert [w.category for w in caught] == [EjkernelWarning]


def test_without_dropout_no_seed_is_needed():
    expected = flash_attention(**operands())
    out = flash_attention(**operands(), dropout_prob=0.0, dropout_seed=5)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
