"""Configurations of the Triton kernels over cached keys."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel._device import Target
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._triton._blocks import splits
from ejkernel.kernels._triton.page_attention import config
from ejkernel.kernels._triton.ragged_page_attention import config as ragged

H200 = Target("gpu", "NVIDIA H200", "9.0")


def arguments(op, **arrays):
    spec = kernel_registry.spec(op)
    shapes = {name: jax.ShapeDtypeStruct(*x) for name, x in arrays.items()}
    make = lambda given: spec.canonicalize(spec.unpack(spec.complete(given)))
    return jax.eval_shape(make, shapes)


def paged(batch, length, size=128):
    blocks = length // size
    cache = ((batch * blocks, 8, size, 128), jnp.bfloat16)
    return arguments(
        "page_attention",
        query=((batch, 32, 128), jnp.bfloat16),
        key_cache=cache,
        value_cache=cache,
        context_lens=((batch,), jnp.int32),
        block_tables=((batch, blocks), jnp.int32),
    )


def mixed(tokens, count):
    return arguments(
        "ragged_page_attention",
        queries=((tokens, 32, 128), jnp.bfloat16),
        kv_pages=((count * 32, 128, 16, 128), jnp.bfloat16),
        context_lens=((count,), jnp.int32),
        block_tables=((count, 32), jnp.int32),
        query_start_loc=((count + 1,), jnp.int32),
        num_seqs=((1,), jnp.int32),
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_k": 24}, ["block_k=24", "power of two"]),
        ({"programs": 0}, ["programs=0", "positive"]),
        ({"split_keys": True}, ["split_keys=True", "positive"]),
        ({"num_warps": 3}, ["num_warps=3"]),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        config.Config(**{"block_k": 64} | settings)


def test_bad_settings_of_decoding_are_named():
    with pytest.raises(ValueError, match="decode_rows=8"):
        ragged.Config(block_q=64, block_k=64, decode_block_k=64, decode_rows=8)
    with pytest.raises(ValueError, match="block_k=8"):
        ragged.Config(block_q=64, block_k=64, decode_block_k=8)


@pytest.mark.parametrize(
    ("batch", "length", "given", "expected"),
    [
        (64, 32768, None, 2),  # 512 programs without splits, of 1056 that fill the device
        (1, 32768, None, 128),  # parts of 256 keys
        (1, 128, None, 1),
        (512, 32768, None, 1),
        (64, 32768, 7, 7),
        (64, 128, 7, 2),  # a part has at least one tile
    ],
)
def test_splits_fill_the_device(batch, length, given, expected):
    cfg = config.heuristic(paged(batch, length), "forward", H200)
    assert splits.count(batch * 8, length, cfg, given) == expected


@pytest.mark.parametrize(
    ("tokens", "count", "rows", "decoded"), [(64, 64, 16, 4), (320, 64, 32, 8), (4156, 64, 16, 4)]
)
def test_decoding_has_rows_for_the_tokens_of_a_sequence(tokens, count, rows, decoded):
    args = mixed(tokens, count)
    cfg = ragged.heuristic(args, "forward", H200)
    assert cfg.decode_rows == rows
    assert ragged.decode_tiles(ragged.sizes(args), cfg.decode_rows).TOKENS == decoded


@pytest.mark.parametrize("target", [H200, Target("gpu", "a small one", "8.6")])
def test_guesses_fit_into_shared_memory_and_large_configs_do_not(target):
    for module, args in ((config, paged(64, 4096)), (ragged, mixed(4156, 64))):
        made = module.candidates(args, "forward", target)
        assert len(set(made)) == len(made)
        assert all(module.misfit(args, "forward", cfg, target) is None for cfg in made)
        huge = dataclasses.replace(made[0], block_k=2048)
        assert "shared memory" in module.misfit(args, "forward", huge, target)
