"""Attention backward for Hopper: lowered for a GPU, and interpreted through its twin."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import _oracle, _spec, kernel_registry
from ejkernel.kernels._pallas.gpu._blocks import probe
from tests.kernels import harness

WANTED = frozenset({"query", "key", "value"})
SPEC = kernel_registry.spec("flash_attention")
interpreted = pytest.mark.skipif(
    probe.why_not_interpreted() is not None, reason=str(probe.why_not_interpreted())
)
# (b, t, s, h, g, d) and options
CASES = {
    "causal_grouped_sinks": ((1, 70, 140, 2, 1, 128), {"causal": True, "softmax_aux": 2}),
    "window_small_heads": ((1, 300, 290, 2, 1, 64), {"sliding_window": (90, 20)}),
}
SLOW = {
    "full": ((1, 128, 256, 1, 1, 128), {}),
    "full_odd": ((2, 130, 131, 1, 1, 128), {}),
    "causal": ((1, 256, 256, 2, 2, 128), {"causal": True}),
    "causal_long_queries": ((1, 260, 130, 1, 1, 128), {"causal": True, "return_lse": False}),
    "causal_window": ((1, 400, 400, 4, 2, 128), {"causal": True, "sliding_window": 70}),
    "causal_small_heads": ((1, 300, 430, 2, 2, 64), {"causal": True}),
    "window_to_the_right": ((1, 200, 200, 3, 1, 64), {"sliding_window": (-1, 30)}),
    "short": ((2, 3, 5, 2, 1, 128), {"causal": True}),
}


def make(shape, dtype=jnp.bfloat16, **options):
    """Canonical arguments; every array from a key of its own."""
    b, t, s, h, g, d = shape
    keys = jax.random.split(jax.random.key(31), 4)
    normal = lambda i, *size: jax.random.normal(keys[i], size, jnp.float32).astype(dtype)
    if (count := options.get("softmax_aux")) is not None:
        options["softmax_aux"] = normal(3, h, count)
    values = {"query": normal(0, b, t, h, d), "key": normal(1, b, s, g, d)}
    values |= {"value": normal(2, b, s, g, d), "return_lse": True}
    case = _spec.Case("made", lambda dtype, key: values | options, frozenset())
    return SPEC.make(case, dtype, keys[0])


def run(args, made, kernels=(False,)):
    """Gradients by the twin from the oracle's outputs, and by its exact weights or not."""
    from ejkernel.kernels._pallas.gpu.flash_attention import bwd, config

    with_lse = dataclasses.replace(args, return_lse=True)
    out, lse = SPEC.reference_fn()(with_lse)
    outputs = (out, lse) if args.return_lse else (out,)

    def gradients(args, outputs, lse, cotangents):
        exact = jnp.asarray(kernels[-1])
        wanted = frozenset(made.wanted)
        cfg = config.testing(args, "backward")
        return bwd.gradients(args, cfg, outputs, lse, cotangents, wanted, exact, kernels)

    jitted = jax.jit(gradients, compiler_options=harness.QUICK)
    found = jitted(args, outputs, lse, made.cotangents)
    return _oracle.answer(SPEC, args, outputs, found)


def check(shape, options, kernels=(False,)):
    args = make(shape, **options)
    made = harness.solve(SPEC, args)
    actual = run(args, made, kernels)
    assert actual.gradients.keys() == made.oracle.gradients.keys()
    harness.assert_close_to_oracle(actual, made)


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    check(*CASES[name])


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_gradients_of_more_calls(name):
    check(*SLOW[name])
