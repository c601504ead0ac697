"""`mean_pooling`: edges, errors, values that must not matter, and transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel import _settings
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._shared import pooled_rows
from ejkernel.kernels._xla.mean_pooling import fwd
from ejkernel.modules.operations.mean_pooling import mean_pooling
from tests import host

SPEC = kernel_registry.spec("mean_pooling")
CUTS = host.asarray([0, 3, 3, 8], jnp.int32)  # of 11 tokens: the last three are outside


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def reference(inputs, **options):
    values = SPEC.complete({"inputs": inputs, **options})
    return SPEC.reference_fn()(SPEC.canonicalize(values))[0]


def loss(fn):
    def of(*xs):
        out = fn(*xs)
        return jnp.sum(jnp.sin(out) * jnp.arange(1, out.size + 1).reshape(out.shape))

    return of


def assert_close(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-6)


MASK = np.random.default_rng(4).random((1, 11)) < 0.5
OPTIONS = {
    "plain": {},
    "mask": {"mask": MASK},
    "chunks": {"chunk_size": 4},
    "mask_chunks": {"mask": MASK, "chunk_size": 3},
    "packed": {"cu_seqlens": CUTS},
    "packed_chunks": {"cu_seqlens": CUTS, "chunk_size": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_derivatives(name):
    x, direction = normal(1, (1, 11, 2, 3)), normal(2, (1, 11, 2, 3))
    options = host.to_jax(OPTIONS[name])
    ours = functools.partial(mean_pooling, **options)
    wanted = functools.partial(reference, **options)

    def everything(fn):
        # value, gradient, and the derivatives of both along a direction
        return jax.jvp(lambda x: (fn(x), jax.grad(loss(fn))(x)), (x,), (direction,))

    assert_close(ours(x), wanted(x))
    assert_close(
        jax.jit(everything, static_argnums=0)(ours), jax.jit(everything, static_argnums=0)(wanted)
    )


def test_shapes():
    x = normal(1, (1, 11, 3))
    assert mean_pooling(x).shape == (1, 3)
    assert mean_pooling(x, chunk_size=4).shape == (1, 3, 3)
    assert mean_pooling(x, cu_seqlens=jnp.asarray(CUTS)).shape == (3, 3)
    both = mean_pooling(x, cu_seqlens=jnp.asarray(CUTS), chunk_size=2)
    assert both.shape == (11 // 2 + 3, 3)
    # two chunks of three tokens, none, three of five, and zeros
    assert_close(both[1], x[0, 2])
    assert_close(both[4], x[0, 7])
    assert both[:5].any(axis=1).all()
    assert not both[5:].any()
    assert mean_pooling(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["mask", "mask_chunks", "packed", "packed_chunks"])
def test_nan_in_tokens_that_do_not_count_reaches_nothing(name):
    x, options = normal(1, (1, 11, 3)), host.to_jax(OPTIONS[name])
    inside = jnp.arange(11) < 8
    counted = options.get("mask", inside[None])
    spoiled = jnp.where(counted[..., None], x, jnp.nan)
    ours = functools.partial(mean_pooling, **options)
    assert_close(ours(spoiled), ours(x))
    gradient = jax.grad(loss(ours))(spoiled)
    assert_close(gradient, jax.grad(loss(ours))(x))
    assert not jnp.where(counted[..., None], 0, gradient).any()


def test_nan_stays_in_its_sequence():
    x = normal(1, (1, 11, 3)).at[0, 2].set(jnp.nan)
    out = mean_pooling(x, cu_seqlens=jnp.asarray(CUTS))
    assert jnp.isnan(out[0]).all()
    assert jnp.isfinite(out[1:]).all()


@pytest.mark.parametrize("chunk_size", [None, 2, 50])
def test_the_scan_of_other_devices_agrees_with_the_scatter(chunk_size):
    x = normal(1, (1, 11, 3))
    values = SPEC.complete({"inputs": x, "cu_seqlens": jnp.asarray(CUTS), "chunk_size": chunk_size})
    made = pooled_rows.make(SPEC.canonicalize(values))
    tokens = jnp.where(made.inside[:, None], x[0], 0)
    assert_close(jax.jit(fwd._scan)(tokens, made), fwd._scatter(tokens, made))


def test_traced_lengths_and_vmap():
    x = normal(1, (3, 1, 11, 2))
    cuts = jnp.asarray([[0, 3, 11], [0, 0, 5], [2, 2, 2]], jnp.int32)
    gradient = jax.value_and_grad(
        loss(lambda x, cuts: mean_pooling(x, cu_seqlens=cuts, chunk_size=3))
    )
    actual = jax.jit(jax.vmap(gradient))(x, cuts)
    for i in range(3):
        wanted = functools.partial(reference, cu_seqlens=cuts[i], chunk_size=3)
        expected = jax.jit(jax.value_and_grad(loss(wanted)))(x[i])
        assert_close(jax.tree.map(lambda a, i=i: a[i], actual), expected)


@pytest.mark.parametrize("chunk_size", [None, 16])
def test_many_sequences_need_no_table_of_tokens_and_sequences(chunk_size):
    x = jax.ShapeDtypeStruct((1, 65536, 8), jnp.float32)
    cuts = jax.ShapeDtypeStruct((1025,), jnp.int32)
    run = functools.partial(mean_pooling, chunk_size=chunk_size)
    grad = jax.grad(lambda x, cuts: jnp.sum(run(x, cu_seqlens=cuts) ** 2))
    for fn in (lambda x, cuts: run(x, cu_seqlens=cuts), grad):
        memory = jax.jit(fn).lower(x, cuts).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 2 * 4 * x.size  # a table would have 65536 * 1024


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0), (1, 0, 2, 3)])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_empty_axes(shape, chunk_size):
    x = normal(1, shape)
    out = mean_pooling(x, chunk_size=chunk_size)
    middle = () if chunk_size is None else (-(-shape[1] // 2),)
    assert out.shape == (shape[0], *middle, *shape[2:])
    assert not jnp.where(shape[1] == 0, out, 0).any()
    assert jax.grad(lambda x: mean_pooling(x, chunk_size=chunk_size).sum())(x).shape == shape


def test_no_sequences_and_no_tokens():
    x = normal(1, (1, 5, 3))
    none = jnp.zeros(1, jnp.int32)
    assert mean_pooling(x, cu_seqlens=none).shape == (0, 3)
    rows_left = mean_pooling(x, cu_seqlens=none, chunk_size=2)
    assert rows_left.shape == (2, 3)
    assert not rows_left.any()
    assert not jax.grad(lambda x: mean_pooling(x, cu_seqlens=none, chunk_size=2).sum())(x).any()
    empty = mean_pooling(x[:, :0], cu_seqlens=jnp.zeros(4, jnp.int32))
    assert empty.shape == (3, 3)
    assert not empty.any()


def test_an_integer_mask_counts_what_is_not_zero():
    x = normal(1, (2, 4, 3))
    mask = jnp.asarray([[2, 0, -1, 0], [0, 0, 0, 0]])
    assert_close(mean_pooling(x, mask), mean_pooling(x, mask != 0))
    assert not mean_pooling(x, mask)[1].any()


def test_batch_and_features_split_over_devices():
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    x = normal(1, (2, 5, 4))
    mask = jnp.asarray(np.random.default_rng(3).random((2, 5)) < 0.6)

    def ours(x):
        return mean_pooling(
            x,
            mask,
            chunk_size=2,
            mesh=mesh,
            in_specs=(PartitionSpec("x", None, "y"),),
            out_specs=PartitionSpec("x", None, "y"),
        )

    expected = jax.value_and_grad(loss(functools.partial(reference, mask=mask, chunk_size=2)))(x)
    assert_close(jax.jit(jax.value_and_grad(loss(ours)))(x), expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mask": host.ones((1, 11)), "cu_seqlens": CUTS}, ValueError, "cannot be given together"),
        ({"inputs": host.normal(1, (2, 11, 3)), "cu_seqlens": CUTS}, ValueError, "batch must be 1"),
        ({"cu_seqlens": host.zeros(0, jnp.int32)}, ValueError, "n \\+ 1"),
        ({"cu_seqlens": host.zeros(3)}, TypeError, "cu_seqlens"),
        ({"mask": host.ones((1, 10))}, ValueError, "mask"),
        ({"inputs": host.normal(1, (1, 11, 2, 3)), "mask": host.ones((1, 9))}, ValueError, "mask"),
        ({"inputs": host.normal(1, (11, 3))}, ValueError, "inputs"),
        ({"inputs": host.ones((1, 11, 3), jnp.int32)}, TypeError, "inputs"),
        ({"chunk_size": 0}, ValueError, ">= 1"),
        ({"chunk_size": 2.5}, TypeError, "chunk_size"),
        ({"platform": "cuda"}, UnsupportedError, "cuda"),
    ],
)
def test_errors(change, error, message):
    with pytest.raises(error, match=message):
        mean_pooling(**{"inputs": normal(1, (1, 11, 3))} | host.to_jax(change))


def test_debug_checks_lengths():
    x = normal(1, (1, 11, 3))
    with _settings.override(debug=True), pytest.raises(ValueError, match="must not decrease"):
        mean_pooling(x, cu_seqlens=jnp.asarray([0, 12]))
    assert not [p for p in kernel_registry.validate_signatures() if "mean_pooling" in p]
