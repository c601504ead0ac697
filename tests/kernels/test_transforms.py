"""Every transformation JAX has, on every entry: the same numbers as the oracle under it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import _settings
from ejkernel.kernels import kernel_registry
from ejkernel.modules import flash_attention
from tests.backend import BACKEND

OP = "flash_attention"
SPEC = kernel_registry.spec(OP)
# cuDNN has few options and no float32: test_cudnn.py
PLATFORMS = sorted({str(entry.platform) for entry in kernel_registry.list(OP)} - {"cudnn"})
ON_CPU = BACKEND == "cpu"
OPTIONS = {"causal": True, "sliding_window": 6, "logits_soft_cap": 4.0}

every = pytest.mark.parametrize("platform", PLATFORMS)
# the rule of derivatives is shared: where kernels are interpreted, `make test-all` has the rest
most = pytest.mark.parametrize(
    "platform",
    [
        pytest.param(name, marks=[] if name == "xla" or not ON_CPU else pytest.mark.slow)
        for name in PLATFORMS
    ],
)


def arrays(seed=0, batch=(2,), t=9, s=11, heads=4, groups=2, d=4):
    keys = jax.random.split(jax.random.key(seed), 4)
    return (
        jax.random.normal(keys[0], (*batch, t, heads, d)),
        jax.random.normal(keys[1], (*batch, s, groups, d)),
        jax.random.normal(keys[2], (*batch, s, groups, d)),
        jax.random.normal(keys[3], (1, heads, t, s)),
    )


def ours(q, k, v, bias, platform, **more):
    return flash_attention(q, k, v, bias=bias, platform=platform, **OPTIONS, **more)


def reference(q, k, v, bias, **more):
    values = {"query": q, "key": k, "value": v, "bias": bias, **OPTIONS, **more}
    outputs = SPEC.reference_fn()(SPEC.canonicalize(SPEC.complete(values)))
    return outputs[0] if len(outputs) == 1 else outputs


def loss(fn):
    def of(*xs):
        out = fn(*xs)
        return jnp.sum(jnp.sin(out) * jnp.arange(out.size).reshape(out.shape) / out.size)

    return of


def assert_close(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-6)


@pytest.fixture
def fn(platform):
    with _settings.override(interpret=True):
        yield functools.partial(ours, platform=platform)


@every
def test_eager_jit_and_grad_agree_with_the_oracle(fn):
    xs = arrays()
    expected = jax.value_and_grad(loss(reference), argnums=(0, 1, 2, 3))(*xs)
    gradient = jax.value_and_grad(loss(fn), argnums=(0, 1, 2, 3))
    assert_close(gradient(*xs), expected)
    assert_close(jax.jit(gradient)(*xs), expected)
    assert_close(jax.grad(jax.jit(loss(fn)), argnums=(0, 1, 2, 3))(*xs), expected[1])


@most
def test_only_what_is_perturbed_is_differentiated(fn):
    xs = arrays()
    text = str(jax.make_jaxpr(jax.grad(loss(fn), argnums=0))(*xs))
    full = str(jax.make_jaxpr(jax.grad(loss(fn), argnums=(0, 3)))(*xs))
    assert text.count("linear=") == full.count("linear=") == 1
    assert_close(jax.grad(loss(fn), argnums=0)(*xs), jax.grad(loss(reference), argnums=0)(*xs))


@every
def test_forward_mode(fn):
    xs, directions = arrays(), arrays(seed=1)
    assert_close(jax.jvp(fn, xs, directions), jax.jvp(reference, xs, directions))
    pushed = jax.jit(lambda xs, ds: jax.linearize(fn, *xs)[1](*ds))(xs, directions)
    assert_close(pushed, jax.jvp(reference, xs, directions)[1])


@most
@pytest.mark.parametrize("outer", [jax.jacfwd, pytest.param(jax.jacrev, marks=pytest.mark.slow)])
def test_second_order(fn, outer):
    xs = arrays(batch=(1,), t=3, s=4, heads=2, groups=1, d=2)
    actual = jax.jit(outer(jax.grad(loss(fn), argnums=(0, 1))))(*xs)
    assert_close(actual, outer(jax.grad(loss(reference), argnums=(0, 1)))(*xs))


@most
@pytest.mark.parametrize("axes", [(0, 0, 0, None), (0, None, 1, None), (None, None, 2, 0)])
def test_vmap(fn, axes):
    xs = [
        x if axis is None else jnp.stack([x, x[::-1] + 0.5, 2 * x], axis)
        for x, axis in zip(arrays(), axes, strict=True)
    ]
    expected = [
        jax.value_and_grad(loss(reference), argnums=(0, 1, 2, 3))(
            *(x if a is None else jnp.take(x, i, a) for x, a in zip(xs, axes, strict=True))
        )
        for i in range(3)
    ]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    gradient = jax.value_and_grad(loss(fn), argnums=(0, 1, 2, 3))
    assert_close(jax.jit(jax.vmap(gradient, in_axes=axes))(*xs), expected)


@every
def test_vmap_of_a_batched_seed_uses_the_unbatched_batch_index(fn):
    q, k, v, bias = arrays()
    seeds = jnp.asarray([3, 4], jnp.uint32)
    run = functools.partial(fn, q, k, v, bias, dropout_prob=0.4)
    batched = jax.vmap(lambda seed: run(dropout_seed=seed))(seeds)
    for row, seed in zip(batched, (3, 4), strict=True):
        assert_close(row, reference(q, k, v, bias, dropout_prob=0.4, dropout_seed=seed))


def _inner(eqn):
    """The jaxprs that an equation holds."""
    for value in eqn.params.values():
        for leaf in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(leaf, "jaxpr", leaf)
            if hasattr(inner, "eqns"):
                yield inner


def _runs(jaxpr):
    """How often an op runs forward; kernels have custom derivatives inside of their own."""
    total = 0
    for eqn in jaxpr.eqns:
        inside = [e.primitive.name for inner in _inner(eqn) for e in inner.eqns]
        if eqn.primitive.name == "custom_jvp_call" and "ejkernel_batched_alike" in inside:
            total += 1
        else:
            total += sum(map(_runs, _inner(eqn)))
    return total


@most
def test_checkpoint_saves_named_residuals_and_runs_forward_once(fn):
    xs = arrays()
    names = (f"{OP}.out", f"{OP}.lse")
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    saved = jax.grad(jax.checkpoint(loss(fn), policy=policy), argnums=(0, 1, 2))
    assert_close(saved(*xs), jax.grad(loss(reference), argnums=(0, 1, 2))(*xs))

    def forwards(gradient):
        return _runs(jax.make_jaxpr(gradient)(*xs).jaxpr)

    plain = forwards(jax.grad(loss(fn), argnums=(0, 1, 2)))
    everything = forwards(jax.grad(jax.checkpoint(loss(fn)), argnums=(0, 1, 2)))
    assert forwards(saved) == plain == 1
    assert everything == 2  # the count sees a forward that runs twice


@most
def test_eval_shape_and_abstract_arguments(fn):
    xs = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays()]
    out = jax.eval_shape(functools.partial(fn, return_lse=True), *xs)
    assert [(o.shape, o.dtype) for o in out] == [
        ((2, 9, 4, 4), jnp.bfloat16),
        ((2, 4, 9), jnp.float32),
    ]


@most
def test_traced_lengths_need_no_host(fn):
    q, k, v, _ = arrays(batch=(1,), t=11)
    cum = jnp.asarray([0, 4, 4, 9])
    run = jax.jit(lambda cum: fn(q, k, v, None, cum_seqlens_q=cum))
    assert_close(run(cum), reference(q, k, v, None, cum_seqlens_q=cum))
    assert_close(run(cum + 1), reference(q, k, v, None, cum_seqlens_q=cum + 1))


@every
def test_inside_jit_only_the_label_remains(fn, platform):
    if platform != "xla" and jax.default_backend() == "cpu":
        pytest.skip("interpreted through a callback")
    text = jax.jit(fn).lower(*arrays()).as_text(debug_info=True)
    assert "ejkernel.flash_attention" in text
    program = jax.jit(fn).lower(*arrays()).as_text()
    assert program.count("custom_call") == (platform == "triton")
    assert "callback" not in program
