"""A user's own `Kernel`: which method runs, with which config, and its derivatives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from ejkernel.errors import SelectionError, UnsupportedError
from ejkernel.ops import ConfigSelectorChain, Executor, Invocation, Kernel


@pytest.fixture(scope="module", autouse=True)
def arrays():
    # JAX arrays cannot be made while tests are collected: see conftest.py
    global KEYS, A, B
    KEYS = jax.random.split(jax.random.key(5), 4)
    A = jax.random.normal(KEYS[0], (3, 4))
    B = jax.random.normal(KEYS[1], (4, 2))


@dataclasses.dataclass(frozen=True)
class Config:
    factor: int = 1


class Product(Kernel[Config, jax.Array]):
    """`scale * a @ b`, times a factor that shows which config ran; JAX differentiates."""

    def __init__(self):
        super().__init__(name="product")

    def run(self, a, b, *, cfg, scale=1.0):
        return scale * cfg.factor * (a @ b)

    def heuristic_cfg(self, inv):
        return Config()


class OwnGradient(Product):
    """Gradients three times too large, so that a test sees where they come from."""

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        a, b = primals
        scale = 3.0 * cfg.factor * kwargs.get("scale", 1.0)
        return scale * cotangents[0] @ b.T, scale * a.T @ cotangents[0]


@pytest.fixture(params=["direct", "executor"])
def call(request):
    """A kernel called by itself, or by an executor of its own."""
    if request.param == "direct":
        return lambda kernel, *args, **kwargs: kernel(*args, **kwargs)
    return Executor()


def test_run_gives_its_result(call):
    assert_allclose(call(Product(), A, B), A @ B, rtol=1e-6)


def test_keyword_arguments_reach_run(call):
    assert_allclose(call(Product(), A, B, scale=2.5), 2.5 * (A @ B), rtol=1e-6)


def test_array_keyword_arguments_reach_run(call):
    scale = jnp.float32(1.5)
    assert_allclose(call(Product(), A, B, scale=scale), 1.5 * (A @ B), rtol=1e-6)


def test_cfg_reaches_run(call):
    assert_allclose(call(Product(), A, B, cfg=Config(7)), 7 * (A @ B), rtol=1e-6)
    assert_allclose(call(Product(), A, B), A @ B, rtol=1e-6)


def test_unknown_keyword_is_an_error(call):
    with pytest.raises(TypeError, match="sclae"):
        call(Product(), A, B, sclae=2.0)


def test_most_specific_method_runs_first(call):
    class All(Kernel):
        def run_cpu(self, x, *, cfg):
            return x + 1

        def run_xla(self, x, *, cfg):
            return x + 2

        def run(self, x, *, cfg):
            return x + 3

        def heuristic_cfg(self, inv):
            return None

    class WithoutCpu(Kernel):
        run_xla, run, heuristic_cfg = All.run_xla, All.run, All.heuristic_cfg

    class OnlyRun(Kernel):
        run, heuristic_cfg = All.run, All.heuristic_cfg

    zero = jnp.zeros(2)
    assert_array_equal(call(All(), zero), zero + 1)
    assert_array_equal(call(WithoutCpu(), zero), zero + 2)
    assert_array_equal(call(OnlyRun(), zero), zero + 3)


def test_methods_of_other_devices_do_not_run_here(call):
    class Elsewhere(Kernel):
        def run_triton(self, x, *, cfg):
            raise AssertionError("runs on a GPU")

        run_gpu = run_pallas = run_tpu = run_cuda = run_cudnn = run_triton

        def heuristic_cfg(self, inv):
            return None

    class WithFallback(Elsewhere):
        def run(self, x, *, cfg):
            return x + 3

    with pytest.raises(UnsupportedError, match="Elsewhere"):
        call(Elsewhere(), jnp.zeros(2))
    assert_array_equal(call(WithFallback(), jnp.zeros(2)), jnp.full(2, 3.0))


def test_heuristic_sees_the_arguments_of_the_call(call):
    seen = []

    class Looks(Product):
        def heuristic_cfg(self, inv):
            seen.append(inv)
            return Config(inv.args[0].shape[0])

    assert_allclose(call(Looks(), A, B, scale=2.0), 2.0 * 3 * (A @ B), rtol=1e-6)
    (inv, *_) = seen
    assert isinstance(inv, Invocation)
    assert [x.shape for x in inv.abstract_args] == [(3, 4), (4, 2)]
    assert inv.kwargs == {"scale": 2.0}
    assert inv.device_fingerprint


def test_invocation_made_by_hand_knows_its_arrays():
    inv = Invocation(kernel=Product(), args=(A, 2, B), kwargs={"scale": 2.0}, metadata={"layer": 3})
    assert inv.abstract_args == (
        jax.ShapeDtypeStruct((3, 4), jnp.float32),
        2,
        jax.ShapeDtypeStruct((4, 2), jnp.float32),
    )
    assert inv.metadata == {"layer": 3}
    assert inv.key != Invocation(kernel=Product(), args=(A, 3, B), kwargs={"scale": 2.0}).key


def test_config_space_has_another_name():
    class Space(Product):
        def config_space(self, inv):
            return [Config(1), Config(2)]

    inv = Invocation(kernel=Space(), args=(A, B))
    assert Space().candidate_cfgs(inv) == [Config(1), Config(2)]
    assert Product().candidate_cfgs(inv) == ()


def test_name_and_op_id_are_one_thing():
    class Named(Kernel):
        pass

    assert Named("x").op_id == Named(op_id="x").name == "x"
    assert Named().name == "Named"
    with pytest.raises(ValueError, match=r"'x'.*'y'"):
        Named("x", op_id="y")


def test_kernel_without_run_or_heuristic_is_an_error():
    class Nothing(Kernel):
        pass

    class NoConfig(Nothing):
        def run(self, x, *, cfg):
            return x

    with pytest.raises(UnsupportedError, match="Nothing"):
        Nothing()(A)
    with pytest.raises(SelectionError, match="NoConfig"):
        NoConfig()(A)
    assert_array_equal(NoConfig()(A, cfg=Config()), A)


class Pair(Kernel):
    """A pytree in, a pytree out; gradients doubled."""

    def run(self, x, *, cfg):
        return {"sum": x["left"] + x["right"], "rest": (x["left"] * 2.0,)}

    def heuristic_cfg(self, inv):
        return None


def test_outputs_may_be_a_pytree(call):
    out = call(Pair(), {"left": A, "right": A + 1})
    assert jax.tree.structure(out) == jax.tree.structure({"sum": 0, "rest": (0,)})
    assert_allclose(out["sum"], 2 * A + 1, rtol=1e-6)
    assert_allclose(out["rest"][0], 2 * A, rtol=1e-6)


def test_own_gradient_of_pytree_inputs_and_outputs(call):
    class Doubled(Pair):
        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            rest, total = cotangents  # leaves in the order of the output's pytree
            return ({"left": 2 * (total + 2.0 * rest), "right": 2 * total},)

    def loss(x):
        out = call(Doubled(), x)
        return out["sum"].sum() + 5.0 * out["rest"][0].sum()

    grads = jax.grad(loss)({"left": A, "right": A + 1})
    assert_allclose(grads["left"], jnp.full_like(A, 22.0), rtol=1e-6)
    assert_allclose(grads["right"], jnp.full_like(A, 2.0), rtol=1e-6)


def gradient(function):
    return jax.grad(lambda a, b: jnp.sin(function(a, b)).sum(), argnums=(0, 1))


def test_jax_differentiates_a_kernel_without_custom_vjp(call):
    actual = gradient(lambda a, b: call(Product(), a, b, scale=2.0))(A, B)
    expected = gradient(lambda a, b: 2.0 * a @ b)(A, B)
    jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=1e-5, atol=1e-6), actual, expected)


def test_custom_vjp_is_what_grad_uses(call):
    actual = gradient(lambda a, b: call(OwnGradient(), a, b, scale=2.0))(A, B)
    expected = gradient(lambda a, b: 2.0 * a @ b)(A, B)
    jax.tree.map(lambda x, y: assert_allclose(x, 3 * y, rtol=1e-5, atol=1e-6), actual, expected)


def test_cfg_reaches_custom_vjp(call):
    actual = jax.grad(lambda a: call(OwnGradient(), a, B, cfg=Config(5)).sum())(A)
    expected = jax.grad(lambda a: (a @ B).sum())(A)
    assert_allclose(actual, 15 * expected, rtol=1e-5)


def test_custom_vjp_under_jit_and_vmap(call):
    batch = jax.random.normal(KEYS[2], (2, *A.shape))
    own = gradient(lambda a, b: call(OwnGradient(), a, b))
    plain = gradient(lambda a, b: a @ b)
    for transform in (jax.jit, lambda f: jax.vmap(f, in_axes=(0, None))):
        given = A if transform is jax.jit else batch
        actual, expected = transform(own)(given, B), transform(plain)(given, B)
        jax.tree.map(lambda x, y: assert_allclose(x, 3 * y, rtol=1e-5, atol=1e-5), actual, expected)


def test_forward_mode_and_second_order_follow_the_formula(call):
    own = lambda a: call(OwnGradient(), a, B)
    _, tangent = jax.jvp(own, (A,), (A + 1,))
    assert_allclose(tangent, (A + 1) @ B, rtol=1e-5, atol=1e-6)
    hessian = jax.hessian(lambda a: (own(a) ** 2).sum())(A)
    assert hessian.shape == (*A.shape, *A.shape)
    assert np.isfinite(hessian).all()


def test_forward_mode_of_a_kernel_that_only_defines_run_xla(call):
    class OnlyXla(Kernel):
        def run_xla(self, a, b, *, cfg):
            return a @ b

        def heuristic_cfg(self, inv):
            return None

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            a, b = primals
            return cotangents[0] @ b.T, a.T @ cotangents[0]

    _, tangent = jax.jvp(lambda a: call(OnlyXla(), a, B), (A,), (A + 1,))
    assert_allclose(tangent, (A + 1) @ B, rtol=1e-5, atol=1e-6)


def test_an_option_between_arrays_does_not_shift_their_gradients(call):
    class Power(Kernel):
        def run(self, a, times, b, *, cfg):
            return times * (a @ b)

        def heuristic_cfg(self, inv):
            return None

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            a, times, b = primals
            return times * cotangents[0] @ b.T, None, times * a.T @ cotangents[0]

    actual = gradient(lambda a, b: call(Power(), a, 4, b))(A, B)
    expected = gradient(lambda a, b: 4 * (a @ b))(A, B)
    jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=1e-5, atol=1e-5), actual, expected)


def test_an_integer_output_has_no_gradient(call):
    class WithCount(Kernel):
        def run(self, x, *, cfg):
            return 2.0 * x, jnp.arange(x.shape[0])

        def heuristic_cfg(self, inv):
            return None

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return (3.0 * cotangents[0],)

    grad = jax.grad(lambda x: call(WithCount(), x)[0].sum())(A)
    assert_allclose(grad, jnp.full_like(A, 3.0))


def test_an_array_keyword_has_no_gradient_of_its_own(call):
    with pytest.raises(UnsupportedError, match="stop_gradient"):
        jax.grad(lambda s: call(OwnGradient(), A, B, scale=s).sum())(jnp.float32(2.0))
    grad = jax.grad(lambda a: call(OwnGradient(), a, B, scale=jnp.float32(2.0)).sum())(A)
    assert_allclose(grad, 6.0 * jnp.ones((3, 2)) @ B.T, rtol=1e-5)


def test_jit_and_vmap(call):
    batch = jax.random.normal(KEYS[3], (5, *A.shape))
    assert_allclose(jax.jit(lambda a: call(Product(), a, B))(A), A @ B, rtol=1e-5)
    mapped = jax.vmap(lambda a: call(Product(), a, B, scale=2.0))(batch)
    assert_allclose(mapped, 2 * (batch @ B), rtol=1e-5, atol=1e-6)


# Mistakes in a user's kernel


def product_with(grads):
    class Mistaken(Product):
        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return grads(cotangents[0])

    return Mistaken()


@pytest.mark.parametrize(
    ("grads", "told"),
    [
        (lambda c: c, r"a tuple of gradients of `a`, `b`.*; got an array of shape \(3, 2\)"),
        (lambda c: (A,), "a tuple of gradients of `a`, `b`.*; got 1 of them"),
        (lambda c: {"a": A, "b": B}, "a tuple of gradients of `a`, `b`.*; got a dict"),
        (lambda c: (A, None), "a gradient for `b`, which is differentiated; got None.*zeros"),
        (lambda c: (A.T, B), r"for `a` a gradient of shape \(3, 4\); got .*\(4, 3\)"),
        (lambda c: (A, (B,)), r"for `b` a gradient of shape \(4, 2\); got a tuple"),
        (lambda c: (A, "b"), r"for `b` a gradient of shape \(4, 2\); got a str"),
    ],
)
def test_a_mistake_of_custom_vjp_names_kernel_and_argument(grads, told):
    kernel = product_with(grads)
    run = lambda a, b: Executor()(kernel, a, b).sum()
    with pytest.raises(ValueError, match=f"`product`: `custom_vjp` must return {told}"):
        jax.jit(jax.grad(run, argnums=(0, 1))).lower(A, B)


def test_custom_vjp_may_leave_out_what_nobody_differentiates():
    kernel = product_with(lambda c: (c @ B.T, None))
    grad = jax.grad(lambda a: Executor()(kernel, a, B).sum())(A)
    assert_allclose(grad, jnp.ones((3, 2)) @ B.T, rtol=1e-6)


def test_a_part_of_an_argument_is_named_by_the_argument():
    class OfPairs(Kernel):
        def run(self, pair, *, cfg):
            return pair["x"] * pair["y"]

        def heuristic_cfg(self, inv):
            return Config()

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return ({"x": cotangents[0]},)

    run = lambda pair: Executor()(OfPairs(name="of pairs"), pair).sum()
    with pytest.raises(ValueError, match=r"`of pairs`: .* for `pair` a gradient of its structure"):
        jax.jit(jax.grad(run)).lower({"x": A, "y": A})


def test_the_parameters_of_custom_vjp_are_told():
    class TwoOnly(Product):
        def custom_vjp(self, primals, cotangents):
            return cotangents

    told = r"`product`: `custom_vjp` must take \(primals, cfg, kwargs, cotangents\); it takes \(pr"
    with pytest.raises(TypeError, match=told):
        jax.jit(jax.grad(lambda a: Executor()(TwoOnly(), a, B).sum())).lower(A)


def index_error(inv):
    return [Config()][1]


@pytest.mark.parametrize("method", ["config_space", "candidate_cfgs", "heuristic_cfg"])
def test_a_method_that_raises_is_named_with_its_kernel(method):
    kernel = type("Raises", (Product,), {method: lambda self, inv: index_error(inv)})()
    told = r"`product`: `\w+` raised IndexError: list index.*`Raises\.\w+`, or give .*`cfg=`"
    with pytest.raises(RuntimeError, match=told) as caught:
        Executor(ConfigSelectorChain(autotune=True)).choose(kernel, A, B)
    assert isinstance(caught.value.__cause__, IndexError)
    choice = Executor(ConfigSelectorChain(autotune=True)).choose(kernel, A, B, cfg=Config(2))
    assert choice.cfg == Config(2)


def test_a_config_space_that_is_no_list_is_told():
    class Nothing(Product):
        def config_space(self, inv):
            return None

    with pytest.raises(RuntimeError, match=r"`product`: `config_space` raised.*returned None"):
        Executor(ConfigSelectorChain(autotune=True)).choose(Nothing(), A, B)
