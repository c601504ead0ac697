"""Attention in blocks of two sizes, of which one divides the lengths and the other does not."""

import jax
import pytest

from ejkernel.kernels import kernel_registry
from tests.kernels import harness

OP = "flash_attention"
SPEC = kernel_registry.spec(OP)
ENTRIES = [
    pytest.param(entry.name, marks=harness.marks(entry))
    for entry in kernel_registry.list(OP)
    if entry.platform in ("triton", "pallas")
]


@pytest.mark.parametrize("options", [{}, {"sliding_window": (20, 5)}], ids=["plain", "window"])
@pytest.mark.parametrize("blocks", [(16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("entry_name", ENTRIES)
def test_blocks_of_two_sizes(entry_name, blocks, options):
    entry, keys = harness.find_entry(OP, entry_name), jax.random.split(jax.random.key(4), 3)
    values = {
        "query": jax.random.normal(keys[0], (1, 48, 1, 16)),
        "key": jax.random.normal(keys[1], (1, 48, 1, 16)),
        "value": jax.random.normal(keys[2], (1, 48, 1, 8)),
    }
    args = SPEC.canonicalize(SPEC.unpack(SPEC.complete(values | options)))
    made = harness.solve(SPEC, args)
    block_q, block_k = blocks
    cfg = entry.config.Config(block_q=block_q, block_k=block_k)
    actual = harness.run_entry(entry, made, (cfg, cfg), compiler_options=harness.QUICK)
    harness.assert_close_to_oracle(actual, made)
