"""Attention in blocks of two sizes, and with lengths that differ between queries and keys."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels import kernel_registry
from tests.kernels import harness

OP = "flash_attention"
SPEC = kernel_registry.spec(OP)
pytestmark = pytest.mark.parametrize(
    "entry_name",
    [
        pytest.param(entry.name, marks=harness.marks(entry))
        for entry in kernel_registry.list(OP)
        # on Hopper tiles are larger: tests/kernels/test_pallas_gpu.py
        if entry.name in ("triton/gpu", "pallas/tpu")
    ],
)


def assert_matches(entry_name, sizes, options, blocks):
    """Outputs and gradients are the oracle's; `sizes` are batch, queries, keys and query heads."""
    entry, keys = harness.find_entry(OP, entry_name), jax.random.split(jax.random.key(4), 3)
    batch, t, s, heads = sizes
    values = {
        "query": jax.random.normal(keys[0], (batch, t, heads, 16)),
        "key": jax.random.normal(keys[1], (batch, s, 1, 16)),
        "value": jax.random.normal(keys[2], (batch, s, 1, 8)),
    }
    made = harness.solve(SPEC, SPEC.canonicalize(SPEC.unpack(SPEC.complete(values | options))))
    cfg = entry.config.Config(block_q=blocks[0], block_k=blocks[1])
    actual = harness.run_entry(entry, made, (cfg, cfg), compiler_options=harness.QUICK)
    harness.assert_close_to_oracle(actual, made)


@pytest.mark.parametrize("options", [{}, {"sliding_window": (20, 5)}], ids=["plain", "window"])
@pytest.mark.parametrize("blocks", [(16, 32), (32, 16)], ids=str)
def test_one_size_divides_the_lengths_and_the_other_does_not(entry_name, blocks, options):
    assert_matches(entry_name, (1, 48, 48, 1), options, blocks)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"sliding_window": (9, 3)}], ids=["causal", "window"]
)
def test_rows_with_other_lengths_of_queries_than_of_keys(entry_name, options):
    """Queries are the last of their keys; one row has more keys, the other more queries."""
    lengths = {"cum_seqlens_q": jnp.asarray([0, 9, 33]), "cum_seqlens_k": jnp.asarray([0, 22, 39])}
    assert_matches(entry_name, (2, 24, 26, 2), options | lengths | {"return_lse": True}, (16, 16))


def test_packed_sequences_in_a_window(entry_name):
    lengths = {"cum_seqlens_q": jnp.asarray([0, 9, 9, 31])}
    lengths["cum_seqlens_k"] = jnp.asarray([0, 14, 20, 39])
    options = lengths | {"sliding_window": (6, 2)}
    assert_matches(entry_name, (1, 33, 40, 1), options, (16, 16))
