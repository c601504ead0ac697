"""`mla_page_attention` on TPUs beyond the generated tests: refusals, races, one real size."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel._device import Target
from ejkernel.callib import _pallas
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._pallas.tpu.ragged_page_attention import config
from tests.kernels import harness

OP = "mla_page_attention"
SPEC = kernel_registry.spec(OP)
ENTRY = harness.find_entry(OP, "pallas/tpu")
V5E = Target(kind="tpu", model="TPU v5 lite")


def shapes(heads=16, latent=512, rope=128, page=64, dtype=jnp.bfloat16):
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    number = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    return {
        "q_nope": array(64, heads, latent),
        "q_pe": array(64, heads, rope),
        "kv_pages": array(1024, page, latent + rope),
        "context_lens": number(32),
        "block_tables": number(32, 16),
        "query_start_loc": number(33),
        "num_seqs": number(1),
    }


def canonical(values):
    return SPEC.canonicalize(SPEC.complete(values | {"softmax_scale": 0.1}))


def why_not(target: Target | None = V5E, **sizes):
    found = []
    jax.eval_shape(
        lambda values: found.append(ENTRY.why_not(canonical(values), target)), shapes(**sizes)
    )
    return found[0]


def test_what_would_copy_the_cache_is_refused():
    assert why_not() is None
    assert "got 512 + 64. Pad `q_pe`" in why_not(rope=64)
    assert "latent vectors of a multiple of 128; got 448" in why_not(latent=448, rope=192)
    assert "a multiple of 8 keys" in why_not(page=12)


def test_what_a_tpu_cannot_do_is_refused():
    reason = lambda **sizes: why_not(target=None, **sizes)
    assert "needs bfloat16 or float32" in reason(dtype=jnp.float16)
    assert "head sizes from 1 to 1024; got 2048" in reason(latent=2048)
    assert reason(rope=64, page=16) is None  # in the interpreter no array is copied for a kernel


@pytest.mark.parametrize("heads", [16, 128])
def test_the_first_guess_fits(heads):
    found = []

    def ask(values):
        args = canonical(values)
        cfg = config.heuristic(args, "forward", V5E)
        found.append((config.vmem_limit(args, cfg), config.decode_vmem_limit(args, cfg)))

    jax.eval_shape(ask, shapes(heads=heads))
    assert max(found[0]) <= 96 << 20


def test_heads_beyond_the_memory_of_a_core_are_refused():
    assert "of VMEM for 16 tokens of all heads" in why_not(
        heads=512, target=Target(kind="tpu", model="TPU v4")
    )


def test_no_race():
    made = harness.problem(OP, "plain", "float32")
    cfg = harness.configs(ENTRY, made.args, "testing")
    with _pallas.detect_races():
        actual = harness.run_entry(ENTRY, made, cfg, compiler_options=harness.QUICK)
        assert not _pallas.races_found()
    harness.assert_close_to_oracle(actual, made)
