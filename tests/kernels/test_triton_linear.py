"""The linear recurrence in Triton: blocks, gates of any strength, a few tokens, memory."""

import dataclasses
import functools
import math

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
from ejkernel.kernels._triton.linear_recurrence import bwd, config, fwd
from ejkernel.ops import FwdParams
from tests.backend import BACKEND
from tests.kernels import harness

SPEC = kernel_registry.spec("linear_recurrence")
ENTRY = harness.find_entry("linear_recurrence", "triton/gpu")
H200 = Target("gpu", "NVIDIA H200", "9.0")
SMALL = {"block_t": 16, "block_d": 16, "block_e": 16, "score_d": 16, "value_d": 16}
SMALL |= {"state_d": 16, "state_e": 16, "num_stages": 1, "state_stages": 1}


@pytest.fixture(autouse=True)
def _interpreted():
    with _settings.override(interpret=BACKEND == "cpu"):
        yield


def arrays(t, gates, *, batch=1, heads=(2, 2, 2), d=8, e=8, dtype=jnp.float32, seed=0):
    """Inputs of a call; gates are about -0.1, or one of a head."""
    keys = jax.random.split(jax.random.key(seed), 7)
    most, normal = max(heads), jax.random.normal
    gate = lambda key, *more: jax.nn.log_sigmoid(normal(key, (batch, t, most, *more)) + 2.0)
    made = {
        "query": normal(keys[0], (batch, t, heads[0], d)),
        "key": normal(keys[1], (batch, t, heads[1], d)),
        "value": normal(keys[2], (batch, t, heads[2], e)),
        "g": gate(keys[3]),
        "gk": gate(keys[4], d),
        "g_gamma": -jnp.linspace(0.1, 0.4, most),
        "initial_state": normal(keys[6], (batch, most, d, e)),
    }
    kept = {"query", "key", "value", "initial_state", *gates}
    return {n: x.astype(dtype) for n, x in made.items() if n in kept}


def make(values, **options):
    return SPEC.canonicalize(SPEC.complete(values | {"return_state": True} | options))


def run(args, cfg=None, cotangents=None, wanted=()):
    """Outputs, and gradients if cotangents are given; backward has chunks and stored states."""
    cfg = cfg or config.Config(**SMALL)

    def both(args, cotangents):
        outputs, residuals = fwd.forward(args, cfg)
        if cotangents is None:
            return outputs
        cfg_back = config.Config(**SMALL) if cfg.recurrent or cfg.segments else cfg
        back = bwd.backward(args, cfg_back, outputs, residuals, cotangents, frozenset(wanted))
        return outputs, back

    return jax.jit(both)(args, cotangents)


def check(args, cfg=None):
    """Outputs and gradients of all that is differentiable, against the oracle's."""
    made = harness.solve(SPEC, args)
    actual = run(args, cfg, made.cotangents, made.wanted)
    found = harness.Answer(*({n: np.asarray(x, np.float64) for n, x in part.items()} for part in (
        dict(zip(("out", "state"), actual[0], strict=True)), actual[1])))  # fmt: skip
    harness.assert_close_to_oracle(found, made)
    return found, made


@pytest.mark.parametrize(
    "gates", [("gk", "g", "g_gamma"), pytest.param(("g",), marks=pytest.mark.slow)]
)
def test_several_blocks_of_elements_and_columns(gates):
    check(make(arrays(17, gates, d=20, e=20, heads=(1, 1, 1))))


@pytest.mark.parametrize("gates", [("gk",), ("g",)])
def test_strong_gates_are_exact_and_so_are_weak_ones_after_them(gates):
    values = arrays(32, gates, heads=(1, 1, 1))
    for name in gates:
        strong = (jnp.arange(32) < 19).reshape(1, 32, *(1,) * (values[name].ndim - 2))
        values[name] = jnp.where(strong, -20.0, 0.01 * values[name])
    cfg = config.Config(**SMALL | {"block_t": 32})
    found, made = check(make(values), cfg)
    # strong gates have small gradients, which must not drown in those of weak ones
    for name in gates:
        actual, oracle = found.gradients[name][:, 1:19], made.oracle.gradients[name][:, 1:19]
        np.testing.assert_allclose(actual, oracle, rtol=1e-4, atol=1e-4 * np.abs(oracle).max())


@pytest.mark.parametrize("name", ["gk", "g"])
def test_a_gate_of_minus_infinity_forgets(name):
    values = arrays(18, (name,))
    values[name] = values[name].at[:, 7].set(-jnp.inf)
    cotangents = (jnp.ones((1, 18, 2, 8)), jnp.ones((1, 2, 8, 8)))
    outputs, grads = run(make(values), None, cotangents, values)
    rest = {n: x if n == "initial_state" else x[:, 7:] for n, x in values.items()}
    rest[name] = rest[name].at[:, 0].set(0.0)
    rest["initial_state"] *= 0
    expected = run(make(rest))
    np.testing.assert_allclose(outputs[0][:, 7:], expected[0], rtol=1e-5, atol=1e-5)
    assert all(np.isfinite(x).all() for x in (*outputs, *grads.values()))


STEPS = config.Config(recurrent=True, state_e=16, state_stages=1)


@pytest.mark.parametrize("t", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_few_tokens_one_by_one(t):
    check(make(arrays(t, ("g", "gk", "g_gamma"), batch=2, heads=(1, 2, 1), d=12)), STEPS)


@pytest.mark.parametrize("reverse", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_few_packed_tokens_one_by_one(reverse):
    values = arrays(9, ("gk",))
    values["initial_state"] = jax.random.normal(jax.random.key(9), (3, 2, 8, 8))
    values["cu_seqlens"] = jnp.asarray([0, 1, 1, 7])
    args = make(values, reverse=reverse)
    actual = run(args, STEPS)
    for a, e in zip(actual, SPEC.reference_fn()(args), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


def test_a_few_tokens_are_the_heuristics_choice_and_write_into_a_donated_state():
    args = make(arrays(1, ("gk",), batch=4))
    cfg = config.heuristic(args, "forward", H200)
    assert cfg.recurrent
    jaxpr = jax.make_jaxpr(lambda args: fwd.forward(args, cfg))(args).jaxpr
    (eqn,) = _triton_call.launches(jaxpr)
    ((array, out),) = eqn.params["launch"].aliases
    assert eqn.invars[array].aval.shape == eqn.outvars[out].aval.shape == (4, 2, 8, 8)
    narrow = make(arrays(1, ("gk",), batch=4, dtype=jnp.bfloat16))  # a state of another dtype
    jaxpr = jax.make_jaxpr(lambda args: fwd.forward(args, cfg))(narrow).jaxpr
    (eqn,) = _triton_call.launches(jaxpr)
    assert not eqn.params["launch"].aliases


def test_states_join_the_pieces_of_a_sequence():
    values = arrays(37, ("gk",), heads=(1, 1, 1))
    whole, last = run(make(values))
    state, found = values["initial_state"], []
    for piece in (slice(0, 18), slice(18, 37)):
        part = {n: x[:, piece] for n, x in values.items() if n != "initial_state"}
        out, state = run(make(part | {"initial_state": state}))
        found.append(out)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-5)


def test_packed_sequences_are_those_of_separate_calls():
    values = arrays(40, ("g",), heads=(1, 1, 1))
    state = jax.random.normal(jax.random.key(3), (2, 1, 8, 8))
    bounds = jnp.asarray([2, 21, 38])
    out, last = run(make(values | {"initial_state": state, "cu_seqlens": bounds}))
    for n, piece in enumerate((slice(2, 21), slice(21, 38))):
        part = {name: x[:, piece] for name, x in values.items() if name != "initial_state"}
        alone = run(make(part | {"initial_state": state[n : n + 1]}))
        np.testing.assert_allclose(out[:, piece], alone[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(last[n : n + 1], alone[1], rtol=1e-5, atol=1e-5)
    assert not out[:, :2].any()
    assert not out[:, 38:].any()


@pytest.mark.parametrize("bounds", [[0, 40, 0, 40], [-5, 30, 20, 99]])
def test_bad_bounds_stay_inside(bounds):
    """They may give wrong rows. The first have more chunks than the launch has room for."""
    values = arrays(40, (), heads=(1, 1, 1))
    values["initial_state"] = jnp.zeros((3, 1, 8, 8))
    out, last = run(make(values | {"cu_seqlens": jnp.asarray(bounds)}))
    assert np.isfinite(out).all()
    assert np.isfinite(last).all()


@pytest.mark.parametrize("op", ["gla", "lightning_attention", "linear_recurrence"])
def test_every_form_is_served(op):
    entry, spec = harness.find_entry(op, "triton/gpu"), kernel_registry.spec(op)
    for case in spec.cases():
        made = jax.eval_shape(functools.partial(spec.make, case, jnp.bfloat16), jax.random.key(0))
        reason = entry.why_not(made)
        assert reason is None or "`gv`" in reason, case.name


# One pass


def in_segments(count, **more):
    return config.Config(**SMALL | {"segments": count} | more)


@pytest.mark.parametrize(
    ("gates", "segments"),
    [((), 1), (("g_gamma",), 3), pytest.param(("g", "g_gamma"), 2, marks=pytest.mark.slow)],
)
def test_outputs_are_computed_while_states_are_carried(gates, segments):
    check(make(arrays(75, gates, heads=(1, 2, 1), d=20, e=24)), in_segments(segments))


def test_one_pass_without_an_initial_state_and_backwards_in_time():
    values = arrays(50, ("g",), batch=2, heads=(2, 1, 2))
    values.pop("initial_state")
    check(make(values, reverse=True), in_segments(2))


@pytest.mark.parametrize(("segments", "reverse"), [(1, False), (3, True)])
def test_one_pass_over_packed_sequences(segments, reverse):
    """Of 0, 3, 60 and 17 tokens, in segments of 2 chunks; others hold nan."""
    values = arrays(90, ("g",))
    values["initial_state"] = jax.random.normal(jax.random.key(3), (4, 2, 8, 8))
    values["cu_seqlens"] = jnp.asarray([4, 4, 7, 67, 84])
    nobodys = (jnp.arange(90) < 4) | (jnp.arange(90) >= 84)
    for name in ("query", "key", "value", "g"):
        hidden = nobodys.reshape(1, 90, *(1,) * (values[name].ndim - 2))
        values[name] = jnp.where(hidden, jnp.nan, values[name])
    args = make(values, reverse=reverse)
    actual = run(args, in_segments(segments))
    for a, e in zip(actual, SPEC.reference_fn()(args), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bounds", [[0, 40, 0, 40], [-5, 30, 20, 99]])
def test_bad_bounds_stay_inside_in_one_pass(bounds):
    values = arrays(40, (), heads=(1, 1, 1))
    values["initial_state"] = jnp.zeros((3, 1, 8, 8))
    args = make(values | {"cu_seqlens": jnp.asarray(bounds)})
    assert all(np.isfinite(x).all() for x in run(args, in_segments(3)))


@pytest.mark.parametrize("name", ["g", "g_gamma"])
def test_segments_after_strong_gates_keep_what_came_since(name):
    """The state before a gate of -inf, or far behind strong ones, leaves nothing, and no nan."""
    values = arrays(64, (name,))
    values[name] = jnp.full_like(values[name], -20.0)
    if name == "g":
        values[name] = (0.001 * values[name]).at[:, 30].set(-jnp.inf)
    args = make(values)
    for a, e in zip(run(args, in_segments(4)), SPEC.reference_fn()(args), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


def test_one_pass_fills_a_device_and_is_refused_where_it_cannot_serve():
    values = {"op": "lightning", "d": 128, "groups": 16}
    long, few = (SPEC.args(**shapes(t=t, **values), softmax_scale=1.0) for t in (16384, 100))
    found = [c for c in config.candidates(long, "forward", H200) if c.segments]
    assert found
    assert all(16 * (128 // c.block_e) * c.segments >= 128 for c in found)
    assert all(c.segments <= 2 for c in config.candidates(few, "forward", H200))
    assert not any(c.segments for c in config.candidates(long, "backward", H200))
    gated = SPEC.args(**shapes("gla", 16384, 128, 16), softmax_scale=1.0)
    assert not any(c.segments for c in config.candidates(gated, "forward", H200))
    assert "one gate a head" in config.misfit(gated, "forward", found[0], H200)
    with pytest.raises(UnsupportedError, match="one gate a head"):
        jax.eval_shape(lambda args: fwd.forward(args, found[0])[0], gated)
    with pytest.raises(ValueError, match=r"segments=65 must be in \[0, 64\]"):
        config.Config(segments=65)


# Memory


def shapes(op, t, d, groups, dtype="bfloat16", b=1):
    """A training call of 16 heads."""
    heads = {"query": 16, "key": groups, "value": groups}
    values = {n: jax.ShapeDtypeStruct((b, t, h, d), dtype) for n, h in heads.items()}
    if op == "gla":
        return values | {"gk": jax.ShapeDtypeStruct((b, t, 16, d), dtype)}
    return values | {"g_gamma": jax.ShapeDtypeStruct((16,), "float32")}


def size_of(x):
    return math.prod(x.shape) * x.dtype.itemsize


@pytest.mark.parametrize("groups", [16, 4])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("op", ["gla", "lightning"])
def test_temporary_memory_is_bounded(op, d, groups):
    """What all launches write besides results is at most thrice the inputs and the cotangent."""
    values = shapes(op, 16384, d, groups)
    dout = jax.ShapeDtypeStruct((1, 16384, 16, d), "bfloat16")

    args = SPEC.args(**values, softmax_scale=d**-0.5)
    first, second = (config.heuristic(args, x, H200) for x in ("forward", "backward"))
    back = lambda args, dout: bwd.backward(args, second, (), (), (dout,), frozenset(values))
    forward = jax.make_jaxpr(lambda args: fwd.forward(args, first)[0])(args).jaxpr
    backward = jax.make_jaxpr(back)(args, dout).jaxpr
    assert len(list(_triton_call.launches(forward))) == (3 if op == "gla" else 2)
    assert len(list(_triton_call.launches(backward))) == (5 if op == "gla" else 4)
    # forward's are gone when backward runs
    allowed = 3 * sum(map(size_of, (*values.values(), dout)))
    assert max(temporaries(forward), temporaries(backward)) <= allowed


def temporaries(jaxpr):
    """Bytes that launches write and that are no results."""
    written = [x for eqn in _triton_call.launches(jaxpr) for x in eqn.outvars]
    return sum(size_of(x.aval) for x in written if x not in jaxpr.outvars)


# Configurations


def test_configs_fit_the_call():
    args = make(arrays(20, ("gk",)))
    cfg = config.heuristic(args, "backward", H200)
    assert (cfg.block_t, cfg.block_d, cfg.state_d) == (32, 16, 16)
    assert config.misfit(args, "backward", cfg, H200) is None
    huge = config.Config(block_t=128, block_d=128, block_e=128, num_warps=8)
    wide = make(arrays(20, ("gk",), d=200, e=200))
    assert "shared memory" in config.misfit(wide, "backward", huge, Target("gpu", "x", "gfx942"))


def test_one_long_row_has_programs_for_every_multiprocessor():
    values = shapes("gla", 16384, 128, 16)
    cfg = config.heuristic(SPEC.args(**values, softmax_scale=1.0), "forward", H200)
    assert 16 * (128 // cfg.state_d) * (128 // cfg.state_e) >= 128


def test_the_portable_setting_is_the_chunk():
    args = make(arrays(64, ("gk",)))
    cfg = ENTRY.configure(args, "forward", FwdParams(q_blocksize=32), H200)
    assert (cfg.block_t, cfg.recurrent) == (32, False)
    with pytest.raises(ValueError, match="block_t=48 must be a power of two"):
        config.Config(block_t=48)
    with pytest.raises(ValueError, match="num_warps=3"):
        config.Config(state_warps=3)


# Long sequences, for a GPU or for `make test-all`


def oracle64(args, cotangents, wanted):
    """The oracle in float64."""
    wide = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    with jax.enable_x64(True):
        args, cotangents = jax.tree.map(wide, (args, cotangents))
        point = {n: args.arrays()[n] for n in wanted}
        outputs, pull = jax.vjp(lambda x: SPEC.reference_fn()(args.with_arrays(x)), point)
        return jax.tree.map(np.asarray, (outputs, pull(cotangents)[0]))


@pytest.mark.slow
@pytest.mark.parametrize("gates", [("gk",), ("g",), ("g_gamma",)])
def test_8192_tokens_in_bfloat16_with_gates_down_to_minus_20(gates):
    values = arrays(8192, gates, heads=(1, 1, 1), d=32, e=32, dtype=jnp.bfloat16)
    values.pop("initial_state")
    for name in set(gates) & {"g", "gk"}:
        strength = jax.random.uniform(jax.random.key(8), values[name].shape) ** 20
        values[name] = (values[name] - 20.0 * strength).astype(jnp.bfloat16)
    args = make(values)
    keys = jax.random.split(jax.random.key(4), 2)
    shape = args.query.shape
    dout = jax.random.normal(keys[0], shape, jnp.float32).astype(jnp.bfloat16)
    cotangents = (dout, jax.random.normal(keys[1], (1, 1, shape[-1], shape[-1])))
    first, second = (config.heuristic(args, x, H200) for x in ("forward", "backward"))

    @jax.jit
    def both(args, cotangents):
        outputs, residuals = fwd.forward(args, first)
        return outputs, bwd.backward(args, second, outputs, residuals, cotangents, set(values))

    outputs, grads = both(args, cotangents)
    wanted = oracle64(args, cotangents, values)
    pairs = [*zip(outputs, wanted[0], strict=True), *((grads[n], wanted[1][n]) for n in values)]
    for actual, oracle in pairs:
        actual, rounded = (np.asarray(x, np.float64) for x in (actual, oracle.astype(actual.dtype)))
        rms = lambda x: np.sqrt(np.mean(np.square(x)))
        allowed = 2 * rms(rounded - oracle) + 2 * float(jnp.finfo(jnp.bfloat16).eps) * rms(oracle)
        assert rms(actual - oracle) <= allowed


@pytest.mark.parametrize(("op", "gate"), [("lightning", "g_gamma"), ("gla", "gk")])
def test_a_config_of_more_rows_leaves_devices_idle(op, gate):
    """Fewer programs than multiprocessors made a call with one row twice as slow on an H200."""
    of = lambda b, t: SPEC.args(**shapes(op, t, 64, 16, b=b), softmax_scale=1.0)
    many, one = of(8, 2048), of(1, 16384)
    assert getattr(many, gate) is not None
    (cfg, *_) = config.candidates(many, "forward", H200)
    cfg = dataclasses.replace(cfg, state_d=64, state_e=64)
    assert config.misfit(many, "forward", cfg, H200) is None
    assert "too few programs" in config.misfit(one, "forward", cfg, H200)
    for found in config.candidates(one, "forward", H200):
        assert config.misfit(one, "forward", found, H200) is None
