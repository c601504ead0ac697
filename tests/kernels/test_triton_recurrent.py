"""`recurrent` in Triton: both ways to run its steps, several tiles, activations, configurations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel import _settings
from ejkernel._device import Target
from ejkernel.callib import _triton_call
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._triton._blocks import activations
from ejkernel.kernels._triton.recurrent import bwd, call, cells, config, fwd
from ejkernel.modules import recurrent
from tests.kernels import harness, recurrent_calls

SPEC = kernel_registry.spec("recurrent")
H200 = Target(kind="gpu", model="NVIDIA H200", capability="9.0")
MI300 = Target(kind="gpu", model="MI300", capability="gfx942")
SMALL = config.Config(block_d=16, block_b=16, block_k=16, num_stages=1, unroll=2)


def entry(name="triton/gpu"):
    return harness.find_entry("recurrent", name)


def values(cell_type="lstm", b=18, t=3, i=3, d=20, both=False, dtype="float32", **options):
    """Two blocks of rows and two of features, each with a rest."""
    return recurrent_calls.values(cell_type, b, t, i, d, both, dtype, 0.5) | options


def make(*args, **options):
    return SPEC.canonicalize(SPEC.unpack(SPEC.complete(values(*args, **options))))


def in_one_program(args, rows=16):
    width = config._padded(args)
    return dataclasses.replace(SMALL, block_d=width, block_b=rows, one_program=True)


def check(args, forward, backward):
    made = harness.solve(SPEC, args)
    answer = harness.run_entry(entry(), made, (forward, backward), compiler_options=harness.QUICK)
    harness.assert_close_to_oracle(answer, made)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("cell_type", "both"),
    [
        ("lstm", True),
        ("gru", False),
        *(pytest.param(*x, marks=SLOW) for x in (("lstm", False), ("gru", True), ("rnn", True))),
    ],
)
def test_steps_of_several_tiles(cell_type, both):
    lengths = jnp.arange(18, dtype=jnp.int32) % 4
    check(make(cell_type, both=both, lengths=lengths, reverse=not both), SMALL, SMALL)


@pytest.mark.parametrize("cell_type", ["lstm", "gru", pytest.param("rnn", marks=SLOW)])
def test_all_steps_in_one_program(cell_type):
    lengths = jnp.arange(18, dtype=jnp.int32) % 4
    args = make(cell_type, both=True, lengths=lengths)
    check(args, in_one_program(args), in_one_program(args))


@pytest.mark.parametrize(
    "activation", ["relu", *(pytest.param(x, marks=SLOW) for x in ("softsign", "sigmoid"))]
)
def test_every_name_of_an_activation(activation):
    gate = {"relu": "identity", "softsign": "tanh"}.get(activation, "softsign")
    args = make(b=2, t=2, d=3, activation=activation, gate_activation=gate)
    check(args, in_one_program(args), in_one_program(args))


@pytest.mark.parametrize("ours", ["forward", "backward"])
@pytest.mark.parametrize("cell_type", ["gru", pytest.param("lstm", marks=SLOW)])
def test_one_direction_runs_with_the_other_of_xla(cell_type, ours):
    args = make(cell_type, b=2, d=5)
    made, plain = harness.solve(SPEC, args), entry("xla/any")
    mixed = dataclasses.replace(
        entry(), **({"backward": plain.backward} if ours == "forward" else {"fn": plain.fn})
    )
    cfgs = [
        SMALL if ours == side else plain.heuristic(args, side) for side in ("forward", "backward")
    ]
    answer = harness.run_entry(mixed, made, tuple(cfgs), compiler_options=harness.QUICK)
    harness.assert_close_to_oracle(answer, made)


def test_float32_states_beside_bfloat16_are_not_rounded():
    given = values(b=2, d=5, t=9, dtype="bfloat16")
    given["hidden"] = tuple(x.astype(jnp.float32) for x in given["hidden"])
    args = SPEC.canonicalize(SPEC.unpack(SPEC.complete(given)))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
    for cfg in (SMALL, in_one_program(args)):
        outputs, _ = entry().fn(args, cfg)
        expected = SPEC.reference_fn()(wide)
        np.testing.assert_allclose(outputs[1], expected[1], rtol=0, atol=1e-6)
        np.testing.assert_allclose(outputs[2], expected[2], rtol=0, atol=1e-6)


def test_no_rows_and_no_steps():
    for sizes in ({"b": 0}, {"t": 0}):
        args = make("lstm", d=3, **{"b": 2, **sizes})
        check(args, SMALL, SMALL)


def test_what_is_refused_says_why():
    given = values(b=2, d=3)
    with (
        _settings.override(interpret=True),
        pytest.raises(UnsupportedError, match="`activation` is a function, which only XLA"),
    ):
        recurrent(**given, activation=jnp.tanh, platform="triton")
    with jax.enable_x64(True):
        wide = SPEC.canonicalize(SPEC.unpack(SPEC.complete(values(b=2, d=3, dtype="float64"))))
    assert "got float64" in entry().why_not(wide)


# Launches and configurations


def launches(args, cfg):
    jaxpr = jax.make_jaxpr(lambda args: entry().fn(args, cfg))(args)
    return [eqn.params["launch"].kernel.__name__ for eqn in _triton_call.launches(jaxpr.jaxpr)]


@pytest.mark.parametrize("steps", [9, 7])
def test_a_step_is_one_launch(steps):
    """Three in the body of the loop, and those that are left over behind it."""
    args, cfg = make(both=True, t=steps), dataclasses.replace(SMALL, unroll=3)
    room, *found = launches(args, cfg)
    assert room == "recurrent_room_kernel"
    assert found == ["recurrent_fwd_step_kernel"] * (3 + steps % 3)
    assert launches(args, in_one_program(args)) == ["recurrent_fwd_kernel"]


def test_the_loop_computes_no_numbers_of_steps():
    """Each would be a launch of its own on a GPU: only the loop's own counter is added to."""
    args = make(t=8)
    jaxpr = jax.make_jaxpr(lambda args: entry().fn(args, SMALL))(args).jaxpr
    (loop,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("scan", "while")]
    body = loop.params["jaxpr" if loop.primitive.name == "scan" else "body_jaxpr"].jaxpr
    numbers = [eqn.primitive.name for eqn in body.eqns if eqn.outvars[0].aval.shape == ()]
    assert [name for name in numbers if name != "convert_element_type"] == ["add"]


@pytest.mark.parametrize("unroll", [3, 16])
def test_steps_that_are_no_multiple_of_the_loops_body(unroll):
    cfg = dataclasses.replace(SMALL, unroll=unroll)
    check(make("gru", b=2, d=3, t=7), cfg, cfg)


def test_kernels_and_helpers_have_few_parameters():
    modules = [fwd, bwd, call, cells, activations]
    functions = [x for m in modules for x in vars(m).values() if hasattr(x, "arg_names")]
    assert len(functions) > 15
    for function in functions:
        most = 24 if function.__name__.endswith("_kernel") else 14
        assert len(function.arg_names) <= most, function.__name__


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_weights_that_fit_stay_in_one_program(direction):
    half = make(b=64, d=128, dtype="bfloat16")
    assert config.heuristic(half, direction, H200).one_program
    assert not config.heuristic(half, direction, MI300).one_program  # 64 KiB of shared memory
    small = make(b=64, d=64, dtype="bfloat16")
    assert config.heuristic(small, direction, MI300).one_program
    for other in (make(b=64, d=129, dtype="bfloat16"), make(b=64, d=64)):
        assert not any(c.one_program for c in config.candidates(other, direction, H200))
    guess = config.heuristic(half, direction, H200)
    assert config.misfit(half, direction, guess, H200) is None
    large = make(b=2, d=256, dtype="bfloat16")
    assert "holds 128 features" in config.misfit(large, direction, guess, H200)


def test_a_step_fills_the_device():
    args = make(b=64, d=1024, dtype="bfloat16")
    for direction in ("forward", "backward"):
        cfg = config.heuristic(args, direction, H200)
        assert call.Call(args, cfg).grid() == (128,)


def test_the_portable_settings_are_those_of_rows_and_features():
    changed = config.from_params(SMALL, {"block_q": 32, "block_k": 64, "num_warps": 8})
    assert (changed.block_b, changed.block_k, changed.num_warps) == (32, 64, 8)
    with pytest.raises(ValueError, match="unroll=0 must be a positive int"):
        dataclasses.replace(SMALL, unroll=0)
