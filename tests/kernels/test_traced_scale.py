"""`softmax_scale` as an array: data of the call, with a gradient, wherever it is an option."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import _settings, modules
from ejkernel.errors import EjkernelWarning, UnsupportedError
from ejkernel.kernels import _oracle, _spec, kernel_registry
from ejkernel.modules import FlashAttention, flash_attention, scaled_dot_product_attention
from ejkernel.ops import Executor
from tests.kernels import harness

OPS = [
    op
    for op in kernel_registry.ops()
    if "softmax_scale" in {f.name for f in _spec.public_fields(kernel_registry.spec(op).args)}
]
TRAINED = [op for op in OPS if kernel_registry.spec(op).differentiable]
SCALE = 0.37


def call(op, values, scale):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EjkernelWarning)  # a cache that is copied, a seed
        return jax.tree.leaves(getattr(modules, op)(**values | {"softmax_scale": scale}))


def values_of(op, case, dtype="float32", seed=11):
    return harness.find_case(op, case).values(jnp.dtype(dtype), jax.random.key(seed))


def richest(op):
    """The named case that has most branches."""
    names = {case.name for case in kernel_registry.spec(op).cases()}
    return next(n for n in ("segments_window_bias", "cover00", "plain") if n in names)


@pytest.mark.parametrize("op", [op for op in OPS if op not in TRAINED])
def test_an_array_gives_the_numbers_of_a_constant(op):
    values = values_of(op, "plain")
    for a, e in zip(call(op, values, jnp.asarray(SCALE)), call(op, values, SCALE), strict=True):
        np.testing.assert_array_equal(a, e)


@functools.cache
def problem(op, dtype, seed=11):
    spec = kernel_registry.spec(op)
    values = values_of(op, richest(op), dtype, seed) | {"softmax_scale": jnp.asarray(SCALE)}
    args = spec.canonicalize(spec.unpack(spec.complete(values)))
    return harness.solve(spec, args, ("softmax_scale",))


def gradients():
    """Ops that share their kernels with others, and halves of most, are for `make test-all`."""
    for op in TRAINED:
        for dtype in ("float32", "bfloat16"):
            shared = op in ("apply_native_sparse_attention", "gla", "lightning_attention")
            late = shared if dtype == "float32" else op != "flash_attention"
            yield pytest.param(op, dtype, marks=pytest.mark.slow if late else [])


@pytest.mark.parametrize(("op", "dtype"), list(gradients()))
def test_gradient_is_the_oracles(op, dtype):
    entry, made = harness.find_entry(op, "xla/any"), problem(op, dtype)
    assert made.wanted == ("softmax_scale",)
    cfg = harness.configs(entry, made.args, "testing")
    run = lambda made: harness.run_entry(entry, made, cfg, compiler_options=harness.QUICK)
    actual = run(made)
    if _oracle.mismatch(actual, made) is not None:
        more = [problem(op, dtype, seed) for seed in range(5)]
        actual, made = harness.pooled([(actual, made), *((run(x), x) for x in more)])
    harness.assert_close_to_oracle(actual, made)


@pytest.mark.parametrize(
    "op",
    [
        "flash_attention",
        *(pytest.param(o, marks=pytest.mark.slow) for o in ("gla", "mla_attention")),
    ],
)
def test_vmap_of_value_and_gradient_inside_jit(op):
    """One compiled program for all values; the scale 0 has a gradient too."""
    values = values_of(op, "plain")
    loss = lambda scale: sum(jnp.sin(x).sum() for x in call(op, values, scale))
    scales = jnp.asarray([0.0, -0.5, SCALE])
    found, slopes = jax.jit(jax.vmap(jax.value_and_grad(loss)))(scales)
    for scale, value, slope in zip(scales.tolist(), found, slopes, strict=True):
        np.testing.assert_allclose(value, loss(scale), rtol=2e-5, atol=1e-4)
        differences = (loss(scale + 1e-2) - loss(scale - 1e-2)) / 2e-2
        np.testing.assert_allclose(slope, differences, rtol=2e-2, atol=2e-2)


def test_second_derivative_and_forward_mode():
    values = values_of("flash_attention", "plain")
    spec = kernel_registry.spec("flash_attention")

    def of_oracle(scale):
        args = spec.canonicalize(spec.complete(values | {"softmax_scale": scale}))
        return jnp.sin(spec.reference_fn()(args)[0]).sum()

    loss = lambda scale: sum(jnp.sin(x).sum() for x in call("flash_attention", values, scale))
    scale = jnp.asarray(SCALE)
    for transform in (jax.jacfwd, lambda f: jax.grad(jax.grad(f))):
        actual, expected = (jax.jit(transform(f))(scale) for f in (loss, of_oracle))
        np.testing.assert_allclose(actual, expected, rtol=2e-4)


def test_padding_that_is_nan_does_not_reach_the_gradient():
    values = values_of("flash_attention", "plain")
    batch, t = values["query"].shape[:2]
    ids = jnp.where(jnp.arange(t) < t - 3, 0, -1)[None].repeat(batch, axis=0)
    real = (ids >= 0)[..., None, None]

    def slope(fill):
        padded = {n: jnp.where(real, values[n], fill) for n in ("query", "key", "value")}
        loss = lambda scale: flash_attention(**padded, q_segment_ids=ids, softmax_scale=scale).sum()
        return jax.grad(loss)(jnp.asarray(SCALE))

    np.testing.assert_array_equal(slope(jnp.nan), slope(0.0))


def test_what_compiles_constants_refuses():
    scale = jnp.asarray(SCALE)
    for op in OPS:
        spec = kernel_registry.spec(op)
        values = values_of(op, "plain", "bfloat16") | {"softmax_scale": scale}
        args = spec.canonicalize(spec.unpack(spec.complete(values)))
        for entry in kernel_registry.list(op):
            reason = entry.why_not(args)
            assert reason is None if entry.platform == "xla" else "`softmax_scale`" in reason
    values = values_of("flash_attention", "plain")
    refused = pytest.raises(
        UnsupportedError, match="`softmax_scale` into its kernels as a constant"
    )
    with _settings.override(interpret=True), refused:
        call("flash_attention", values | {"platform": "triton"}, scale)


def test_keys_tell_arrays_from_constants():
    values, executor = values_of("flash_attention", "plain"), Executor()
    seen = [
        executor.invocation(FlashAttention(), **values, softmax_scale=scale)
        for scale in (jnp.asarray(0.5), jnp.asarray(0.7), 0.5, np.float32(0.5), np.asarray(0.5))
    ]
    first, second, *constants = [inv.key for inv in seen]
    assert first == second
    assert len(set(constants)) == 1  # numbers of NumPy are constants too
    assert first != constants[0]
    again = FlashAttention().restore(seen[0].document)
    assert again.key == first
    assert again.call.arrays()["softmax_scale"].shape == ()


BAD = {
    "per_head": (lambda: jnp.ones(4), r"shape \(\); got float32\[4\]"),
    "integer": (lambda: jnp.asarray(2), r"floating array of shape \(\); got int32\[\]"),
    "numpy": (lambda: np.ones((1, 1), np.float32), r"got float32\[1, 1\]"),
    "text": (lambda: "0.5", "softmax_scale"),
}


@pytest.mark.parametrize("name", BAD)
def test_other_arrays_are_refused(name):
    make, words = BAD[name]
    with pytest.raises((TypeError, ValueError), match=words):
        flash_attention(**values_of("flash_attention", "plain"), softmax_scale=make())


def test_options_that_are_constants_stay_constants():
    values = values_of("flash_attention", "plain")
    with pytest.raises(TypeError, match="part of the compiled program"):
        flash_attention(**values | {"logits_soft_cap": jnp.asarray(5.0)})


def test_over_devices():
    """The scale is whole everywhere; its gradient is summed over devices."""
    values = {n: x for n, x in values_of("flash_attention", "plain").items() if hasattr(x, "shape")}
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    split = {"mesh": mesh, "in_specs": {"query": P(None, None, "x")}}
    split["out_specs"] = P(None, None, "x")

    def loss(scale, **more):
        return jnp.sin(flash_attention(**values, softmax_scale=scale, **more)).sum()

    scale = jnp.asarray(SCALE)
    expected = jax.value_and_grad(loss)(scale)
    actual = jax.value_and_grad(lambda scale: loss(scale, **split))(scale)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_scaled_dot_product_attention_like_jax():
    values = values_of("flash_attention", "plain")
    xs = [values[n] for n in ("query", "key", "value")]
    ours = lambda scale: scaled_dot_product_attention(*xs, scale=scale).sum()
    theirs = lambda scale: jax.nn.dot_product_attention(*xs, scale=scale).sum()
    found, expected = (jax.value_and_grad(f)(jnp.asarray(SCALE)) for f in (ours, theirs))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
