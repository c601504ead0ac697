"""Calls split over devices: `mesh=`, the user's own shard_map, and arrays that are sharded."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import flash_attention
from tests import host

SPECS = (P("data", None, "model"), P("data", None, "model"), P("data", None, "model"))


def make_mesh(kind):
    types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=types, devices=jax.devices()[:4])


def arrays(groups=2, t=20):
    keys = jax.random.split(jax.random.key(0), 4)
    return (
        jax.random.normal(keys[0], (4, t, 4, 8)),
        jax.random.normal(keys[1], (4, t, groups, 8)),
        jax.random.normal(keys[2], (4, t, groups, 8)),
    ), jax.random.normal(keys[3], (4, 4, t, t))


def assert_close(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        # a gradient that cancels to nothing keeps the rounding of its terms
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5 * np.abs(e).max())


def gradient(fn, *xs):
    return jax.grad(lambda *xs: (fn(*xs) ** 2).sum(), argnums=tuple(range(len(xs))))(*xs)


MASK = np.ones((1, 4, 20, 1), bool)
MASK[:, 2, 3] = False
OPTIONS = {
    "causal": {"causal": True},
    "dropout": {"dropout_prob": 0.3, "dropout_seed": 5},
    "lengths": {"cum_seqlens_q": host.asarray([0, 20, 27, 40, 53]), "causal": True},
    "sinks_alibi": {
        "softmax_aux": host.asarray(np.arange(4.0)[:, None]),
        "alibi_slopes": host.asarray(np.arange(4.0)),
        "attention_mask": MASK,
    },
    "segments": {"q_segment_ids": host.asarray(np.arange(80).reshape(4, 20) // 7)},
}


KINDS = [
    pytest.param(kind, name, marks=pytest.mark.slow if name in slow else [])
    for kind, slow in (("auto", ("dropout", "lengths")), ("explicit", ("causal", "segments")))
    for name in OPTIONS
]


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_mesh_argument_changes_nothing(kind, name):
    xs, bias = arrays()
    call = functools.partial(flash_attention, **host.to_jax(OPTIONS[name]))
    split = functools.partial(
        call, mesh=make_mesh(kind), in_specs=SPECS, out_specs=P("data", None, "model")
    )
    assert_close(split(*xs), call(*xs))
    assert_close(gradient(lambda *x: split(*x[:3], bias=x[3]), *xs, bias),
          gradient(lambda *x: call(*x[:3], bias=x[3]), *xs, bias))  # fmt: skip


def test_one_key_head_is_replicated():
    xs, _ = arrays(groups=1)
    specs = {"query": P(None, None, ("data", "model"))}
    out = flash_attention(
        *xs, mesh=make_mesh("auto"), in_specs=specs, out_specs=P(None, None, ("data", "model"))
    )
    assert_close(out, flash_attention(*xs))


def test_lse_gets_its_own_spec():
    xs, _ = arrays()
    out_specs = (P("data", None, "model"), P("data", "model"))
    split = flash_attention(
        *xs, mesh=make_mesh("auto"), in_specs=SPECS, out_specs=out_specs, return_lse=True
    )
    assert_close(split, flash_attention(*xs, return_lse=True))


BAD = {
    "tokens": ({"in_specs": (P(None, "data"),)}, "ring_attention"),
    "head_size": ({"in_specs": {"key": P(None, None, None, "data")}}, "'d'"),
    "unknown_name": ({"in_specs": {"keys": P("data")}}, "keys"),
    "unknown_axis": ({"in_specs": (P("rows"),)}, "rows"),
    "one_spec": ({"in_specs": P("data")}, "tuple"),
    "disagreement": ({"in_specs": (P("data"), P("model"))}, "'b'"),
    "out_specs": ({"out_specs": P(None, "data")}, "out_specs"),
    "absent_array": ({"in_specs": {"bias": P("data")}}, "bias"),
    "indivisible": ({"in_specs": (P(None, None, ("data", "model")),)}, "divide|split"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_specs_are_refused(name):
    xs, _ = arrays()
    changed, words = BAD[name]
    given = {"mesh": make_mesh("auto"), "in_specs": SPECS, "out_specs": P("data", None, "model")}
    with pytest.raises((ValueError, TypeError), match=words):
        flash_attention(*xs, **given | changed)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_inside_the_users_shard_map(kind):
    """check_vma is on; keys are replicated over the model axis, so their gradient is summed."""
    mesh = make_mesh(kind)
    xs, _ = arrays(groups=1)
    specs = (P("data", None, "model"), P("data"), P("data"))
    call = functools.partial(flash_attention, causal=True, sliding_window=5)

    def local(*xs):
        value, grads = jax.value_and_grad(
            lambda *xs: jax.lax.psum((call(*xs) ** 2).sum(), ("data", "model")), argnums=(0, 1, 2)
        )(*xs)
        return value, grads

    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), specs))
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(xs, specs, strict=True)]
    expected = jax.value_and_grad(lambda *xs: (call(*xs) ** 2).sum(), argnums=(0, 1, 2))(*xs)
    with jax.set_mesh(mesh):
        assert_close(jax.jit(mapped)(*placed), expected)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_jit_over_sharded_arrays(kind):
    mesh = make_mesh(kind)
    xs, _ = arrays()
    spec = P("data", None, "model")
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in xs]
    call = functools.partial(flash_attention, causal=True, dropout_prob=0.2, dropout_seed=1)
    expected = call(*xs), gradient(call, *xs)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda *xs: (call(*xs), gradient(call, *xs)))
        actual = run(*placed)
        text = run.lower(*placed).compile().as_text()
    assert_close(actual, expected)
    assert actual[0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    assert "all-gather" not in text  # batch and heads stay where they are


def test_eager_over_sharded_arrays():
    mesh = make_mesh("auto")
    xs, _ = arrays()
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for x in xs]
    assert_close(flash_attention(*placed), flash_attention(*xs))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "spec", [P("data"), P("data", "model"), P(None, "model"), P("data", None, None, "model")]
)
def test_vmap_over_a_sharded_axis(spec, transform):
    """Gradients and tangents have the sharding that plain JAX code gives them."""
    mesh = make_mesh("explicit")
    (q, k, _), _ = arrays(groups=4, t=6)
    q = q.reshape(2, 2, 6, 4, 8)
    attend = jax.vmap(functools.partial(flash_attention, causal=True), in_axes=(0, None, None))
    loss = lambda q, k: (attend(q, k[:2], k[2:]) ** 2).sum()
    everything = lambda q, k: (
        jax.grad(loss, (0, 1))(q, k),
        jax.jvp(lambda q: attend(q, k[:2], k[2:]), (q,), (q,))[1],
    )
    expected = transform(everything)(q, k)
    with jax.set_mesh(mesh):
        split = jax.device_put(q, NamedSharding(mesh, spec))
        whole = jax.device_put(k, NamedSharding(mesh, P()))
        actual = transform(everything)(split, whole)
        (dq, _), tangent = actual
        assert jax.typeof(dq).sharding.spec == jax.typeof(split).sharding.spec
        assert jax.typeof(tangent).sharding.spec == jax.typeof(split).sharding.spec
    assert_close(actual, expected)
