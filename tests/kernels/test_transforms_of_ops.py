"""Every op on XLA: one call, seen through jit, vmap, shard_map, checkpoint and jvp."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel.errors import EjkernelWarning
from ejkernel.kernels import _op_kernel, _spec, kernel_registry
from tests.kernels import harness

OPS = [op for op in kernel_registry.ops() if op != "flash_attention"]  # test_transforms.py
# a shard_map around an op sees one mechanism, whatever the op; `make test-all` has all of them
IN_SHARDS = ("gla", "grouped_matmul", "page_attention", "ring_attention")


class Call:
    """An op's first case as a function of its arrays of floats; the rest is fixed."""

    def __init__(self, op):
        self.spec = kernel_registry.spec(op)
        entry = harness.find_entry(op, "xla/any")
        args = self.spec.make(self.spec.cases()[0], jnp.dtype("float32"), jax.random.key(5))
        public = {f.name for f in _spec.public_fields(self.spec.args)}
        values = {n: x for n, x in self.spec.publish(args).items() if n in public}
        leaves, self.tree = jax.tree.flatten(values)
        self.run = _op_kernel.keyword_function(self.spec, entry)
        self.fixed = leaves
        self.where = [
            i
            for i, x in enumerate(leaves)
            if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
        ]
        self.floats = [leaves[i] for i in self.where]
        self.differentiable = bool(self.spec.differentiable)

    def __call__(self, *floats):
        leaves = list(self.fixed)
        for i, x in zip(self.where, floats, strict=True):
            leaves[i] = x
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EjkernelWarning)  # a cache that is copied
            out = self.run(**jax.tree.unflatten(self.tree, leaves))
        return [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]

    def loss(self, *floats):
        return sum(jnp.where(jnp.isfinite(x), jnp.sin(x), 0.0).sum() for x in self(*floats))


# has the blocks of `native_sparse_attention`, whose lists it is given
SLOW = ("apply_native_sparse_attention",)


@pytest.fixture(
    params=[pytest.param(op, marks=pytest.mark.slow if op in SLOW else []) for op in OPS]
)
def call(request):
    return Call(request.param)


def assert_close(actual, expected, scale=1.0):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=5e-6 * scale)


def test_jit_and_vmap(call):
    expected = call(*call.floats)
    assert_close(jax.jit(call)(*call.floats), expected)
    other = [0.5 * x for x in call.floats]
    both = [jnp.stack([x, y]) for x, y in zip(call.floats, other, strict=True)]
    made = jax.jit(jax.vmap(call))(*both)
    assert_close([x[0] for x in made], expected)
    assert_close([x[1] for x in made], call(*other))


@pytest.mark.parametrize(
    "call",
    [pytest.param(op, marks=[] if op in IN_SHARDS else pytest.mark.slow) for op in OPS],
    indirect=True,
)
def test_shard_map(call):
    if call.spec.name == "ring_attention":
        with pytest.raises(ValueError, match="ring"):
            shard(call, *(jnp.stack([x, x]) for x in call.floats))
        return
    both = [jnp.stack([x, 0.5 * x]) for x in call.floats]
    made = shard(call, *both)
    assert_close([x[0] for x in made], call(*call.floats))
    assert_close([x[1] for x in made], call(*(0.5 * x for x in call.floats)))


def shard(call, *both):
    """A call on each of two devices, with its own part of the leading axis."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("x",))
    local = lambda *floats: [x[None] for x in call(*(f[0] for f in floats))]
    spec = PartitionSpec("x")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(*both)


def wanted(call):
    """Positions of the floats that have a derivative."""
    names = [
        p[0].key
        for p, _ in jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(call.tree, call.fixed))
    ]
    kept = [n for i, n in enumerate(names) if i in call.where]
    return tuple(
        i for i, n in enumerate(kept) if n in call.spec.differentiable or n in ("weights",)
    )


def test_reverse_and_forward_mode_agree_under_checkpoint(call):
    if not call.differentiable:
        with pytest.raises(Exception, match="no derivative"):
            jax.grad(call.loss)(*call.floats)
        return
    which = wanted(call)
    gradient = jax.jit(jax.grad(call.loss, argnums=which))(*call.floats)
    again = jax.jit(jax.grad(jax.checkpoint(call.loss), argnums=which))(*call.floats)
    assert_close(again, gradient)
    keys = jax.random.split(jax.random.key(8), len(which))
    directions = [
        jax.random.normal(k, call.floats[i].shape) for k, i in zip(keys, which, strict=True)
    ]

    def some(*xs):
        floats = list(call.floats)
        for i, x in zip(which, xs, strict=True):
            floats[i] = x
        return call.loss(*floats)

    _, pushed = jax.jit(lambda xs, ds: jax.jvp(some, xs, ds))(
        tuple(call.floats[i] for i in which), tuple(directions)
    )
    pulled = sum(float((g * d).sum()) for g, d in zip(gradient, directions, strict=True))
    size = sum(float(jnp.abs(g * d).sum()) for g, d in zip(gradient, directions, strict=True))
    np.testing.assert_allclose(pushed, pulled, rtol=0, atol=2e-5 * max(size, 1.0))
