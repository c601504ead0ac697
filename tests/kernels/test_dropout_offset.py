"""A device's share of a call drops the pairs that the whole call drops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import kernel_registry
from tests.kernels import harness

OP = "flash_attention"
SPEC = kernel_registry.spec(OP)
ENTRIES = [
    pytest.param(entry.name, marks=harness.marks(entry)) for entry in kernel_registry.list(OP)
]
# the second of two rows, and the second key head of two with its two query heads
ROW, HEADS, GROUP = 1, 2, 1
SHARE = {
    "query": np.s_[ROW:, :, HEADS:],
    "key": np.s_[ROW:, :, GROUP:],
    "value": np.s_[ROW:, :, GROUP:],
    "out": np.s_[ROW:, :, HEADS:],
}


def whole_call():
    keys = jax.random.split(jax.random.key(5), 3)
    values = {
        "query": jax.random.normal(keys[0], (2, 20, 4, 8)),
        "key": jax.random.normal(keys[1], (2, 24, 2, 8)),
        "value": jax.random.normal(keys[2], (2, 24, 2, 8)),
        "dropout_prob": 0.4,
        "dropout_seed": 2**40 + 3,
    }
    return SPEC.canonicalize(SPEC.unpack(SPEC.complete(values)))


def share_of(made, **offset):
    """The problem of one device, with the part of the oracle's answer that is its own."""
    arrays = {n: x[SHARE[n]] for n, x in made.args.arrays().items() if n in SHARE}
    args = dataclasses.replace(made.args, **arrays, **offset)
    part = lambda found: {n: x[SHARE[n]] for n, x in found.items()}
    oracle, naive = (
        dataclasses.replace(x, outputs=part(x.outputs), gradients=part(x.gradients))
        for x in (made.oracle, made.naive)
    )
    cotangents = (made.cotangents[0][SHARE["out"]],)
    return dataclasses.replace(made, args=args, oracle=oracle, naive=naive, cotangents=cotangents)


@pytest.mark.parametrize("entry_name", ENTRIES)
def test_a_share_drops_the_pairs_of_the_whole(entry_name):
    entry, whole = harness.find_entry(OP, entry_name), harness.solve(SPEC, whole_call())
    made = share_of(whole, dropout_offset=jnp.asarray([ROW, HEADS], jnp.uint32))
    if (reason := entry.why_not(made.args)) is not None:
        pytest.skip(f"refuses dropout: {reason}")
    cfg = harness.configs(entry, made.args, "testing")
    run = lambda made: harness.run_entry(entry, made, cfg, compiler_options=harness.QUICK)
    harness.assert_close_to_oracle(run(made), made)
    assert made.wanted == ("query", "key", "value")
