"""The registry: kernels and ops from outside, priorities, and refusals with a reason."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float
from numpy.testing import assert_allclose, assert_array_equal

from ejkernel import _settings
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import Backend, Platform, kernel_registry
from ejkernel.modules import Attention, FlashAttention, flash_attention
from ejkernel.ops import Executor
from tests import host

OP = "flash_attention"


@pytest.fixture(scope="module", autouse=True)
def arrays():
    # JAX arrays cannot be made while tests are collected: see conftest.py
    global Q, K, V
    keys = jax.random.split(jax.random.key(2), 3)
    Q, K, V = (jax.random.normal(key, (1, 6, 2, 4)) for key in keys)


@pytest.fixture(autouse=True)
def restored():
    """Takes out again what a test registers, ops included."""
    before, ops = kernel_registry.list(), kernel_registry.ops()
    yield
    for entry in kernel_registry.list():
        if entry not in before and entry.base is None:
            kernel_registry.unregister(entry)
    for op in {*kernel_registry.ops()} - {*ops}:
        del kernel_registry._specs[op]
    assert kernel_registry.list() == before


def constant(number):
    """A kernel of three required arguments and no options that answers with a number."""

    def kernel(query, key, value):
        return jnp.full_like(query, number)

    return kernel


def names(op=OP):
    return [entry.name for entry in kernel_registry.list(op)]


def canonical(**options):
    spec = kernel_registry.spec(OP)
    return spec.canonicalize(spec.complete({"query": Q, "key": K, "value": V} | options))


def run(**options):
    """The op through an executor without memory of earlier programs."""
    return Executor()(FlashAttention(), Q, K, V, **options)


@pytest.mark.parametrize(
    ("platform", "backend"), [(Platform.XLA, Backend.CPU), ("xla", "cpu"), ("XLA", Backend.CPU)]
)
def test_register_is_a_decorator_and_takes_enums_or_strings(platform, backend):
    @kernel_registry.register(OP, platform, backend)
    def mine(query, key, value, causal=False, softmax_scale=None):
        return query

    assert mine(1, 2, 3) == 1  # the function is handed back unchanged
    (entry,) = [e for e in kernel_registry.list(OP) if e.backend == "cpu"]
    assert (entry.op, entry.platform, entry.backend) == (OP, Platform.XLA, Backend.CPU)
    assert entry.priority == 0


@pytest.mark.parametrize(
    ("platform", "backend", "word"), [("mlx", "any", "triton"), ("xla", "npu", "tpu")]
)
def test_unknown_platform_or_backend_lists_what_there_is(platform, backend, word):
    with pytest.raises(ValueError, match=word):
        kernel_registry.register(OP, platform, backend)(constant(1))


def test_the_same_place_twice_is_refused_unless_replaced():
    kernel_registry.register(OP, "xla", "cpu", priority=2)(constant(1))
    with pytest.raises(ValueError, match=r"xla/cpu@2.*replace=True"):
        kernel_registry.register(OP, "xla", "cpu", priority=2)(constant(2))
    assert_array_equal(run(), jnp.full_like(Q, 1))
    kernel_registry.register(OP, "xla", "cpu", priority=2, replace=True)(constant(2))
    assert_array_equal(run(), jnp.full_like(Q, 2))
    assert names().count("xla/cpu@2") == 1


def test_one_place_holds_several_priorities_best_first():
    for priority in (1, 3, -1):
        kernel_registry.register(OP, "xla", "any", priority=priority)(constant(priority))
    ours = [name for name in names() if name.startswith("xla/")]
    assert ours == ["xla/any@3", "xla/any@1", "xla/any", "xla/any@-1"]
    priorities = [e.priority for e in kernel_registry.list(OP)]
    assert priorities == sorted(priorities, reverse=True)
    assert_array_equal(run(), jnp.full_like(Q, 3))


def test_a_kernel_for_another_device_refuses_here():
    kernel_registry.register(OP, "cudnn", "gpu", priority=9)(constant(1))
    assert kernel_registry.why_not(OP, canonical())["cudnn/gpu@9"] == (
        "needs a GPU; this call is for cpu"
    )
    choice = Executor().choose(FlashAttention(), Q, K, V)
    assert choice.implementation.name == "xla/any"
    assert "cudnn/gpu@9" in choice.refused
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        run(platform="cudnn")


def test_unregister_takes_a_kernel_out():
    before = names()
    kernel_registry.register(OP, "xla", "cpu", priority=4)(constant(1))
    (entry,) = [e for e in kernel_registry.list(OP) if e.priority == 4]
    kernel_registry.unregister(entry)
    assert names() == before
    assert not (run() == 1).all()


def test_calls_after_a_change_of_the_registry_see_it():
    executor = Executor()

    def answer():
        return executor(FlashAttention(), Q, K, V)

    ours = answer()
    kernel_registry.register(OP, "xla", "cpu", priority=4)(constant(7))
    assert_array_equal(answer(), jnp.full_like(Q, 7))
    (entry,) = [e for e in kernel_registry.list(OP) if e.priority == 4]
    kernel_registry.unregister(entry)
    assert_array_equal(answer(), ours)


def test_get_gives_a_function_with_the_ops_own_arguments():
    found = kernel_registry.get(OP, platform=Platform.XLA)
    parameters = inspect.signature(found).parameters
    public = inspect.signature(flash_attention).parameters
    assert list(parameters)[:3] == ["query", "key", "value"]
    assert [n for n in public if n in parameters] == list(parameters)
    expected = flash_attention(Q, K, V, causal=True, sliding_window=2)
    for actual in (
        found(query=Q, key=K, value=V, causal=True, sliding_window=2),
        found(Q, K, V, causal=True, sliding_window=2),
        jax.jit(lambda q: found(q, K, V, causal=True, sliding_window=2))(Q),
    ):
        assert_allclose(actual, expected, rtol=1e-6)


def test_get_takes_the_best_kernel_for_this_hardware():
    kernel_registry.register(OP, "triton", "gpu", priority=9)(constant(1))
    kernel_registry.register(OP, "xla", "cpu", priority=2)(constant(2))
    assert kernel_registry.get(OP).entry.name == "xla/cpu@2"
    assert kernel_registry.get(OP, backend="any").entry.name == "xla/any"
    assert kernel_registry.get(OP, "triton", "gpu").entry.name == "triton/gpu@9"


def test_get_differentiates():
    found = kernel_registry.get(OP, "xla", "any")
    dense = jax.nn.dot_product_attention
    grad, expected = (
        jax.jit(jax.grad(lambda q, f=f: jnp.sin(f(q, K, V)).sum()))(Q) for f in (found, dense)
    )
    assert_allclose(grad, expected, rtol=1e-4, atol=1e-5)


def test_get_of_what_is_not_there_says_why():
    with pytest.raises(UnsupportedError, match=r"`flash_attention`.*cudnn"):
        kernel_registry.get(OP, Platform.CUDNN)
    with pytest.raises(ValueError, match=r"no op 'flush_attention'.*flash_attention"):
        kernel_registry.get("flush_attention")
    with pytest.raises(TypeError, match=r"`flash_attention`.*causual"):
        kernel_registry.get(OP)(Q, K, V, causual=True)


def test_list_names_every_entry():
    found = kernel_registry.list()
    assert {entry.op for entry in found} >= {OP, "attention"}
    assert [e.name for e in found if e.op == OP] == names()
    for entry in found:
        assert isinstance(entry.platform, Platform)
        assert isinstance(entry.backend, Backend)
        assert isinstance(entry.priority, int)
        assert entry.name.startswith(f"{entry.platform}/{entry.backend}")


def test_list_hands_out_a_copy():
    kernel_registry.list(OP).clear()
    assert names()


def test_why_not_answers_for_each_entry():
    kernel_registry.register(
        OP, "xla", "cpu", requires=lambda args: "needs an even length", priority=1
    )(lambda args, cfg: ((args.query,), ()))
    there = [e for e in kernel_registry.list(OP) if e.backend in ("gpu", "tpu")]
    answers = kernel_registry.why_not(OP, canonical(causal=True))
    assert answers.pop("xla/cpu@1") == "needs an even length"
    assert answers.pop("xla/any") is None
    assert answers.keys() == {e.name for e in there}
    for entry in there:
        answer = answers[entry.name]
        assert answer.startswith(f"needs a {entry.backend.upper()}; this call is for cpu")
        assert ("EJKERNEL_INTERPRET=1" in answer) == (entry.platform != "cudnn")  # the way out


def test_signatures_agree():
    assert kernel_registry.validate_signatures() == []
    kernel_registry.register(OP, "xla", "cpu", honours={"cuasal"})(lambda args, cfg: None)
    (problem,) = kernel_registry.validate_signatures()
    assert "xla/cpu" in problem
    assert "cuasal" in problem


def test_unknown_option_of_register_is_an_error():
    with pytest.raises(TypeError, match="honors"):
        kernel_registry.register(OP, "xla", "cpu", honors={"causal"})(lambda args, cfg: None)


# Keyword functions from outside


def outside(query, key, value, causal=False, softmax_scale=None):
    """A kernel that knows causal and scale alone; its output tells what it was given."""
    return jnp.full_like(query, 10.0 * causal + softmax_scale)


def test_outside_function_receives_what_the_call_sets():
    kernel_registry.register(OP, "xla", "cpu", priority=1)(outside)
    assert_allclose(run(), jnp.full_like(Q, 0.5))  # the scale the op computed: 4 ** -0.5
    assert_allclose(run(causal=True, softmax_scale=0.25), jnp.full_like(Q, 10.25))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("sliding_window", 3),
        ("logits_soft_cap", 4.0),
        ("return_lse", True),
        ("attention_mask", host.ones((1, 1, 6, 6), bool)),
        ("bias", host.ones((1, 1, 1, 6))),
        ("softmax_aux", host.ones((1, 1))),
        ("q_segment_ids", host.zeros((1, 6), jnp.int32)),
        ("cum_seqlens_q", host.asarray([0, 3, 6])),
        ("alibi_slopes", host.ones(2)),
        ("deterministic", True),
    ],
)
def test_outside_function_is_refused_what_it_does_not_take(option, value):
    kernel_registry.register(OP, "xla", "cpu", priority=1)(outside)
    value = host.to_jax(value)
    args = canonical(causal=True, **{option: value})
    assert option in kernel_registry.why_not(OP, args)["xla/cpu@1"]
    with pytest.raises(UnsupportedError, match=option):
        kernel_registry.get(OP, "xla", "cpu")(Q, K, V, causal=True, **{option: value})
    choice = Executor().choose(FlashAttention(), Q, K, V, causal=True, **{option: value})
    assert choice.implementation.name == "xla/any"


def test_outside_function_without_a_scale_is_refused_a_scale():
    kernel_registry.register(OP, "xla", "cpu", priority=1)(constant(1))
    assert kernel_registry.why_not(OP, canonical())["xla/cpu@1"] is None
    with pytest.raises(UnsupportedError, match="softmax_scale"):
        kernel_registry.get(OP, "xla", "cpu")(Q, K, V, softmax_scale=0.3)


def test_an_option_at_its_default_is_not_set():
    kernel_registry.register(OP, "xla", "cpu", priority=1)(outside)
    assert_allclose(run(sliding_window=None, dropout_prob=0.0), jnp.full_like(Q, 0.5))
    assert_allclose(run(sliding_window=(-1, -1), dropout_seed=3), jnp.full_like(Q, 0.5))


def test_required_arguments_are_matched_by_position():
    @kernel_registry.register(OP, "xla", "cpu", priority=1)
    def other_names(q, k, v):
        return q + 2.0 * k + 3.0 * v

    assert_allclose(run(), Q + 2.0 * K + 3.0 * V, rtol=1e-6)


def bad_default(query, key, value, causal=True):
    return query


def unknown_option(query, key, value, window=None):
    return query


def too_few(query, key):
    return query


def requires_an_option(query, key, value, bias):
    return query


def any_keyword(query, key, value, **options):
    return query


def any_position(*arrays):
    return arrays[0]


@pytest.mark.parametrize(
    ("function", "difference"),
    [
        (bad_default, "`causal` defaults to True, in the op to False"),
        (unknown_option, "`window`"),
        (too_few, r"requires \['query', 'key'\]"),
        (requires_an_option, "bias"),
        (any_keyword, "options"),
        (any_position, "arrays"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_with_the_difference(function, difference):
    before = names()
    with pytest.raises(TypeError, match=difference) as caught:
        kernel_registry.register(OP, "xla", "cpu")(function)
    assert function.__name__ in str(caught.value)
    assert names() == before


def test_outside_function_under_transformations():
    @kernel_registry.register(OP, "xla", "cpu", priority=1)
    def plain(query, key, value, softmax_scale=None):
        logits = jnp.einsum("bthd,bshd->bhts", query, key) * softmax_scale
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), value)

    found = kernel_registry.get(OP, "xla", "cpu")
    for transform in (
        lambda f: jax.jit(f)(Q),
        lambda f: jax.grad(lambda q: f(q).sum())(Q),
        lambda f: jax.vmap(f)(jnp.stack([Q, 2 * Q])),
    ):
        actual = transform(lambda q: found(q, K, V, softmax_scale=0.3))
        expected = transform(lambda q: plain(q, K, V, softmax_scale=0.3))
        assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


# Ops from outside


def scaled_sum(
    x: Float[Array, "n d"], y: Float[Array, "n d"], w: Float[Array, "d"] | None = None, times=2.0
):
    total = times * (x + y)
    return total if w is None else total * w


def test_a_new_op_is_made_from_its_function():
    kernel_registry.register("scaled_sum", "xla", "any")(scaled_sum)
    assert "scaled_sum" in kernel_registry.ops()
    assert names("scaled_sum") == ["xla/any"]
    assert kernel_registry.validate_signatures() == []
    function = kernel_registry.get("scaled_sum")
    x, y = jnp.ones((3, 2)), jnp.full((3, 2), 2.0)
    assert_allclose(function(x, y), jnp.full((3, 2), 6.0))
    assert_allclose(function(x, y, times=3.0), jnp.full((3, 2), 9.0))
    assert_allclose(function(x=x, y=y, w=jnp.asarray([1.0, 2.0])), [[6.0, 12.0]] * 3)
    assert_allclose(jax.grad(lambda x: function(x, y).sum())(x), jnp.full((3, 2), 2.0))
    assert_allclose(jax.jit(jax.vmap(lambda x: function(x, y)))(x[None])[0], jnp.full((3, 2), 6.0))
    assert "w" in inspect.signature(function).parameters


def test_a_new_op_checks_its_annotations():
    kernel_registry.register("scaled_sum", "xla", "any")(scaled_sum)
    function = kernel_registry.get("scaled_sum")
    with pytest.raises(ValueError, match=r"`scaled_sum`: `y`.*d=2"):
        function(jnp.ones((3, 2)), jnp.ones((3, 4)))
    with pytest.raises(TypeError, match="`scaled_sum`: `x`"):
        function(1.0, jnp.ones((3, 4)))
    with pytest.raises(TypeError, match=r"`scaled_sum`.*tims"):
        function(jnp.ones((3, 2)), jnp.ones((3, 2)), tims=2.0)


def test_a_new_op_may_have_several_kernels_and_outputs():
    @kernel_registry.register("halves", "xla", "any")
    def halves(x, at=2, reverse=False):
        return (x[at:], x[:at]) if reverse else (x[:at], x[at:])

    @kernel_registry.register("halves", "xla", "cpu", priority=1)
    def quick(x, at=2):
        return x[:at] + 100, x[at:] + 100

    x = jnp.arange(5.0)
    first, second = kernel_registry.get("halves")(x)
    assert_array_equal(first, [100, 101])
    assert_array_equal(second, [102, 103, 104])
    with pytest.raises(UnsupportedError, match="reverse"):
        kernel_registry.get("halves")(x, reverse=True)
    spec = kernel_registry.spec("halves")
    args = spec.canonicalize(spec.complete({"x": x, "reverse": True}))
    assert kernel_registry.why_not("halves", args) == {
        "xla/cpu@1": "does not honour ['reverse']",
        "xla/any": None,
    }
    assert_array_equal(spec.reference_fn()(args)[0], [2, 3, 4])


def test_a_refused_new_op_leaves_no_trace():
    def odd_default(x, w: Float[Array, "n"] = 3.0):  # an array argument can only default to None
        return x * w

    before = list(kernel_registry.ops())
    with pytest.raises(TypeError, match="odd_default"):
        kernel_registry.register("odd", "xla", "any")(odd_default)
    assert list(kernel_registry.ops()) == before


def test_a_packaged_op_cannot_be_defined_again():
    with pytest.raises(ValueError, match="exists already"):
        kernel_registry.define(kernel_registry.spec(OP))


def test_public_kernels_name_registered_ops():
    for kernel in (FlashAttention, Attention):
        assert kernel().name == kernel.op
        assert kernel_registry.list(kernel.op)


def test_a_kernel_of_an_op_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no op 'flash_atention'"):
        kernel_registry.register("flash_atention", "xla", "any")(lambda args, cfg: None)


def test_one_platforms_kernel_is_found_where_it_is_interpreted():
    pytest.importorskip("triton", reason="Triton is not installed")
    with _settings.override(interpret=False), pytest.raises(UnsupportedError, match="needs GPU"):
        kernel_registry.get(OP, "triton")
    with _settings.override(interpret=True):
        assert kernel_registry.get(OP, "triton").entry.name == "triton/gpu"
