"""`recurrent` on TPUs beyond the generated tests: blocks with rests, names, refusals, races."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel._device import Target
from ejkernel.callib import _pallas
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._pallas.tpu._blocks import capacity
from ejkernel.kernels._pallas.tpu.recurrent import config
from tests.kernels import harness, recurrent_calls

SPEC = kernel_registry.spec("recurrent")
ENTRY = harness.find_entry("recurrent", "pallas/tpu")
SMALL = config.Config(block_b=16, block_t=2, block_d=128)
SLOW = pytest.mark.slow
MODELS = ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x")


def values(cell_type="lstm", b=17, t=3, i=3, d=130, both=False, dtype="float32", **options):
    """Two blocks of rows, two of steps and two parts of features, each with a rest."""
    return recurrent_calls.values(cell_type, b, t, i, d, both, dtype, d**-0.5) | options


def canonical(given):
    return SPEC.canonicalize(SPEC.unpack(SPEC.complete(given)))


def make(*args, **options):
    return canonical(values(*args, **options))


def check(args, forward=SMALL, backward=SMALL, entry=ENTRY):
    made = harness.solve(SPEC, args)
    cfgs = (forward, backward)
    answer = harness.run_entry(entry, made, cfgs, compiler_options=harness.QUICK)
    harness.assert_close_to_oracle(answer, made)


@pytest.mark.parametrize(
    ("cell_type", "both"),
    [
        ("gru", False),
        *(pytest.param(*x, marks=SLOW) for x in (("lstm", True), ("gru", True), ("rnn", True))),
    ],
)
def test_blocks_of_every_axis_with_a_rest(cell_type, both):
    lengths = jnp.arange(17, dtype=jnp.int32) % 4
    check(make(cell_type, both=both, lengths=lengths, reverse=not both))


@pytest.mark.parametrize(
    "activation", ["relu", *(pytest.param(x, marks=SLOW) for x in ("softsign", "sigmoid"))]
)
def test_every_name_of_an_activation(activation):
    gate = {"relu": "identity", "softsign": "tanh"}.get(activation, "softsign")
    check(make(b=2, t=2, d=3, activation=activation, gate_activation=gate))


@pytest.mark.parametrize("ours", ["forward", "backward"])
@pytest.mark.parametrize("cell_type", [pytest.param("gru", marks=SLOW), "lstm"])
def test_one_direction_runs_with_the_other_of_xla(cell_type, ours):
    args = make(cell_type, b=2, t=3, d=5)
    plain = harness.find_entry("recurrent", "xla/any")
    other = {"backward": plain.backward} if ours == "forward" else {"fn": plain.fn}
    cfgs = [
        SMALL if ours == side else plain.heuristic(args, side) for side in ("forward", "backward")
    ]
    check(args, *cfgs, entry=dataclasses.replace(ENTRY, **other))


def test_float32_states_beside_bfloat16_are_not_rounded():
    given = values(b=2, d=5, t=9, dtype="bfloat16")
    given["hidden"] = tuple(x.astype(jnp.float32) for x in given["hidden"])
    args = canonical(given)
    outputs, _ = ENTRY.fn(args, SMALL)
    expected = SPEC.reference_fn()(jax.tree.map(lambda x: x.astype(jnp.float32), args))
    np.testing.assert_allclose(outputs[1], expected[1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(outputs[2], expected[2], rtol=0, atol=1e-6)


def test_no_race():
    made = harness.solve(SPEC, make("lstm", b=3, t=3, d=4, both=True))
    with _pallas.detect_races():
        answer = harness.run_entry(ENTRY, made, (SMALL, SMALL), compiler_options=harness.QUICK)
        assert not _pallas.races_found()
    harness.assert_close_to_oracle(answer, made)


def test_what_is_refused_says_why():
    assert "`inputs` is float16" in ENTRY.why_not(make(b=2, d=3, dtype="float16"))
    assert "at least one row" in ENTRY.why_not(make(b=0, d=3))
    assert "`activation` is a function" in ENTRY.why_not(make(b=2, d=3, activation=jnp.tanh))


def sizes(b=64, t=512, d=1024, dtype="bfloat16", cell_type="lstm"):
    """A call of shapes alone."""
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    m = {"lstm": 4, "gru": 3, "rnn": 1}[cell_type] * d
    given = {
        "inputs": struct(b, t, d),
        "hidden": (struct(b, d), struct(b, d)) if cell_type == "lstm" else struct(b, d),
        "weights": {"w_ih": struct(m, d), "w_hh": struct(m, d)},
    }
    made = []
    jax.eval_shape(lambda given: made.append(canonical(given | {"cell_type": cell_type})), given)
    return made[0]


def test_weights_beyond_the_memory_of_a_core_are_refused():
    for model in MODELS:
        target = Target(kind="tpu", model=model)
        assert ENTRY.why_not(sizes(), target) is None
        assert "holds `w_hh` in VMEM" in ENTRY.why_not(sizes(d=4096), target)
    v4 = Target(kind="tpu", model="TPU v4")
    assert "1024 features in float32 it needs" in ENTRY.why_not(sizes(dtype="float32"), v4)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_first_guess_fits_the_device(model, direction):
    target = Target(kind="tpu", model=model)
    for args in (sizes(), sizes(b=1000, d=256), sizes(b=8, d=512, dtype="float32")):
        guess = config.heuristic(args, direction, target)
        assert config.vmem_bytes(args, guess, direction) <= capacity.vmem(target)
        assert guess == config.fitting(args, guess)


def test_blocks_fit_the_call():
    fit = lambda cfg, **shape: dataclasses.astuple(config.fitting(sizes(**shape), cfg))
    assert fit(config.Config(block_b=64, block_t=8), b=100, t=5, d=384) == (64, 5, 128)
    assert fit(config.Config(block_b=20, block_t=8), b=21, d=512) == (21, 8, 256)  # one block of 21
    assert fit(config.Config(block_b=20, block_t=8), b=99, d=100) == (32, 8, 128)


@pytest.mark.parametrize("bad", [{"block_b": 0}, {"block_t": 2.0}, {"block_d": 64}])
def test_configs_check_themselves(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}=.* must be a positive multiple"):
        config.Config(**{"block_b": 16, "block_t": 4, "block_d": 128} | bad)
