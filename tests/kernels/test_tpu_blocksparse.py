"""Block-sparse attention on TPUs beyond the generated tests: dq in one pass, races, sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel._device import Target
from ejkernel.callib import _pallas
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._pallas.tpu.blocksparse_attention import config
from ejkernel.ops.core.kernel import BACKWARD, FORWARD
from tests.kernels import harness

OP = "blocksparse_attention"
SPEC = kernel_registry.spec(OP)
ENTRY = harness.find_entry(OP, "pallas/tpu")
V4, V5E = Target(kind="tpu", model="TPU v4"), Target(kind="tpu", model="TPU v5 lite")
SIZE = 128  # a smaller one is padded, and all of its blocks are masked
# key blocks by query blocks: a list of a whole step and a block, one of a piece and a block
LISTED = np.asarray([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1]], bool)
T, S = (SIZE * n for n in LISTED.T.shape)


def make(heads=2, groups=1, t=T, s=S, segments=False, **options):
    keys = jax.random.split(jax.random.key(5), 3)
    values = {
        "query": jax.random.normal(keys[0], (1, t, heads, 8)),
        "key": jax.random.normal(keys[1], (1, s, groups, 8)),
        "value": jax.random.normal(keys[2], (1, s, groups, 16)),
        "sparsity_mask": jnp.asarray(LISTED.T)[None, None],
        "block_size": SIZE,
    }
    if segments:
        values["q_segment_ids"] = jnp.arange(t, dtype=jnp.int32)[None] // 300
        values["kv_segment_ids"] = jnp.arange(s, dtype=jnp.int32)[None] // 150
    return SPEC.canonicalize(SPEC.unpack(SPEC.complete(values | options)))


def assert_matches(args, cfg):
    """Also without races."""
    made = harness.solve(SPEC, args)
    with _pallas.detect_races():
        actual = harness.run_entry(ENTRY, made, (cfg, cfg), compiler_options=harness.QUICK)
        assert not _pallas.races_found()
    harness.assert_close_to_oracle(actual, made)


def joined(one_pass, stream=4, parts=2):
    return config.Config(block_q=128, block_k=128, stream=stream, parts=parts, one_pass=one_pass)


def test_dq_is_made_in_the_pass_over_keys():
    """Two query heads of a key head, whose sums stay apart."""
    assert_matches(make(), joined(True))


@pytest.mark.slow
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "logits_soft_cap": 2.0},
        {"heads": 2, "groups": 2, "t": T - 5, "s": S - 3},
        {"segments": True},
    ],
)
def test_gradients_in_one_pass_and_in_two(options, one_pass):
    assert_matches(make(**options), joined(one_pass))


def kernels_of(wanted, one_pass):
    """Names of the kernels of a backward that is not run."""
    args = make()
    lse = jnp.zeros((1, 2, T))
    out = jnp.zeros((1, T, 2, 16))

    def run(args):
        given = ((out,), (lse,), (out,), frozenset(wanted))
        return ENTRY.backward(args, joined(one_pass), *given)

    text = str(jax.make_jaxpr(run)(args))
    return [kind for kind in ("dkv", "dq") if f"bwd_{kind}_kernel" in text]


def test_only_wanted_gradients_are_made():
    everything = ("query", "key", "value")
    assert kernels_of(everything, one_pass=False) == ["dkv", "dq"]
    assert kernels_of(everything, one_pass=True) == ["dkv"]
    assert kernels_of(("query",), one_pass=True) == ["dq"]
    assert kernels_of(("value",), one_pass=True) == ["dkv"]


def long_call(t, heads=1):
    found = []
    shape = jax.ShapeDtypeStruct((1, t, heads, 128), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, t, 1, 128), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((1, 1, t // 128, t // 128), jnp.bool_)

    def ask(q, k, mask):
        values = {"query": q, "key": k, "value": k, "sparsity_mask": mask, "block_size": 128}
        found.append(SPEC.canonicalize(SPEC.unpack(SPEC.complete(values))))

    jax.eval_shape(ask, shape, key, mask)
    return found[0]


@pytest.mark.parametrize(
    ("t", "heads", "target", "one_pass"),
    [
        (32768, 1, V5E, True),
        (32768, 8, V5E, False),
        (1 << 18, 1, V5E, False),
        (32768, 1, V4, False),
    ],
)
def test_one_pass_where_dq_of_a_key_head_fits(t, heads, target, one_pass):
    """Float32 of all queries of a key head: 16 MiB a head here, of the 96 MiB of a v5e.

    What is copied out is that of one head, in the dtype of queries.
    """
    args = long_call(t, heads)
    assert config.heuristic(args, BACKWARD, target).one_pass == one_pass
    assert not config.heuristic(args, FORWARD, target).one_pass
    two = dataclasses.replace(config.heuristic(args, BACKWARD, target), one_pass=False)
    one = dataclasses.replace(two, one_pass=True)
    more = config.vmem_limit(args, one) - config.vmem_limit(args, two)
    assert more == 4 * 128 * t * heads + 2 * 128 * t
    assert (config.misfit(args, BACKWARD, one, target) is None) == one_pass
    assert config.misfit(args, BACKWARD, two, target) is None
