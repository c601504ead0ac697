"""Configurations of the Triton attention kernels."""

import re

import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels import kernel_registry
from ejkernel.kernels._triton.flash_attention import config

OWN = {"dq_block_q": 128, "dq_block_k": 32, "dq_warps": 8, "dq_stages": 3}


def make(**more):
    return config.Config(**{"block_q": 64, "block_k": 16, "num_warps": 2, "num_stages": 1} | more)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_q": 48}, ["block_q=48", "power of two"]),
        ({"block_k": 8}, ["block_k=8", "at least 16"]),
        ({"num_warps": 3}, ["num_warps=3"]),
        ({"num_stages": 0}, ["num_stages=0", "[1, 8]"]),
        ({"max_registers": 256}, ["max_registers=256", "[0, 255]"]),
        (OWN | {"dq_block_k": 24}, ["dq_block_k=24", "power of two"]),
        ({"dq_warps": 4}, ["dq_block_q=0", "power of two"]),
        (OWN | {"dq_warps": 0}, ["num_warps=0"]),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        make(**settings)


def test_backward_over_queries_has_the_sizes_exchanged():
    assert config.over_queries(make()) == make(block_q=16, block_k=64)


def test_backward_over_queries_may_have_sizes_of_its_own():
    made = config.over_queries(make(**OWN))
    assert made == config.Config(block_q=128, block_k=32, num_warps=8, num_stages=3)


def test_settings_of_the_caller_hold_for_both_passes():
    made = config.from_params(make(**OWN), {"block_q": 32})
    assert made == make(block_q=32)


def test_small_tiles_are_refused_with_dropout():
    q = jnp.zeros((1, 64, 2, 16), jnp.float16)
    spec = kernel_registry.spec("flash_attention")
    values = {"query": q, "key": q, "value": q, "dropout_prob": 0.5, "dropout_seed": 1}
    args = spec.canonicalize(spec.unpack(spec.complete(values)))
    config.check(args, make(block_k=32))
    with pytest.raises(ValueError, match="at least 32 queries and keys; got 64 and 16"):
        config.check(args, make())
