"""`recurrent`: torch's values, edges, steps that must not matter, transformations."""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel import _settings
from ejkernel.kernels import kernel_registry
from ejkernel.modules import Recurrent, RecurrentConfig, create_default_executor, recurrent
from tests import host

SPEC = kernel_registry.spec("recurrent")
DATA = pathlib.Path(__file__).parents[1] / "data"
LAYERS = [
    "lstm", "lstm_both", "lstm_lengths", "lstm_both_lengths", "gru", "gru_both_lengths",
    "rnn_tanh", "rnn_relu", "rnn_tanh_both_lengths",
]  # fmt: skip
LENGTHS = (5, 2, 3)  # of those layers that have them


def call(*args, **options):
    """Inputs, state and weights of a layer."""
    return host.to_jax(on_host(*args, **options))


def on_host(cell="lstm", both=False, biases=True, seed=0, sizes=(3, 5, 4, 3)):
    b, t, i, d = sizes
    rng, m = np.random.default_rng(seed), {"lstm": 4, "gru": 3, "rnn": 1}[cell] * d

    def normal(*shape):
        return host.asarray(0.7 * rng.standard_normal(shape))

    states = tuple(normal(*((2,) if both else ()), b, d) for _ in range(2))
    shapes = {"w_ih": (m, i), "w_hh": (m, d)} | ({"b_ih": (m,), "b_hh": (m,)} if biases else {})
    endings = ("", "_reverse") if both else ("",)
    weights = {name + end: normal(*shape) for end in endings for name, shape in shapes.items()}
    return normal(b, t, i), states if cell == "lstm" else states[0], weights


def reference(inputs, hidden, weights, cell_type="lstm", **options):
    values = {"inputs": inputs, "hidden": hidden, "weights": weights, "cell_type": cell_type}
    args = SPEC.canonicalize(SPEC.unpack(SPEC.complete(values | options)))
    return SPEC.finish(args, SPEC.reference_fn()(args))


def loss(fn):
    def of(*xs):
        leaves = jax.tree.leaves(fn(*xs))
        return sum(jnp.sum(jnp.sin(x + k) * jnp.arange(1, x.size + 1).reshape(x.shape))
                   for k, x in enumerate(leaves))  # fmt: skip

    return of


def assert_close(actual, expected, rtol=2e-5, atol=2e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol)


# Torch


def check_torch(name, arrays):
    """Outputs and gradients of a layer, through the public function."""
    with jax.enable_x64(True):
        parts = {n: jnp.asarray(x) for n, x in arrays.items()}
        both, lstm = "both" in name, name.startswith("lstm")
        names = "hc" if lstm else "h"
        rows = slice(None) if both else 0
        state = lambda kind: tuple(parts[f"{kind}_{name}"][rows] for name in names)
        only = lambda xs: xs if lstm else xs[0]
        known = ("in_inputs", "in_h", "in_c")
        weights = {n[3:]: x for n, x in parts.items() if n.startswith("in_") and n not in known}
        options = {"bidirectional": both, "activation": "relu" if "relu" in name else "tanh"}
        if "lengths" in name:
            options["lengths"] = jnp.asarray(LENGTHS)
        fn = functools.partial(recurrent, cell_type=name.split("_")[0], **options)
        outs, pull = jax.vjp(fn, parts["in_inputs"], only(state("in")), weights)
        assert_close(outs, (parts["out_out"], only(state("out"))), 0, 1e-12)
        dx, dstate, dweights = pull((parts["ct_out"], only(state("ct"))))
        expected = {n: parts[f"grad_{n}"] for n in weights}
        assert_close((dx, dstate), (parts["grad_inputs"], only(state("grad"))), 0, 1e-12)
        assert_close(dweights, expected, 0, 1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_that_torch_gave(name):
    with np.load(DATA / "recurrent.npz") as file:
        found = {n.partition("/")[2]: file[n] for n in file.files if n.partition("/")[0] == name}
    assert len(found) > 10
    check_torch(name, found)


@pytest.mark.parametrize("name", LAYERS)
def test_torch_itself(name):
    pytest.importorskip("torch")
    source = importlib.util.spec_from_file_location("make_recurrent", DATA / "make_recurrent.py")
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    assert LENGTHS == module.LENGTHS
    assert [*module.LAYERS] == LAYERS
    check_torch(name, module.solve(name, seed=101))


# Values by hand, and edges


ONES = {"w_ih": host.ones((1, 1)), "w_hh": host.ones((1, 1))}
STEPS = host.asarray([[1.0, 2.0, 4.0], [8.0, jnp.nan, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])


def test_a_sum_by_hand():
    """h[t] = x[t] + h[t-1]; lengths 3, 1 and 0, from the sequence's own end when reversed."""
    add = functools.partial(
        recurrent, weights=host.to_jax(ONES), cell_type="rnn", activation="identity"
    )
    lengths, start = jnp.asarray([3, 1, 0]), jnp.asarray([[10.0], [20.0], [30.0]])
    out, last = add(jnp.asarray(STEPS)[..., None], start, lengths=lengths)
    np.testing.assert_array_equal(out[..., 0], [[11, 13, 17], [28, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(last[:, 0], [17, 28, 30])
    out, last = add(jnp.asarray(STEPS)[..., None], start, lengths=lengths, reverse=True)
    np.testing.assert_array_equal(out[..., 0], [[17, 16, 14], [28, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(last[:, 0], [17, 28, 30])


def test_both_ways_are_a_forward_and_a_reverse_layer():
    x, (h, c), weights = call(both=True)
    out, (hs, cs) = recurrent(x, (h, c), weights, bidirectional=True)
    for p, end in enumerate(("", "_reverse")):
        own = {n: weights[n + end] for n in ("w_ih", "w_hh", "b_ih", "b_hh")}
        one, (h1, c1) = recurrent(x, (h[p], c[p]), own, reverse=p == 1)
        assert_close((one, h1, c1), (out[..., 3 * p : 3 * p + 3], hs[p], cs[p]))


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_absent_states_and_biases_are_zeros(cell):
    x, state, weights = call(cell, biases=False)
    m = weights["w_ih"].shape[0]
    full = weights | {"b_ih": jnp.zeros(m), "b_hh": jnp.zeros(m)}
    zeros = jax.tree.map(jnp.zeros_like, state)
    assert_close(recurrent(x, None, weights, cell), recurrent(x, zeros, full, cell))
    one = weights | {"b_hh": full["b_hh"] + 0.5, "b_ih": None}
    assert_close(recurrent(x, state, one, cell), reference(x, state, one, cell))


def test_no_steps_and_no_rows():
    x, state, weights = call("gru")
    out, last = recurrent(x[:, :0], state, weights, "gru")
    assert out.shape == (3, 0, 3)
    np.testing.assert_array_equal(last, state)
    out, last = recurrent(x[:0], state[:0], weights, "gru")
    assert (out.shape, last.shape) == ((0, 5, 3), (0, 3))
    gradients = jax.grad(lambda w: recurrent(x[:, :0], state, w, "gru")[1].sum())(weights)
    assert all((g == 0).all() for g in jax.tree.leaves(gradients))


def test_the_state_keeps_its_own_dtype():
    x, state, weights = call()
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (x, weights))
    out, last = recurrent(half[0], state, half[1])
    assert out.dtype == jnp.bfloat16
    assert {s.dtype for s in last} == {jnp.dtype(jnp.float32)}
    # the state is not rounded between steps
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), half)
    assert_close(last, recurrent(wide[0], state, wide[1])[1], 0, 1e-6)


WAYS = {"forward": {}, "reverse": {"reverse": True}, "both": {"bidirectional": True}}


@pytest.mark.parametrize(
    ("cell", "way"), [("lstm", "forward"), ("lstm", "both"), ("gru", "reverse"), ("rnn", "both")]
)
def test_steps_beyond_the_lengths_never_matter(cell, way):
    x, state, weights = call(cell, both=way == "both")
    options = WAYS[way] | {"lengths": jnp.asarray([3, 0, 5])}
    fn = functools.partial(recurrent, cell_type=cell, **options)
    gradient = jax.jit(jax.value_and_grad(loss(fn), argnums=(0, 1, 2)))
    beyond = (jnp.arange(5) >= options["lengths"][:, None])[..., None]
    clean = gradient(jnp.where(beyond, 0.0, x), state, weights)
    assert_close(gradient(jnp.where(beyond, jnp.nan, x), state, weights), clean, 0, 0)
    assert (jnp.where(beyond, clean[1][0], 0) == 0).all()
    out, last = fn(jnp.where(beyond, jnp.inf, x), state, weights)
    assert (jnp.where(beyond, out, 0) == 0).all()
    row = lambda s: s[..., 1, :]
    assert_close(jax.tree.map(row, last), jax.tree.map(row, state), 0, 0)


def test_long_sequences_keep_no_more_than_gates_and_states():
    b, t, i, d = 2, 4096, 16, 32
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), call(sizes=(b, t, i, d))
    )
    gradient = jax.jit(jax.grad(lambda *xs: recurrent(*xs)[0].sum(), argnums=(0, 1, 2)))
    used = gradient.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    # what forward keeps, [b, t, (4 + 1 + 1) d], outputs and their cotangents
    assert used < 1.2 * 4 * b * t * d * (6 + 2)
    forward = jax.jit(recurrent).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert forward < 1.2 * 4 * b * t * d * 2  # states and the projections of a block


@pytest.mark.parametrize(("cell", "way"), [("lstm", "both"), ("gru", "reverse")])
def test_steps_are_cut_into_blocks(cell, way):
    """37 steps of 80 sequences: two blocks of 16, and 5 steps more."""
    xs = call(cell, both=way == "both", sizes=(80, 37, 2, 2))
    lengths = jnp.asarray(np.random.default_rng(1).integers(0, 38, 80))
    options = WAYS[way] | {"cell_type": cell, "lengths": lengths}

    def both(fn):
        fn = functools.partial(fn, **options)
        return jax.jit(lambda *xs: (fn(*xs), jax.grad(loss(fn), argnums=(0, 1, 2))(*xs)))(*xs)

    (outs, gradients), (wanted, expected) = both(recurrent), both(reference)
    assert_close(outs, wanted)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    assert_close(gradients, expected, 0, 1e-5 * scale)


# Activations


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_callables_are_as_good_as_names(cell):
    xs = call(cell)
    gates = {"gate_activation": lambda x: 1 / (1 + jnp.exp(-x))}
    fn = functools.partial(recurrent, cell_type=cell)
    by_name = jax.value_and_grad(loss(fn), argnums=(0, 1, 2))(*xs)
    fn = functools.partial(fn, activation=jnp.tanh, **gates)
    assert_close(jax.value_and_grad(loss(fn), argnums=(0, 1, 2))(*xs), by_name, 2e-4, 2e-4)


def test_every_name_of_an_activation():
    x, state, weights = call("rnn")
    functions = {
        "tanh": np.tanh,
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "relu": lambda x: np.maximum(x, 0),
        "softsign": lambda x: x / (1 + np.abs(x)),
        "identity": lambda x: x,
    }
    before = x[:, 0] @ weights["w_ih"].T + state @ weights["w_hh"].T
    before = before + weights["b_ih"] + weights["b_hh"]
    for name, f in functions.items():
        _, last = recurrent(x[:, :1], state, weights, "rnn", activation=name)
        np.testing.assert_allclose(last, f(np.asarray(before)), rtol=2e-5, atol=1e-6)


# Transformations


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_forward_mode_and_second_order(cell):
    xs, directions = call(cell, sizes=(2, 3, 2, 2)), call(cell, seed=1, sizes=(2, 3, 2, 2))
    lengths = jnp.asarray([3, 2])
    ours, wanted = (
        functools.partial(fn, cell_type=cell, lengths=lengths) for fn in (recurrent, reference)
    )
    assert_close(jax.jvp(ours, xs, directions), jax.jvp(wanted, xs, directions))

    def twice(fn):
        return jax.jit(lambda xs, ds: jax.jvp(jax.grad(loss(fn), argnums=(0, 1, 2)), xs, ds))

    assert_close(twice(ours)(xs, directions), twice(wanted)(xs, directions), 1e-4, 1e-4)


def test_vmap_over_layers():
    layers = [call("gru", seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    gradient = jax.grad(loss(functools.partial(recurrent, cell_type="gru")), argnums=(0, 1, 2))
    each = jax.tree.map(lambda *xs: jnp.stack(xs), *(gradient(*layer) for layer in layers))
    assert_close(jax.jit(jax.vmap(gradient))(*stacked), each, 1e-4, 1e-4)


def test_traced_lengths_need_no_host():
    x, state, weights = call()
    run = jax.jit(lambda lengths: recurrent(x, state, weights, lengths=lengths))
    for lengths in ([1, 2, 3], [5, 0, 4]):
        expected = reference(x, state, weights, lengths=jnp.asarray(lengths))
        assert_close(run(jnp.asarray(lengths)), expected)


def test_the_batch_is_split_over_devices():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    x, state, weights = call(both=True, sizes=(4, 5, 3, 2))
    lengths, spec = jnp.asarray([5, 1, 0, 3]), PartitionSpec("data")
    split = PartitionSpec(None, "data")
    options = {"bidirectional": True, "lengths": lengths}
    on_mesh = functools.partial(
        recurrent, mesh=mesh, in_specs=(spec,), out_specs=(spec, split, split), **options
    )
    gradients = [
        jax.jit(jax.value_and_grad(loss(fn), argnums=(0, 1, 2)))(x, state, weights)
        for fn in (on_mesh, functools.partial(recurrent, **options))
    ]
    assert_close(*gradients, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"splits axis 't' of `inputs`.*split the batch"):
        recurrent(x, state, weights, mesh=mesh, in_specs=(PartitionSpec(None, "data"),),
                  out_specs=(spec, split, split), bidirectional=True)  # fmt: skip


def test_other_ways_to_call_it():
    x, state, weights = call(both=True)
    expected = recurrent(x, state, weights, bidirectional=True)
    made = create_default_executor()(Recurrent(), x, state, weights, bidirectional=True)
    assert_close(made, expected)
    run = kernel_registry.get("recurrent", "xla")
    assert_close(run(x, state, weights, bidirectional=True), expected)
    assert_close(
        recurrent(x, state, weights, bidirectional=True, cfg=RecurrentConfig(platform="xla")),
        expected,
    )
    values = SPEC.complete({"inputs": x, "hidden": state, "weights": weights})
    args = SPEC.canonicalize(SPEC.unpack(values | {"bidirectional": True}))
    again = SPEC.publish(args)
    assert_close(again["weights"], weights, 0, 0)
    assert_close(recurrent(**again), expected, 0, 0)


@pytest.mark.parametrize("both", [False, True])
def test_torchs_names_of_weights(both):
    x, state, weights = call(both=both)

    named = {}
    for name, array in weights.items():
        base = name.removesuffix("_reverse")
        spelled = {"w": "weight", "b": "bias"}[base[0]] + base[1:] + "_l0"
        named[spelled + name.removeprefix(base)] = array
    made = recurrent(x, state, named, bidirectional=both)
    assert_close(made, recurrent(x, state, weights, bidirectional=both), 0, 0)


def test_lengths_are_checked_when_debugging():
    x, state, weights = call()
    with (
        _settings.override(debug=True),
        pytest.raises(ValueError, match=r"`lengths` must be from 0 to the 5 steps.*\[6, 1, 1\]"),
    ):
        recurrent(x, state, weights, lengths=jnp.asarray([6, 1, 1]))
