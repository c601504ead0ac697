"""The linear recurrence on TPUs beyond the generated tests: long chunks, strong gates, races."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel._device import Target
from ejkernel.callib import _pallas
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._pallas.tpu.linear_recurrence import config, halves
from tests.kernels import harness

OP = "linear_recurrence"
SPEC = kernel_registry.spec(OP)
ENTRY = harness.find_entry(OP, "pallas/tpu")
LONG = config.Config(block_t=16, chunk=16)  # halves of a whole register


def values(t=24, heads=1, d=16, e=8, dtype=jnp.float32, gates=(), strong=0.0):
    """Gates of about -0.1, and `strong` at every third token."""
    keys = jax.random.split(jax.random.key(3), 6)
    shapes = {"query": (1, t, heads, d), "key": (1, t, heads, d), "value": (1, t, heads, e)}
    made = {n: jax.random.normal(k, s) for (n, s), k in zip(shapes.items(), keys, strict=False)}
    wide = {"g": (1, t, heads), "gk": (1, t, heads, d), "gv": (1, t, heads, e)}
    for name, key in zip(gates, keys[3:], strict=False):
        gate = jax.nn.log_sigmoid(jax.random.normal(key, wide[name]) + 2.0)
        third = (jnp.arange(t) % 3 == 1).reshape(1, t, *(1,) * (gate.ndim - 2))
        made[name] = jnp.where(third, strong, gate) if strong else gate
    return {n: x.astype(dtype) for n, x in made.items()}


def make(given):
    return SPEC.canonicalize(SPEC.unpack(SPEC.complete(given)))


def assert_matches(given, cfg=LONG):
    made = harness.solve(SPEC, make(given))
    actual = harness.run_entry(ENTRY, made, (cfg, cfg), compiler_options=harness.QUICK)
    harness.assert_close_to_oracle(actual, made)


@pytest.mark.parametrize(
    ("gates", "dtype"),
    [
        (("gk",), "bfloat16"),
        pytest.param(("g",), "bfloat16", marks=pytest.mark.slow),
        pytest.param(("gk",), "float32", marks=pytest.mark.slow),
        pytest.param(("g",), "float32", marks=pytest.mark.slow),
        pytest.param(("g", "gk", "gv"), "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_strong_gates_in_long_chunks(gates, dtype):
    """A quotient of two long products would lose all digits here, or overflow."""
    assert_matches(values(gates=gates, strong=-20.0, dtype=dtype) | {"return_state": True})


@pytest.mark.parametrize(
    ("d", "e", "gates"),
    [
        (1, 1, ("gk",)),
        pytest.param(1, 8, ("g", "gk", "gv"), marks=pytest.mark.slow),
        pytest.param(8, 1, ("g",), marks=pytest.mark.slow),
    ],
)
def test_one_feature_is_no_row_of_gates(d, e, gates):
    """Gradients of one feature stay columns; only gates of whole tokens are rows of numbers."""
    assert_matches(values(t=9, d=d, e=e, gates=gates), config.Config(block_t=8, chunk=8))


def outputs(given, cfg):
    return jax.jit(lambda args: ENTRY.fn(args, cfg)[0])(make(given))


@pytest.mark.parametrize("gate", ["g", pytest.param("gk", marks=pytest.mark.slow)])
def test_minus_infinity_forgets_everything(gate):
    given = values(t=24, gates=(gate,))
    given[gate] = given[gate].at[:, 10].set(-jnp.inf)
    cfg = config.Config(block_t=8, chunk=8)
    (out,) = outputs(given, cfg)
    (rest,) = outputs({n: x[:, 10:] for n, x in given.items()}, cfg)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[:, 10:], rest, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_constant_decay_of_a_last_chunk_that_is_not_full():
    """Tokens that fill a chunk have no gate: the state must not decay any further."""
    given = values(t=21) | {"g_gamma": jnp.asarray([-0.3]), "return_state": True}
    assert_matches(given)


@pytest.mark.slow
def test_two_calls_with_the_state_handed_over_are_one():
    given = values(t=40, gates=("gk",)) | {"return_state": True}
    cfg = config.Config(block_t=16, chunk=16)
    out, state = outputs(given, cfg)
    cut = lambda part: {n: x if n == "return_state" else x[:, part] for n, x in given.items()}
    first, between = outputs(cut(slice(0, 24)), cfg)
    rest = cut(slice(24, 40)) | {"initial_state": between}
    second, last = outputs(rest, cfg)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(last, state, rtol=1e-5, atol=1e-5)


def test_no_race():
    made = harness.problem(OP, "packed_reverse", "float32")
    cfg = config.testing(made.args, "forward")
    with _pallas.detect_races():
        outputs, _ = jax.jit(lambda args: ENTRY.fn(args, cfg))(made.args)
        jax.block_until_ready(outputs)
    assert not _pallas.races_found()
    np.testing.assert_allclose(outputs[0], made.oracle.outputs["out"], rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_no_race_backward():
    made = harness.problem(OP, "packed", "float32")
    with _pallas.detect_races():
        cfg = harness.configs(ENTRY, made.args, "testing")
        actual = harness.run_entry(ENTRY, made, cfg, compiler_options=harness.QUICK)
    assert not _pallas.races_found()
    harness.assert_close_to_oracle(actual, made)


@pytest.mark.slow
@pytest.mark.parametrize("gates", [("g",), ("gk",)])
def test_long_rows_in_half_precision(gates):
    given = values(t=8192, d=32, e=32, dtype="bfloat16", gates=gates, strong=-20.0)
    assert_matches(given | {"return_state": True}, config.Config(block_t=1024, chunk=128))


# Decays


def test_gradients_of_gates_are_the_transpose_of_decays(monkeypatch):
    """By JAX's own derivative of the logs of all decays."""
    monkeypatch.setattr(halves.pltpu, "roll", jnp.roll)  # which JAX can differentiate
    gates = -jax.random.uniform(jax.random.key(1), (16, 3))

    def logs(gates):
        side, levels = halves.decays(gates)
        return jax.tree.map(jnp.log, (side, levels))

    @jax.jit
    def both(gates):
        point, pull = jax.vjp(logs, gates)
        keys = iter(jax.random.split(jax.random.key(2), 16))
        given = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), point)
        return halves.gate_gradients(*given), pull(given)[0]

    np.testing.assert_allclose(*both(gates), rtol=1e-4, atol=1e-4)


# Configs and refusals


@pytest.mark.parametrize("bad", [{"chunk": 12}, {"block_t": 4}, {"block_t": 24}, {"chunk": 8.0}])
def test_configs_check_themselves(bad):
    with pytest.raises(ValueError, match=r"`Config`"):
        config.Config(**{"block_t": 16, "chunk": 16} | bad)


@pytest.mark.parametrize("model", ["TPU v4", "TPU v5 lite", "TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_guesses_fit(model, direction):
    shape = jax.ShapeDtypeStruct((1, 300, 2, 256), jnp.float32)
    args = dataclasses.replace(make(values()), query=shape, key=shape, value=shape, gk=shape)
    found = config.candidates(args, direction, Target(kind="tpu", model=model))
    assert found
    assert all(cfg.block_t % cfg.chunk == 0 and cfg.block_t <= 512 for cfg in found)


def test_steps_are_not_longer_than_packed_sequences():
    args = make(values(t=1024) | {"cu_seqlens": jnp.arange(9) * 128})
    assert config.heuristic(args, "forward", Target(kind="tpu", model="TPU v4")).block_t == 128


def test_what_is_refused():
    reason = lambda **sizes: ENTRY.why_not(make(values(**sizes)))
    assert "`query` is float16" in reason(dtype=jnp.float16)
    assert "head sizes of at most 256" in reason(t=1, d=640)
    assert "at least one" in reason(t=0)
    for op in ("gla", "lightning_attention"):
        assert harness.find_entry(op, "pallas/tpu").base is ENTRY
