"""How much the Triton attention kernels compute, counted in the interpreter."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import interpreter

from ejkernel import _settings
from ejkernel.kernels import _oracle, kernel_registry
from tests.backend import BACKEND
from tests.kernels import harness

pytestmark = pytest.mark.skipif(BACKEND != "cpu", reason="counts in the interpreter, on a CPU")
SPEC = kernel_registry.spec("flash_attention")
ENTRY = harness.find_entry("flash_attention", "triton/gpu")


@pytest.mark.parametrize("programs", [1, 5])
def test_programs_that_read_several_flags_compute_all_that_are_set(programs, monkeypatch):
    """In long calls a program reads several; here some blocks of both batches are flagged."""
    from ejkernel.kernels._triton.flash_attention import fwd

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, 70, 4, 16), (2, 90, 2, 16), (2, 90, 2, 16))
    q, k, v = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    q = q.at[1, 20:50].multiply(300.0).at[0, 64:, 1].multiply(1e4)
    given = {"query": q, "key": k, "value": v, "causal": True, "return_lse": True}
    args = SPEC.canonicalize(SPEC.unpack(SPEC.complete(given)))
    cfg = ENTRY.config.testing(args, "forward")
    assert -(-70 // cfg.block_q) * 4 * 2 % 5 != 0  # some programs have fewer flags
    monkeypatch.setattr(fwd, "_FLAG_PROGRAMS", programs)
    outputs, _ = jax.jit(lambda args: fwd.forward(args, cfg))(args)
    made = harness.solve(SPEC, args, ("none",))
    harness.assert_close_to_oracle(_oracle.answer(SPEC, args, outputs, {}), made)


@pytest.fixture
def products(monkeypatch):
    """Counts products of tiles in one forward."""
    count, dot = [], interpreter.InterpreterBuilder.create_dot

    def counted(*args):
        count.append(1)
        return dot(*args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", counted)

    def run(**options):
        count.clear()
        keys = jax.random.split(jax.random.key(0), 3)
        q, k, v = (jax.random.normal(key, (1, 64, 1, 16), jnp.bfloat16) for key in keys)
        values = {"query": q, "key": k, "value": v, **options}
        args = SPEC.canonicalize(SPEC.unpack(SPEC.complete(values)))
        with _settings.override(interpret=True):
            jax.block_until_ready(ENTRY.fn(args, ENTRY.config.testing(args, "forward")))
        return len(count)

    return run


@pytest.mark.parametrize("cap", [None, 30.0, 50.0])
def test_blocks_outside_a_window_and_second_passes_are_left_out(products, cap):
    window = products(sliding_window=(10, 0), logits_soft_cap=cap)
    assert window == 2 * (1 + 2 + 2 + 2)  # two products in each block of 16 keys that is seen
    ids = jnp.repeat(jnp.arange(2), 32)[None]
    segments = products(q_segment_ids=ids, kv_segment_ids=ids, causal=True, logits_soft_cap=cap)
    assert segments == 2 * (1 + 2 + 1 + 2)


def test_only_blocks_whose_weights_leave_their_range_are_computed_again(products):
    once = products()
    assert once == 2 * 4 * 4
    steep = jnp.ones((1, 64, 1, 16)).at[:, 20].set(500.0)  # in the second block of 16
    key = jnp.ones((1, 64, 1, 16)).at[:, 16:].multiply(2.0)  # beyond what the first block says
    again = products(query=steep.astype(jnp.bfloat16), key=key.astype(jnp.bfloat16))
    assert again == once * 5 // 4


def test_calls_without_a_fixed_reference_are_computed_once(products):
    once = products()
    assert products(alibi_slopes=jnp.ones(1)) == once
    assert products(attention_mask=jnp.ones((1, 1, 1, 64), bool)) == once
