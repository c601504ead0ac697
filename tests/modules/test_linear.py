"""Edges of the linear recurrence and of its special forms."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import _device
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._xla.linear_recurrence import bwd, config, fwd
from ejkernel.modules.operations.gla import gla, gla_attention
from ejkernel.modules.operations.lightning_attention import (
    lightning_attention,
    lightning_attn,
    lightning_decay,
)
from ejkernel.modules.operations.linear_recurrence import linear_recurrence


def arrays(t, *, batch=1, heads=4, groups=2, d=8, e=6, strength=1.0, seed=0):
    keys = jax.random.split(jax.random.key(seed), 7)
    shape = (batch, t, heads)
    gates = [jax.nn.log_sigmoid(jax.random.normal(k, (*shape, 1))) for k in keys[3:6]]
    return {
        "query": jax.random.normal(keys[0], (*shape, d)),
        "key": jax.random.normal(keys[1], (batch, t, groups, d)),
        "value": jax.random.normal(keys[2], (batch, t, groups, e)),
        "g": strength * gates[0][..., 0],
        "gk": strength * gates[1] * jnp.linspace(0.1, 1.0, d),
        "gv": strength * gates[2] * jnp.linspace(1.0, 0.1, e),
        "initial_state": jax.random.normal(keys[6], (batch, heads, d, e)),
    }


def oracle(op="linear_recurrence", **values):
    spec = kernel_registry.spec(op)
    return spec.reference_fn()(spec.canonicalize(spec.complete(values)))


def assert_close(actual, expected, tol=1e-5):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = max(float(np.abs(e).max(initial=0)), 1e-3)
        np.testing.assert_allclose(a, e, rtol=tol, atol=tol * scale)


@pytest.mark.parametrize("t", [0, 1, 131])
def test_any_length(t):
    values = arrays(t)
    actual = linear_recurrence(**values, return_state=True)
    assert_close(actual, oracle(**values, return_state=True))


def test_gradients_without_a_token_reach_the_state_alone():
    values = arrays(0)

    def run(values):
        return linear_recurrence(**values, return_state=True)[1].sum()

    grads = jax.grad(run)(values)
    np.testing.assert_array_equal(grads["initial_state"], 1.0)
    assert grads["query"].shape == values["query"].shape


@pytest.mark.parametrize(
    "gates",
    [
        *(pytest.param(n, marks=pytest.mark.slow) for n in (("g",), ("gk",), ("gv",))),
        ("g", "gk", "gv"),
    ],
)
def test_strong_gates_are_exact_and_so_are_weak_ones_after_them(gates):
    t = 64  # one chunk
    values = arrays(t, strength=0.01)
    for name in gates:
        strong = (jnp.arange(t) < 40).reshape(1, t, *(1,) * (values[name].ndim - 2))
        values[name] = jnp.where(strong, -20.0, values[name])
    values = {n: x for n, x in values.items() if n in gates or n not in ("g", "gk", "gv")}
    for x in jax.tree.leaves(values):
        assert np.isfinite(x).all()

    def loss(run, values):
        out, state = run(**values, return_state=True)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out * weights).sum() + jnp.sin(state).sum()

    actual = jax.jit(jax.value_and_grad(functools.partial(loss, linear_recurrence)))(values)
    wanted = jax.value_and_grad(functools.partial(loss, oracle))(values)
    assert_close(actual, wanted, 2e-5)
    # strong gates have small gradients, which must not drown in those of weak ones
    grads, expected = actual[1], wanted[1]
    for name in gates:
        assert_close(grads[name][:, 1:40], expected[name][:, 1:40], 1e-4)


@pytest.mark.parametrize(
    "name", ["gk", *(pytest.param(n, marks=pytest.mark.slow) for n in ("g", "gv"))]
)
def test_a_gate_of_minus_infinity_forgets(name):
    values = arrays(20)
    values[name] = values[name].at[:, 7].set(-jnp.inf)
    actual = linear_recurrence(**values)
    assert np.isfinite(actual).all()
    rest = {n: x if n == "initial_state" else x[:, 7:] for n, x in values.items()}
    del rest["initial_state"]
    rest[name] = rest[name].at[:, 0].set(0.0)
    assert_close(actual[:, 7:], linear_recurrence(**rest))
    grads = jax.grad(lambda v: linear_recurrence(**v).sum())(values)
    assert all(np.isfinite(x).all() for x in grads.values())


@pytest.mark.parametrize("reverse", [pytest.param(False, marks=pytest.mark.slow), True])
def test_states_join_the_pieces_of_a_sequence(reverse):
    values = arrays(90, batch=2)
    state = values.pop("initial_state")
    whole, last = linear_recurrence(
        **values, initial_state=state, reverse=reverse, return_state=True
    )
    pieces = [slice(0, 37), slice(37, 38), slice(38, 90)]
    found = {}
    for piece in reversed(pieces) if reverse else pieces:
        part = {n: x[:, piece] for n, x in values.items()}
        found[piece.start], state = linear_recurrence(
            **part, initial_state=state, reverse=reverse, return_state=True
        )
    assert_close((jnp.concatenate([found[p.start] for p in pieces], 1), state), (whole, last))


@pytest.mark.parametrize(
    "cfg", [{"block_t": 1}, {"block_t": 16, "block_n": 3}, {"block_t": 8, "recurrent": True}]
)
def test_chunks_of_any_size_agree(cfg):
    spec = kernel_registry.spec("linear_recurrence")
    args = spec.canonicalize(spec.complete(arrays(41) | {"return_state": True}))
    cfg = config.Config(**cfg)
    assert_close(jax.jit(lambda args: fwd.forward(args, cfg)[0])(args), spec.reference_fn()(args))


@pytest.mark.parametrize(
    "name",
    [
        "scalar",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("cover00", "packed", "packed_reverse")),
    ],
)
def test_token_by_token_and_chunks_have_the_same_gradients(name):
    spec = kernel_registry.spec("linear_recurrence")
    (case,) = (case for case in spec.cases() if case.name == name)
    args = spec.make(case, jnp.float32, jax.random.key(3))
    outputs = jax.eval_shape(lambda args: fwd.forward(args, config.Config())[0], args)
    cotangents = [jax.random.normal(jax.random.key(i), out.shape) for i, out in enumerate(outputs)]
    wanted = spec.differentiable & {*args.arrays()}

    @functools.partial(jax.jit, static_argnums=2)
    def gradients(args, cotangents, cfg):
        return bwd.backward(args, cfg, (), (), tuple(cotangents), wanted)

    made = [
        gradients(args, cotangents, config.Config(block_t=8, **more))
        for more in ({"recurrent": True}, {"block_n": 2})
    ]
    assert {*made[0]} == wanted
    assert_close(*made)


def test_the_form_follows_the_length_and_a_tuner_tries_both():
    spec = kernel_registry.spec("linear_recurrence")

    def call(t, **gates):
        shape = jax.ShapeDtypeStruct((1, t, 2, 16), jnp.float32)
        qkv = dict.fromkeys(("query", "key", "value"), shape)
        return spec.args(**qkv, **({"gk": shape} if gates else {}), softmax_scale=0.25)

    cpu = _device.find()
    assert cpu.kind == "cpu"
    assert config.heuristic(call(1), "bwd", cpu).recurrent
    assert config.heuristic(call(4, gk=True), "bwd", cpu).recurrent
    assert not config.heuristic(call(4), "fwd", cpu).recurrent
    assert not config.heuristic(call(4096, gk=True), "bwd", cpu).recurrent
    for t in (1, 16, 4096):
        assert {cfg.recurrent for cfg in config.candidates(call(t), "fwd", cpu)} == {True, False}


@pytest.mark.parametrize(
    ("run", "arrays_in"),
    [
        (gla, 4),
        (functools.partial(lightning_attention, layer_idx=0, num_layers=2), 3),
        (lambda q, k, v, gk, gv: linear_recurrence(q, k, v, gk=gk, gv=gv), 5),
    ],
    ids=["gla", "lightning_attention", "linear_recurrence"],
)
def test_long_rows_keep_neither_their_states_nor_their_pairs(run, arrays_in):
    t, heads, d = 8192, 2, 64
    xs = [jax.ShapeDtypeStruct((1, t, heads, d), jnp.float32)] * arrays_in
    grad = jax.grad(lambda *xs: run(*xs).sum(), argnums=tuple(range(arrays_in)))
    one = 4 * t * heads * d
    for fn in (run, grad):
        temporary = jax.jit(fn).lower(*xs).compile().memory_analysis().temp_size_in_bytes
        # the arrays in chunks and a state for each chunk; all states would be 64, pairs 128 arrays
        assert temporary < 9 * one


def test_heads_serve_groups_of_the_most_there_are():
    heads = {"query": 2, "key": 3, "value": 6}  # the gradients of such a call are in the cases
    values = arrays(11, heads=6, groups=6)
    values |= {n: values[n][:, :, :count] for n, count in heads.items()}
    del values["gk"], values["gv"]
    repeated = {n: jnp.repeat(values[n], 6 // count, axis=2) for n, count in heads.items()}
    run = jax.jit(lambda values: linear_recurrence(**values, return_state=True))
    assert_close(run(values), run(values | repeated))


def test_a_reduced_call_keeps_the_ratio_of_heads():
    spec = kernel_registry.spec("linear_recurrence")
    values = arrays(9, heads=24, groups=6) | {"value": jnp.ones((1, 9, 12, 6))}
    twin = spec.reduced(spec.canonicalize(spec.complete(values)), 16)
    assert [getattr(twin, n).shape[2] for n in ("query", "key", "value", "g")] == [8, 2, 4, 8]
    assert jax.eval_shape(spec.reference_fn(), twin)[0].shape[2] == 8


@pytest.mark.parametrize(
    "run",
    [gla, linear_recurrence, functools.partial(lightning_attention, layer_idx=0, num_layers=2)],
    ids=["gla", "linear_recurrence", "lightning_attention"],
)
def test_a_batch_of_no_row(run):
    q, k, v = (arrays(5, batch=0)[n] for n in ("query", "key", "value"))

    def total(q, k, v):
        out, state = run(q, k, v, return_state=True)
        return out.sum() + state.sum(), (out, state)

    grads, (out, state) = jax.grad(total, (0, 1, 2), has_aux=True)(q, k, v)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    assert (out.shape, state.shape) == ((0, 5, 4, 6), (0, 4, 8, 6))


@pytest.mark.parametrize("reverse", [pytest.param(False, marks=pytest.mark.slow), True])
def test_packed_sequences_are_independent(reverse):
    values = arrays(100)
    ends = [0, 0, 1, 66, 66, 91, 91]  # empty ones at every place, nine tokens of none
    state = jax.random.normal(jax.random.key(9), (len(ends) - 1, 4, 8, 6))
    values["key"] = values["key"].at[:, 95].set(jnp.nan)  # of no sequence
    values["initial_state"] = state

    @jax.jit
    def run(values, ends):
        return linear_recurrence(**values, cu_seqlens=ends, reverse=reverse, return_state=True)

    out, last = run(values, jnp.asarray(ends))
    assert (out[:, 91:] == 0).all()
    np.testing.assert_array_equal(last[0], state[0])
    for n, (start, end) in enumerate(itertools.pairwise(ends)):
        alone = {m: x[:, start:end] for m, x in values.items() if m != "initial_state"}
        alone = linear_recurrence(
            **alone, initial_state=state[n : n + 1], reverse=reverse, return_state=True
        )
        assert_close((out[:, start:end], last[n : n + 1]), alone)
    weights = jnp.sin(jnp.arange(state.size, dtype=jnp.float32)).reshape(state.shape)
    grads = jax.grad(lambda v: (run(v, jnp.asarray(ends))[1] * weights).sum())(values)
    np.testing.assert_array_equal(grads["initial_state"][0], weights[0])
    assert all(np.isfinite(x).all() for x in grads.values())
    assert (grads["value"][:, 91:] == 0).all()


def test_packed_rows_without_tokens_or_sequences():
    values = arrays(0)
    state = jnp.ones((2, 4, 8, 6))
    values["initial_state"] = state
    out, last = linear_recurrence(**values, cu_seqlens=jnp.asarray([0, 0, 0]), return_state=True)
    assert out.shape == (1, 0, 4, 6)
    np.testing.assert_array_equal(last, state)
    values = arrays(5) | {"initial_state": None}
    out, last = linear_recurrence(**values, cu_seqlens=jnp.asarray([0]), return_state=True)
    assert last.shape == (0, 4, 8, 6)
    assert (out == 0).all()


def test_special_forms_are_the_general_one():
    values = arrays(33)
    gk = values["gk"]
    qkv = [values[n] for n in ("query", "key", "value")]
    gamma = jnp.linspace(-0.4, 0.0, 4)
    assert_close(gla(*qkv, gk, gamma), linear_recurrence(*qkv, gk=gk, g_gamma=gamma))
    decays = -(8 / 4) * (1 - 2 / 5) * jnp.arange(4.0)
    assert_close(
        lightning_attention(*qkv, layer_idx=2, num_layers=5),
        linear_recurrence(*qkv, g_gamma=decays),
    )
    assert gla_attention is gla
    assert lightning_attn is lightning_attention


def test_given_decays_replace_those_of_a_layer():
    qkv = [arrays(9)[n] for n in ("query", "key", "value")]
    gamma = jnp.linspace(-0.4, -0.1, 4)
    loss = lambda run, gamma: (run(*qkv, g_gamma=gamma) ** 2).sum()
    made = [jax.value_and_grad(functools.partial(loss, run)) for run in (lightning_attention, gla)]
    assert_close(made[0](gamma), made[1](gamma))
    layer = {"layer_idx": 2, "num_layers": 5}
    given = lightning_attention(*qkv, g_gamma=lightning_decay(4, **layer))
    np.testing.assert_array_equal(given, lightning_attention(*qkv, **layer))


def test_decays_of_a_layer():
    linear = lightning_decay(3, 1, 4)
    assert linear.dtype == jnp.float32
    np.testing.assert_allclose(linear, [0.0, -2.0, -4.0], rtol=1e-6)
    exponential = lightning_decay(4, 2, 5, kind="exponential")
    slopes = -np.array([0.25, 0.0625, 0.015625, 0.00390625])
    np.testing.assert_allclose(exponential, slopes * 0.50001, rtol=1e-6)
    # the only layer has depth 0
    np.testing.assert_allclose(
        lightning_decay(2, 0, 1, kind="exponential"), slopes[1::2] * 1.00001, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({}, "needs `layer_idx` and `num_layers`, or `g_gamma`"),
        ({"layer_idx": 1}, "'num_layers': None"),
        ({"layer_idx": 1, "num_layers": 2, "g_gamma": np.zeros(4, np.float32)}, "replaces"),
        ({"num_layers": 2, "g_gamma": np.zeros(4, np.float32)}, "replaces"),
        ({"g_gamma": np.zeros(2, np.float32)}, "g_gamma"),
        ({"layer_idx": 4, "num_layers": 4}, "layer_idx"),
    ],
)
def test_one_of_layer_and_decays_is_needed(call, message):
    with pytest.raises(ValueError, match=message):
        lightning_attention(*(arrays(3)[n] for n in ("query", "key", "value")), **call)


@pytest.mark.parametrize(
    ("call", "message"), [((4, 4, 4), "layer_idx"), ((4, 0, 4, "cubic"), "kind")]
)
def test_errors_of_decays_name_the_argument(call, message):
    with pytest.raises(ValueError, match=f"`lightning_decay`: `{message}`"):
        lightning_decay(*call)


@pytest.mark.slow  # the generated tests of transformations take each op once
def test_transforms():
    values = arrays(9, batch=2)

    def run(values):
        return linear_recurrence(**values)

    stacked = {n: jnp.stack([x, 0.5 * x]) for n, x in values.items()}
    expected = jnp.stack([run(jax.tree.map(lambda x, i=i: x[i], stacked)) for i in range(2)])
    assert_close(jax.vmap(run)(stacked), expected)
    plain = lambda values: oracle(**values)[0]
    tangents = arrays(9, batch=2, seed=1)
    assert_close(jax.jvp(run, (values,), (tangents,)), jax.jvp(plain, (values,), (tangents,)))
    inner = [jax.grad(lambda q, f=f: (f(values | {"query": q}) ** 2).sum()) for f in (run, plain)]
    q = values["query"]
    assert_close(*(jax.jvp(f, (q,), (tangents["query"],)) for f in inner), 1e-4)


def test_batch_and_heads_split_over_devices():
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec("x", None, "y", None)
    states = jax.sharding.PartitionSpec("x", "y", None, None)
    values = arrays(9, batch=2)
    options = {"mesh": mesh, "in_specs": (spec,) * 3, "return_state": True}
    actual = linear_recurrence(**values, **options, out_specs=(spec, states))
    assert_close(actual, linear_recurrence(**values, return_state=True))
    qkv = {n: values[n] for n in ("query", "key", "value")} | {"layer_idx": 0, "num_layers": 3}
    actual = lightning_attention(**qkv, **options, out_specs=(spec, states))
    assert_close(actual, lightning_attention(**qkv, return_state=True))
    # one key head stays on every device, and no array has all heads
    groups = {"query": values["query"][:, :, :2], "key": values["key"][:, :, :1]}
    groups["value"] = arrays(9, batch=2, groups=4)["value"]
    actual = linear_recurrence(**groups, **options, out_specs=(spec, states))
    assert_close(actual, linear_recurrence(**groups, return_state=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": np.asarray([0, 4])}, "batch of 1"),
        ({"initial_state": np.zeros((3, 4, 8, 6), np.float32)}, "2 rows of the batch"),
        ({"gk": np.zeros((2, 9, 2, 8), np.float32)}, "gk"),
        ({"key": np.zeros((2, 9, 3, 8), np.float32)}, "3 heads of `key` must divide 4"),
        ({"value": np.zeros((2, 9, 8, 6), np.float32)}, "`g` must have 8 heads"),
        ({"initial_state": np.zeros((2, 2, 8, 6), np.float32)}, "`initial_state`"),
    ],
)
def test_errors_name_the_argument(change, message):
    with pytest.raises(ValueError, match=message):
        linear_recurrence(**(arrays(9, batch=2) | change))


def test_a_gpu_gets_as_many_chunks_at_once_as_memory_has_room_for():
    """A long call takes few of them: 64 at once were 4 GiB backward."""
    target = _device.Target("gpu", "NVIDIA H200", "9.0")
    spec = kernel_registry.spec("linear_recurrence")
    for batch, t, least in ((4, 4096, 2), (1, 16384, 8), (1, 2048, 8)):
        shape = jax.ShapeDtypeStruct((batch, t, 16, 128), jnp.bfloat16)
        names = ("query", "key", "value", "gk")
        args = spec.args(**dict.fromkeys(names, shape), softmax_scale=1.0)
        cfg = config.heuristic(args, "backward", target)
        states = 4 * batch * 16 * (t // 64) * 128 * 128
        assert cfg.block_n == least
        assert config.memory(args, "backward", cfg) - states <= 512 << 20
