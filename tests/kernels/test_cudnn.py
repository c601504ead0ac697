"""cuDNN's attention: what it refuses and why, anywhere; its numbers, on a device."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel._device import Target
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import _oracle, kernel_registry
from ejkernel.kernels._cudnn.flash_attention import fused, private
from ejkernel.modules import FlashAttention, flash_attention
from ejkernel.ops import Executor
from ejkernel.ops.core import autodiff
from tests.backend import BACKEND
from tests.kernels import harness

SPEC = kernel_registry.spec("flash_attention")
FUSED = harness.find_entry("flash_attention", "cudnn/gpu")
PUBLIC = harness.find_entry("flash_attention", "cudnn/gpu@-1")


def operands(t=8, s=8, d=8, e=None, heads=2, groups=2, batch=2, dtype="bfloat16"):
    rng = np.random.default_rng(3)
    shapes = {
        "query": (batch, t, heads, d),
        "key": (batch, s, groups, d),
        "value": (batch, s, groups, d if e is None else e),
    }
    return {
        name: jnp.asarray(rng.standard_normal(shape), jnp.dtype(dtype))
        for name, shape in shapes.items()
    }


def canonical(arrays, **options):
    return SPEC.canonicalize(SPEC.complete(arrays | options))


def bias(*shape, dtype="bfloat16"):
    return np.random.default_rng(7).standard_normal(shape).astype(jnp.dtype(dtype))


# What it cannot do

# sizes of the operands, options, and words of the reason
REFUSED = {
    "float32": ({"dtype": "float32"}, {}, "bfloat16 or float16; got float32"),
    "odd_head": ({"d": 12}, {}, "multiples of 8, at most 256; got 12 and 12"),
    "odd_value_head": ({"e": 4}, {}, "multiples of 8, at most 256; got 8 and 4"),
    "large_head": ({"d": 264}, {}, "at most 256; got 264"),
    "no_keys": ({"s": 0}, {}, "not empty"),
    "no_rows": ({"batch": 0}, {}, "not empty"),
    "scale": ({}, {"softmax_scale": -1.0}, "softmax_scale that is not positive; got -1.0"),
    "ahead": ({}, {"sliding_window": (2, 3)}, "ends at the query"),
    "one_sided": ({}, {"sliding_window": (2, -1)}, "ends at the query"),
    "lengths": ({"t": 6}, {"causal": True}, "equal lengths; got 6 and 8"),
}
NOT_HONOURED = {
    "attention_mask": np.ones((1, 1, 8, 8), bool),
    "logits_soft_cap": 30.0,
    "softmax_aux": np.zeros((2, 1), np.float32),
    "alibi_slopes": np.ones(2, np.float32),
    "cum_seqlens_q": np.asarray([0, 4, 12]),
    "deterministic": True,
}


@pytest.fixture(params=["fused", "public"])
def entry(request, monkeypatch):
    """Each entry, where it is the one to use."""
    if request.param == "fused":
        return FUSED
    monkeypatch.setattr(private, "library", lambda: None)
    return PUBLIC


@pytest.mark.parametrize("name", REFUSED)
def test_what_cudnn_cannot_do_has_a_reason(entry, name):
    sizes, options, words = REFUSED[name]
    assert words in entry.why_not(canonical(operands(**sizes), **options))


@pytest.mark.parametrize("side", ["q_positions", "kv_positions"])
def test_given_positions_are_refused(entry, side):
    args = canonical(operands(), **{side: np.zeros((1, 8), np.int32)})
    assert entry.requires(args) == "needs the usual positions"


@pytest.mark.parametrize("name", NOT_HONOURED)
def test_options_that_cudnn_does_not_have(entry, name):
    reason = entry.why_not(canonical(operands(), **{name: NOT_HONOURED[name]}))
    assert reason.startswith("does not honour")
    assert name in reason


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({"dtype": "float16", "d": 256, "e": 128}, {}),
        ({"t": 6}, {}),
        ({"groups": 1}, {"causal": True, "softmax_scale": 0.3}),
        ({}, {"sliding_window": (3, 0)}),
    ],
)
def test_what_cudnn_can_do(entry, sizes, options):
    args = canonical(operands(**sizes), **options)
    assert entry.why_not(args) is None
    assert entry.why_not(args, direction="backward") is None


# device, sizes of the operands, and words of the reason
DEVICES = {
    "amd": (("AMD Instinct MI300X", "gfx942"), {}, "NVIDIA; this is AMD Instinct MI300X (gfx942)"),
    "amd_by_name": (("AMD Instinct MI300X", None), {}, "needs a GPU of NVIDIA"),
    "turing": (("Tesla T4", "7.5"), {}, "8.0 or later; this is 7.5"),
    "ampere_large": (("A100", "8.0"), {"d": 256}, "at most 128, the same for values; got 256"),
    "ampere_values": (("A100", "8.0"), {"d": 64, "e": 128}, "the same for values; got 64 and 128"),
    "ampere": (("A100", "8.0"), {"d": 128}, None),
    "hopper": (("NVIDIA H200", "9.0"), {"d": 256, "e": 128}, None),
    "blackwell": (("NVIDIA B200", "10.0"), {"d": 64, "e": 128}, None),
    "by_name": (("NVIDIA H200", None), {"d": 256}, None),
}


@pytest.mark.parametrize("name", DEVICES)
def test_devices(entry, name):
    device, sizes, words = DEVICES[name]
    reason = entry.why_not(canonical(operands(**sizes)), Target("gpu", *device))
    assert reason is None if words is None else words in reason


@pytest.mark.parametrize(("version", "refused"), [(90900, True), (91000, False), (None, False)])
def test_values_of_another_size_need_a_newer_cudnn(entry, monkeypatch, version, refused):
    monkeypatch.setattr(private, "cudnn_version", lambda: version)
    args = canonical(operands(d=64, e=128))
    assert (entry.why_not(args, Target("gpu", "NVIDIA H200", "9.0")) is not None) == refused


@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (2, 1, 8, 8), (1, 2, 8, 8), (2, 2, 8, 8)])
def test_a_bias_over_all_pairs_is_for_the_fused_entry(shape):
    args = canonical(operands(), bias=bias(*shape))
    assert FUSED.why_not(args) is None
    assert PUBLIC.why_not(args) == "does not honour ['bias']"


@pytest.mark.parametrize(
    ("sizes", "given", "words"),
    [
        ({}, bias(1, 1, 1, 8), "bias over all pairs, of even lengths; got (1, 1, 1, 8)"),
        ({"t": 7}, bias(1, 1, 7, 8), "even lengths; got (1, 1, 7, 8)"),
        ({"s": 7}, bias(1, 1, 8, 7), "even lengths; got (1, 1, 8, 7)"),
        ({}, bias(1, 1, 8, 8, dtype="float32"), "the query's dtype; got float32"),
    ],
)
def test_other_biases_are_refused(sizes, given, words):
    assert words in FUSED.why_not(canonical(operands(**sizes), bias=given))


def test_the_logsumexp_has_no_gradient():
    args = canonical(operands(), return_lse=True)
    assert FUSED.why_not(args) is None
    assert "gradient of the logsumexp" in FUSED.why_not(args, direction="backward")
    assert PUBLIC.why_not(args) == "does not honour ['return_lse']"


# Which of the two


def test_the_private_names_are_there():
    found = private.library()
    assert found is not None
    rule = inspect.signature(found._dot_product_attention_fwd_rule).parameters
    assert list(rule)[:4] == ["query", "key", "value", "bias"]
    assert {"scale", "variadic_args", "mask_type", "layout", "sliding_window_length"} <= set(rule)
    assert {kind.name for kind in found.MaskType} >= {"NO_MASK", "CAUSAL"}
    assert found.AttentionLayout.BTNH is not None


def test_one_entry_gives_way_to_the_other(monkeypatch):
    args = canonical(operands())
    assert FUSED.why_not(args) is None
    assert PUBLIC.why_not(args) == "gives way to cudnn/gpu, which has a backward of its own"
    monkeypatch.setattr(private, "library", lambda: None)
    assert FUSED.why_not(args) == "this version of JAX has other cuDNN primitives"
    assert PUBLIC.why_not(args) is None


@pytest.mark.parametrize("missing", ["_dot_product_attention_fwd_rule", "new"])
def test_another_jax_has_other_names(monkeypatch, missing):
    library = private.library()
    if missing == "new":  # a parameter that nobody here knows

        def changed(query, key, value, bias, something_new):
            raise AssertionError

        monkeypatch.setattr(library, "_dot_product_attention_fwd_rule", changed)
    else:
        monkeypatch.delattr(library, missing)
    assert private.library.__wrapped__() is None


@pytest.mark.skipif(BACKEND != "cpu", reason="about machines without a GPU")
def test_without_a_gpu_neither_is_chosen():
    arrays = operands()
    choice = Executor().choose(FlashAttention(), *arrays.values())
    assert choice.implementation.name == "xla/any"
    for entry in (FUSED, PUBLIC):
        assert choice.refused[entry.name] == "needs a GPU; this call is for cpu"
    with pytest.raises(UnsupportedError):
        flash_attention(*arrays.values(), platform="cudnn")


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"bias": bias(1, 2, 8, 8)}])
def test_the_primitives_have_our_shapes(options):
    """Traced anywhere: outputs, a float32 logsumexp, and a gradient for each operand."""
    args = canonical(operands(d=16, e=8, groups=1), **options)
    wanted = frozenset({"query", "key", "value", *options} - {"causal"})

    def both():
        outputs, residuals = fused.forward(args, None)
        return outputs, residuals, fused.backward(args, None, outputs, residuals, outputs, wanted)

    (out,), (lse,), gradients = jax.eval_shape(both)
    assert (out.shape, out.dtype) == ((2, 8, 2, 8), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 2, 8), jnp.float32)
    for name in wanted:
        like = getattr(args, name)
        assert (gradients[name].shape, gradients[name].dtype) == (like.shape, like.dtype)


# vmap, with a dense function in place of cuDNN's


@pytest.fixture
def dense(monkeypatch):
    """The sizes of the batches that cuDNN would have had."""
    if jax.default_backend() != "cpu":
        pytest.skip("for machines without a GPU; on one, cuDNN itself is tested")
    sizes = []

    def attend(q, k, v, b, options):
        x = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
        x = x * options["scale"] + (b if options["variadic_args"][0] else 0.0)
        assert options["mask_type"] == private.library().MaskType.NO_MASK
        weights = jax.nn.softmax(x, -1).astype(v.dtype)
        return jnp.einsum("bhts,bshe->bthe", weights, v), jax.nn.logsumexp(x, -1)

    def forward(xs, options):
        assert xs[0].shape[0] == xs[1].shape[0] == xs[2].shape[0]  # as cuDNN wants it
        sizes.append(xs[0].shape[0])
        return attend(*xs[:4], options)

    def backward(xs, lse, out, dout, options):
        assert lse.shape[0] == out.shape[0] == dout.shape[0] == xs[0].shape[0]
        pull = jax.vjp(lambda *given: attend(*given, options)[0], *xs[:4])[1]
        return pull(dout)[: 4 if options["variadic_args"][1] else 3]

    monkeypatch.setattr(private, "forward", forward)
    monkeypatch.setattr(private, "backward", backward)
    return sizes


def through_cudnn(q, k, v, b=None):
    args = canonical({"query": q, "key": k, "value": v}, bias=b)
    rule = autodiff.Rule(
        op="flash_attention",
        forward=lambda a: fused.forward(a, None),
        backward=lambda a, *rest: fused.backward(a, None, *rest),
        formula=SPEC.formula_fn(),
        differentiable=SPEC.differentiable,
        output_names=SPEC.outputs(args),
        residual_names=tuple(SPEC.residual_shapes(args)),
    )
    return autodiff.apply(rule, args)[0]


ROUNDING = 2e-6  # four units in the last place of numbers up to 8: sums in another order

# what has an axis of vmap, and where: query, key, value; a bias and its leading sizes
MAPPED = {
    "all": ((0, 0, 0), None, None),
    "elsewhere": ((1, 2, 3), None, None),
    "query": ((0, None, None), None, None),
    "keys": ((None, 0, 0), None, None),
    "bias_for_all": ((0, 0, 0), None, (1, 2)),
    "bias_of_rows": ((0, 0, 0), None, (2, 1)),
    "bias_alone": ((None, None, None), 0, (1, 2)),
    "biases": ((0, 0, 0), 0, (1, 1)),
}


PARTLY = ("elsewhere", "query", "keys", "bias_alone")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in PARTLY else []) for n in MAPPED]
)
def test_vmap(dense, name):
    axes, bias_axis, lead = MAPPED[name]
    rng, lanes = np.random.default_rng(5), 3
    make = lambda axis, *shape: jnp.asarray(
        rng.standard_normal(shape if axis is None else np.insert(shape, axis, lanes)), jnp.float32
    )
    xs = [make(axis, 2, 8, 2, e) for axis, e in zip(axes, (8, 8, 16), strict=True)]
    axes = [*axes, 0]
    xs.append(make(0, 2, 8, 2, 16))  # the cotangent
    if lead is not None:
        axes.append(bias_axis)
        xs.append(make(bias_axis, *lead, 8, 8))
    wanted = tuple(i for i in range(len(xs)) if i != 3)

    def one(q, k, v, dout, *b):
        return (through_cudnn(q, k, v, *b) * dout).sum()

    lane = lambda i: [x if a is None else jnp.take(x, i, a) for x, a in zip(xs, axes, strict=True)]
    expected = [jax.grad(one, wanted)(*lane(i)) for i in range(lanes)]
    expected = jax.tree.map(lambda *parts: jnp.stack(parts), *expected)
    mapped = jax.jit(jax.vmap(jax.grad(one, wanted), axes))(*xs)
    for actual, right in zip(mapped, expected, strict=True):
        np.testing.assert_allclose(actual, right, rtol=0, atol=ROUNDING)
    assert dense[-1] == 2 * lanes
    total = jax.jit(jax.grad(lambda *xs: jax.vmap(one, axes)(*xs).sum(), wanted))(*xs)
    for i, place in enumerate(wanted):
        if axes[place] is None:  # the sum over the lanes
            np.testing.assert_allclose(total[i], expected[i].sum(0), rtol=0, atol=ROUNDING)


def test_vmap_of_vmap(dense):
    arrays = [jnp.stack([x, 2 * x, -x]) for x in operands(dtype="float32").values()]
    b = jnp.asarray(bias(1, 2, 8, 8, dtype="float32"))
    run = lambda q, k, v: jax.vmap(through_cudnn, (0, None, None, None))(q, k, v, b)
    twice = jax.vmap(run, (None, 0, 0))(*arrays)
    assert dense[-1] == 2 * 9
    for i in range(3):
        for j in range(3):
            right = through_cudnn(arrays[0][j], arrays[1][i], arrays[2][i], b)
            np.testing.assert_allclose(twice[i, j], right, rtol=0, atol=ROUNDING)


# Numbers, on a device

CASES = {
    "plain": ({}, {}),
    "scale": ({}, {"softmax_scale": 0.5}),
    "cross": ({"t": 32}, {}),
    "odd": ({"t": 37, "s": 53}, {}),
    "causal": ({}, {"causal": True}),
    "window": ({}, {"sliding_window": (9, 0)}),
    "groups": ({"heads": 4, "groups": 2}, {"causal": True}),
    "one_query": ({"t": 1}, {}),
    "d8": ({"d": 8}, {}),
    "d192": ({"d": 192}, {"causal": True}),
    "d256": ({"d": 256}, {"causal": True}),
    "e_not_d": ({"d": 128, "e": 64}, {"causal": True}),
}
BIASES = [(1, 1), (2, 1), (1, 2), (2, 2)]
HIDING = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "sliding_window": (2, 0)},
}


def long_operands(**sizes):
    return operands(**({"t": 64, "s": 64, "d": 64} | sizes))


def about(*entries):
    """The entry that a test is about, in its name."""
    return pytest.mark.parametrize("entry", [pytest.param(e, id=e.name) for e in entries])


def check_numbers(entry, args):
    assert entry.why_not(args) is None
    made = harness.solve(SPEC, args)
    harness.assert_close_to_oracle(harness.run_entry(entry, made, (None, None)), made)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
@about(FUSED)
def test_outputs_and_gradients(entry, name, dtype):
    sizes, options = CASES[name]
    check_numbers(entry, canonical(long_operands(**sizes, dtype=dtype), **options))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lead", BIASES, ids=str)
@about(FUSED)
def test_a_bias_and_its_gradient(entry, lead, causal):
    check_numbers(entry, canonical(long_operands(), bias=bias(*lead, 64, 64), causal=causal))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["window", "groups", "e_not_d"])
@about(FUSED)
def test_a_bias_beside_other_options(entry, name):
    sizes, options = CASES[name]
    heads = sizes.get("heads", 2)
    check_numbers(entry, canonical(long_operands(**sizes), bias=bias(1, heads, 64, 64), **options))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("lse", [False, True])
@about(FUSED)
def test_a_bias_that_hides(entry, name, dtype, lse):
    """Single pairs, whole blocks before and behind those seen, and all keys of some queries."""
    t, options = 512, HIDING[name]
    b = jnp.asarray(bias(1, 2, t, t, dtype=dtype)).at[:, :, 4, 2].set(-jnp.inf)
    b = b.at[:, 0, 256:, :256].set(-jnp.inf).at[:, 1, :, 384:].set(-jnp.inf)
    b = b.at[:, 1, 300].set(-jnp.inf).at[:, 0, 128:256].set(-jnp.inf)
    args = canonical(long_operands(t=t, s=t, dtype=dtype), bias=b, **options, return_lse=lse)
    wanted = () if lse else ("query", "key", "value", "bias")
    made = _oracle.solve(SPEC, args, wanted, harness.QUICK)
    assert (made.oracle.outputs["out"][:, 128:256, 0] == 0.0).all()
    harness.assert_close_to_oracle(harness.run_entry(entry, made, (None, None)), made)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAPPED)
@about(FUSED)
def test_vmap_on_a_device(entry, name):
    axes, bias_axis, lead = MAPPED[name]
    rng, lanes, t = np.random.default_rng(5), 3, 64
    make = lambda axis, *shape: jnp.asarray(
        rng.standard_normal(shape if axis is None else np.insert(shape, axis, lanes)), jnp.bfloat16
    )
    xs = [make(axis, 2, t, 2, e) for axis, e in zip(axes, (64, 64, 128), strict=True)]
    names, axes = ["query", "key", "value"], [*axes]
    if lead is not None:
        names.append("bias")
        axes.append(bias_axis)
        xs.append(make(bias_axis, *lead, t, t))

    def one(dout, *given):
        out, pull = jax.vjp(through_cudnn, *given)
        return out, pull(dout)

    def lane(i):
        given = [x if a is None else jnp.take(x, i, a) for x, a in zip(xs, axes, strict=True)]
        return harness.solve(SPEC, canonical(dict(zip(names, given, strict=True))))

    right = [lane(i) for i in range(lanes)]
    douts = jnp.stack([made.cotangents[0] for made in right])
    outs, gradients = jax.jit(jax.vmap(one, (0, *axes)))(douts, *xs)
    for i, made in enumerate(right):
        mine = {n: g[i] for n, g in zip(names, gradients, strict=True)}
        actual = _oracle.answer(SPEC, made.args, (outs[i],), mine)
        harness.assert_close_to_oracle(actual, made)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "causal", "window", "groups", "one_query"])
@about(FUSED)
def test_the_logsumexp(entry, name):
    sizes, options = CASES[name]
    args = canonical(long_operands(**sizes), **options, return_lse=True)
    assert entry.why_not(args) is None
    made = _oracle.solve(SPEC, args, (), harness.QUICK)
    harness.assert_close_to_oracle(harness.run_entry(entry, made, (None, None)), made)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "causal", "window", "groups", "d256"])
@about(PUBLIC)
def test_the_public_function_stands_in(entry, name, monkeypatch):
    monkeypatch.setattr(private, "library", lambda: None)
    sizes, options = CASES[name]
    check_numbers(entry, canonical(long_operands(**sizes), **options))


@pytest.mark.gpu
def test_calls_go_to_whichever_is_there(monkeypatch):
    arrays = long_operands()
    kernel = FlashAttention()
    assert Executor().choose(kernel, *arrays.values(), platform="cudnn").implementation.name == (
        FUSED.name
    )
    fused_out = Executor()(kernel, *arrays.values(), platform="cudnn")
    monkeypatch.setattr(private, "library", lambda: None)
    jax.clear_caches()
    choice = Executor().choose(kernel, *arrays.values(), platform="cudnn")
    assert choice.implementation.name == PUBLIC.name
    out = Executor()(kernel, *arrays.values(), platform="cudnn")
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.asarray(fused_out, np.float32), rtol=0.02, atol=0.02
    )
