"""Configurations of the Triton attention kernels."""

import re

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel._device import Target
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.flash_attention import call, config
from ejkernel.ops import FwdParams

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


def test_backward_over_queries_has_a_limit_of_registers_of_its_own():
    made = config.over_queries(make(max_registers=64, **OWN | {"dq_registers": 128}))
    assert made.max_registers == 128
    assert config.over_queries(make(max_registers=64, **OWN)).max_registers == 0


@pytest.mark.parametrize(
    ("target", "biased", "registers"),
    [
        (Target("gpu", "NVIDIA H200", "9.0"), False, 128),
        (Target("gpu", "NVIDIA H200", "9.0"), True, 0),
        (Target("gpu", "AMD MI300X", "gfx942"), False, 0),
    ],
    ids=["plain", "bias", "amd"],
)
def test_two_programs_over_queries_share_a_multiprocessor(target, biased, registers):
    """Blocks of 128 x 32 take 148 registers, and with a bias more; 128 leave room for another."""
    q = jnp.zeros((1, 64, 2, 128), jnp.bfloat16)
    bias = {"bias": jnp.zeros((1, 1, 64, 64), jnp.bfloat16)} if biased else {}
    args = arguments(**{"query": q, "key": q, "value": q} | bias)
    found = {c.dq_registers for c in config.candidates(args, "backward", target)}
    assert max(found) == registers


def test_settings_of_the_caller_hold_for_both_passes():
    made = config.from_params(make(**OWN), {"block_q": 32})
    assert made == make(block_q=32)


@pytest.mark.parametrize(
    ("settings", "registers"),
    [
        ({"num_stages": 2}, 128),
        ({"block_q": 64, "num_warps": 2}, 128),
        ({"block_q": 32}, 0),
        ({"block_k": 64}, 0),
        ({"num_warps": 4}, 0),
    ],
)
def test_a_limit_of_registers_is_for_the_tile_it_was_measured_with(settings, registers):
    made = config.from_params(make(max_registers=128), settings)
    assert made.max_registers == registers


def arguments(dtype=jnp.float16, length=64, **more):
    q = jnp.zeros((1, length, 2, 16), dtype)
    spec = kernel_registry.spec("flash_attention")
    values = {"query": q, "key": q, "value": q} | more
    return spec.canonicalize(spec.unpack(spec.complete(values)))


def test_small_tiles_are_refused_with_dropout_in_half_precision():
    dropout = {"dropout_prob": 0.5, "dropout_seed": 1}
    args = arguments(**dropout)
    config.check(args, make(block_k=32))
    config.check(arguments(), make())
    config.check(arguments(jnp.float32, **dropout), make())
    with pytest.raises(ValueError, match=r"`kv_blocksize` must be at least 32 .* got 64 and 16"):
        config.check(args, make())


def test_blocks_that_a_kernel_cannot_have_are_named_as_the_caller_wrote_them():
    entry = next(e for e in kernel_registry.list("flash_attention") if e.platform == "triton")
    target = Target("gpu", "NVIDIA H200", "9.0")
    words = r"`flash_attention`: FwdParams\(q_blocksize=48, .* triton/gpu: .*block_q=48 must be"
    with pytest.raises(ValueError, match=words):
        entry.configure(arguments(), "forward", FwdParams(q_blocksize=48), target)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (None, "ieee"),
        ("highest", "ieee"),
        ("BF16_BF16_F32_X9", "ieee"),
        ("TF32_TF32_F32_X3", "ieee"),
        ("F64_F64_F64", "ieee"),
        ("high", "tf32"),
        ("tensorfloat32", "tf32"),
        ("BF16_BF16_F32", "tf32"),
    ],
)
def test_float32_products_are_no_less_precise_than_asked(asked, given):
    with jax.default_matmul_precision(asked):
        assert _launch.dot_precision(jnp.float32) == given


@pytest.mark.parametrize(
    ("length", "causal", "heads", "turns"),
    [(4096, True, 96, 32), (256, True, 6, 2), (256, False, 96, 1), (4097, True, 96, 1)],
)
def test_short_causal_calls_take_turns(length, causal, heads, turns):
    made = call.Call(arguments(length=length, causal=causal), make())
    assert made.interleaved(heads) == turns
