"""Calls of `mean_pooling` whose rows are longer than the slices of its GPU kernels."""

import jax
import numpy as np

from ejkernel import _settings
from ejkernel.kernels import kernel_registry

SPEC = kernel_registry.spec("mean_pooling")
MASK = np.arange(80).reshape(2, 40) % 3 != 0
MASK[1, :19] = False
CUTS = np.array([3, 20, 20, 29, 37], np.int32)
CALLS = {
    "long rows": {},
    "masked": {"mask": MASK},
    # chunks of 17 tokens in slices of 8, 8 and 1; the last chunk has 6 tokens and two empty slices
    "long chunks": {"chunk_size": 17, "mask": MASK},
    # sequences of several slices, an empty one, and tokens of none at both ends
    "packed": {"shape": (1, 40, 6), "cu_seqlens": CUTS},
    "packed chunks": {
        "shape": (1, 40, 6),
        "cu_seqlens": CUTS,
        "chunk_size": 5,
    },
}


def call(shape=(2, 40, 6), **more):
    values = {"inputs": jax.random.normal(jax.random.key(0), shape), **more}
    return SPEC.canonicalize(SPEC.complete(values))


def run(kernel, args, cfg):
    """Output and gradient of a kernel, interpreted, for a cotangent of the same draw each time."""
    ((expected,), pull) = jax.vjp(
        lambda x: SPEC.formula_fn()(args.with_arrays({"inputs": x})), args.inputs
    )
    dout = jax.random.normal(jax.random.key(1), expected.shape)
    with _settings.override(interpret=True):
        ((out,), _) = kernel.fwd.forward(args, cfg)
        grads = kernel.bwd.backward(args, cfg, (), (), (dout,), frozenset({"inputs"}))
    return (out, grads["inputs"]), (expected, pull((dout,))[0])


def assert_right(kernel, args, cfg):
    """Equal to the formula that JAX differentiates."""
    for actual, expected in zip(*run(kernel, args, cfg), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
