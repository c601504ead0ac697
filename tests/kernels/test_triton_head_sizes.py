"""Attention in Triton with heads that are cut into two tiles of columns, as 192 into 128 and 64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import kernel_registry
from ejkernel.types import block_mask
from tests.kernels import harness

pytest.importorskip("triton", reason="Triton is not installed")
from ejkernel.kernels._triton._blocks import parts

OP = "flash_attention"
T, S = 37, 51  # no multiple of a block
EVERYTHING = {
    "sliding_window": (30, 3),
    "logits_soft_cap": 4.0,
    "dropout_prob": 0.3,
    "dropout_seed": 7,
    "return_lse": True,
}


def test_two_parts_are_fewer_columns_than_one():
    for width in range(1, 257):
        found = parts.columns(width)
        padded = max(16, 1 << (width - 1).bit_length())
        assert all(n >= 16 and n & (n - 1) == 0 for n in found)
        assert width <= sum(found) <= padded
        assert len(found) == 1 or (found[0] < width and sum(found) <= 3 * padded // 4)


@pytest.mark.parametrize(
    ("width", "found"),
    [
        (64, (64,)),
        (48, (64,)),
        (80, (64, 16)),
        (96, (64, 32)),
        (97, (128,)),
        (128, (128,)),
        (130, (128, 16)),
        (160, (128, 32)),
        (192, (128, 64)),
        (193, (256,)),
        (256, (256,)),
    ],
)
def test_columns(width, found):
    assert parts.columns(width) == found


def arrays(d, e, dtype="float32", heads=2, groups=1, more=()):
    """Independent queries, keys and values, and what else is asked for by name."""
    keys = iter(jax.random.split(jax.random.key(11), 8))
    draw = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)
    found = {
        "query": draw(1, T, heads, d),
        "key": draw(1, S, groups, d),
        "value": draw(1, S, groups, e),
    }
    if "bias" in more:
        found["bias"] = draw(1, heads, T, S)
    if "sinks" in more:
        found["softmax_aux"] = draw(heads, 2)
    if "slopes" in more:
        found["alibi_slopes"] = jnp.abs(draw(heads))
    if "mask" in more:
        found["attention_mask"] = jax.random.bernoulli(next(keys), 0.7, (1, 1, T, S))
    if "segments" in more:  # the last five tokens are padding
        ids = lambda n: jnp.asarray(np.searchsorted([n // 3, n - 5], np.arange(n), "right")[None])
        q_ids, k_ids = (jnp.where(ids(n) == 2, -1, ids(n)).astype(jnp.int32) for n in (T, S))
        found |= {"q_segment_ids": q_ids, "kv_segment_ids": k_ids}
    return found


def with_nan(args):
    """The call with nan in its padding."""
    ids = {"query": args.q_segment_ids, "key": args.kv_segment_ids, "value": args.kv_segment_ids}
    bad = {
        name: jnp.where(seen[:, :, None, None] < 0, jnp.nan, getattr(args, name))
        for name, seen in ids.items()
    }
    return dataclasses.replace(args, **bad)


def assert_matches(values, op=OP):
    """Outputs and all gradients are the oracle's, with tiles that cut both lengths."""
    spec, entry = kernel_registry.spec(op), harness.find_entry(op, "triton/gpu")
    made = harness.solve(spec, spec.canonicalize(spec.unpack(spec.complete(values))))
    if made.args.q_segment_ids is not None:
        made = dataclasses.replace(made, args=with_nan(made.args))
    cfg = harness.configs(entry, made.args, "testing")
    actual = harness.run_entry(entry, made, cfg, compiler_options=harness.QUICK)
    harness.assert_close_to_oracle(actual, made)


def test_everything_at_once_with_heads_of_192():
    assert_matches(arrays(192, 128, more=("bias", "sinks", "segments")) | EVERYTHING)


def test_values_in_two_parts():
    assert_matches(arrays(40, 96) | {"causal": True})


def test_blocks_of_queries_without_keys():
    values = arrays(40, 96) | {"kv_segment_ids": jnp.ones((1, S), jnp.int32), "return_lse": True}
    values["q_segment_ids"] = jnp.where(jnp.arange(T) < 32, 2, 1).astype(jnp.int32)[None]
    assert_matches(values)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("d", "e"),
    [(192, 128), (192, 192), (128, 192), (160, 160), (96, 96), (80, 64), (150, 90), (250, 130)],
)
def test_sizes(d, e, dtype):
    assert_matches(arrays(d, e, dtype) | {"causal": True, "return_lse": True})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "options"),
    [
        ((), {}),
        ((), {"sliding_window": (9, 5)}),
        ((), {"causal": True, "logits_soft_cap": 3.0}),
        ((), {"dropout_prob": 0.4, "dropout_seed": 3}),
        (("sinks",), {"causal": True}),
        (("bias",), {}),
        (("slopes",), {"causal": True}),
        (("mask",), {}),
        (("segments",), {"causal": True, "return_lse": True}),
    ],
    ids=["plain", "window", "cap", "dropout", "sinks", "bias", "slopes", "mask", "segments"],
)
@pytest.mark.parametrize(("d", "e", "groups"), [(192, 128, 1), (160, 192, 2)])
def test_options(d, e, groups, more, options):
    assert_matches(arrays(d, e, heads=2, groups=groups, more=more) | options)


@pytest.mark.slow
@pytest.mark.parametrize("d", [96, 192])
def test_block_sparse_heads(d):
    values = arrays(d, 128, heads=2) | {"block_size": 16, "causal": True}
    values["mask_builder"] = block_mask.local(2) | block_mask.random(1, seed=7)
    assert_matches(values, "blocksparse_attention")
