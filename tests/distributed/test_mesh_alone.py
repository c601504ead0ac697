"""`mesh=` without specs: batch, then heads, and what fits neither is on every device."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel import modules
from ejkernel.errors import EjkernelWarning
from ejkernel.kernels import kernel_registry
from ejkernel.modules import flash_attention, grouped_matmul, ring_attention
from ejkernel.ops.core import sharding
from tests.kernels import harness

MESHES = {"data": 2, "model": 2, "three": 3, "four": 4, "sp": 2, "one": 1}


def make_mesh(*axes, kind=AxisType.Auto):
    sizes = tuple(MESHES[axis] for axis in axes)
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, axes, axis_types=(kind,) * len(axes), devices=devices)


def split(op, case, *axes, **changes):
    """Which mesh axes split which axis of a case."""
    spec = kernel_registry.spec(op)
    values = harness.find_case(op, case).values(jnp.float32, jax.random.key(3)) | changes
    args = spec.canonicalize(spec.unpack(spec.complete(values)))
    return sharding._spread(op, spec.layout(args), args, make_mesh(*axes))


def qkv(batch, heads, groups, t=20, d=8):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((batch, t, heads, d), (batch, t, groups, d), (batch, t, groups, d))
    names = ("query", "key", "value")
    return {n: jax.random.normal(k, s) for n, k, s in zip(names, keys, shapes, strict=True)}


PLACES = {
    "batch_then_heads": ((4, 4, 2), ("data", "model"), {"b": ("data",), "h": ("model",)}),
    "heads_first": ((8, 8, 4), ("data", "model", "sp"), {"b": ("data",), "h": ("model", "sp")}),
    "key_heads_count": ((8, 8, 2), ("data", "four"), {"b": ("data", "four")}),
    "heads_used_up": ((4, 8, 2), ("data", "model", "sp"), {"b": ("data", "sp"), "h": ("model",)}),
    "first_to_heads": ((3, 4, 2), ("data", "three"), {"h": ("data",), "b": ("three",)}),
    "replicated": ((2, 4, 2), ("data", "three"), {"b": ("data",)}),
    "nothing_fits": ((1, 4, 1), ("data", "model"), {}),
    "a_single_device_splits_nothing": ((2, 4, 2), ("one", "model"), {"h": ("model",)}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_where_mesh_axes_go(name):
    (batch, heads, groups), axes, expected = PLACES[name]
    assert split("flash_attention", "plain", *axes, **qkv(batch, heads, groups)) == expected


def test_axes_of_other_ops():
    assert split("page_attention", "plain", "data", "model") == {"b": ("data",), "h": ("model",)}
    # four heads of pages are the keys and values of two
    assert split("ragged_page_attention", "plain", "data") == {"h": ("data",)}
    assert split("ragged_page_attention", "plain", "four") == {}
    assert split("mla_page_attention", "plain", "data", "model") == {"h": ("data", "model")}
    assert split("update_paged_cache", "plain", "data") == {"g": ("data",)}
    # packed sequences are one row
    assert split("gla", "packed", "data", "one") == {"h": ("data",)}


def run(op, values, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EjkernelWarning)  # a cache that is copied
        return jax.tree.leaves(getattr(modules, op)(**values, **more))


def answers(op, values, wanted, **more):
    """Outputs, and gradients of what is wanted, in one program."""
    given = {name: values[name] for name in wanted}

    def loss(given):
        outs = run(op, values | given, **more)
        return sum(jnp.sin(x).sum() for x in outs), outs

    program = jax.jit(jax.grad(loss, has_aux=True), compiler_options=harness.QUICK)
    return program(given)


def assert_same(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        size = np.abs(np.where(np.isfinite(e), e, 0)).max()
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5 * max(size, 1e-3))


QKV = ("query", "key", "value")
CALLS = {
    # grouped heads; indices of dropout are those of the whole call; a sink a head
    "flash_attention": (
        lambda: qkv(4, 4, 2)
        | {"softmax_aux": jnp.arange(4.0)[:, None], "dropout_prob": 0.3, "dropout_seed": 5},
        (*QKV, "softmax_aux"),
    ),
    "gla": (lambda: qkv(4, 4, 2) | {"g": -jnp.ones((4, 20, 4, 8)), "return_state": True}, QKV),
    "mla_attention": (
        lambda: {
            "query": qkv(4, 4, 2)["query"],
            "key_value": jnp.sin(jnp.arange(4 * 20 * 6.0)).reshape(4, 20, 6),
            "w_kc": jnp.cos(jnp.arange(6 * 2 * 8.0)).reshape(6, 2, 8),
            "w_vc": jnp.sin(jnp.arange(6 * 2 * 8.0)).reshape(6, 2, 8),
        },
        ("query", "key_value", "w_kc"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("axes", [("data", "model"), ("three", "data")])
def test_numbers_and_gradients_are_those_of_one_device(op, axes):
    """Over a mesh axis that divides nothing, each gradient still counts once."""
    make, wanted = CALLS[op]
    values = make()
    assert_same(answers(op, values, wanted, mesh=make_mesh(*axes)), answers(op, values, wanted))


@pytest.mark.parametrize(
    "op", ["page_attention", "ragged_page_attention", "ragged_page_attention_v3"]
)
def test_pages(op):
    values = harness.find_case(op, "causal_window_sinks").values(jnp.float32, jax.random.key(3))
    mesh = make_mesh("data", "model")
    assert_same(run(op, values, mesh=mesh), run(op, values))


def test_explicit_axes():
    mesh = make_mesh("data", "model", kind=AxisType.Explicit)
    values = qkv(4, 4, 2)
    expected = flash_attention(**values, causal=True)
    assert_same(flash_attention(**values, causal=True, mesh=mesh), expected)
    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(x, NamedSharding(mesh, P("model"))) for n, x in values.items()}
        out = jax.jit(functools.partial(flash_attention, causal=True, mesh=mesh))(**placed)
    assert_same(out, expected)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None, "model")), 4)


def test_what_has_neither_batch_nor_heads_refuses():
    lhs, rhs, sizes = jnp.ones((6, 4)), jnp.ones((2, 4, 8)), jnp.asarray([2, 4])
    with pytest.raises(ValueError, match=r"`grouped_matmul`: a `mesh` alone.*in_specs.*\['n'\]"):
        grouped_matmul(lhs, rhs, sizes, mesh=make_mesh("data"))
    packed = {"cu_seqlens": jnp.asarray([0, 3, 8])}
    with pytest.raises(ValueError, match="`mean_pooling`: a `mesh` alone"):
        modules.mean_pooling(jnp.ones((1, 8, 4)), **packed, mesh=make_mesh("data"))


def test_a_ring_gives_tokens_their_axis_first():
    mesh = make_mesh("data", "sp", "model")
    values = qkv(2, 4, 2)
    more = {"mesh": mesh, "axis_name": "sp"}
    expected = answers("flash_attention", values | {"causal": True}, QKV)
    actual = answers("ring_attention", values, QKV, **more)
    assert_same(actual, expected)
    out = ring_attention(**values, **more)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "sp", "model")), 4)


def test_a_ring_says_what_its_mesh_lacks():
    with pytest.raises(ValueError, match=r"\['ring'\]; the mesh has \('data', 'sp'\)"):
        ring_attention(**qkv(2, 4, 2), mesh=make_mesh("data", "sp"))
    with pytest.raises(ValueError, match="2 devices do not divide the 19 elements of axis 't'"):
        ring_attention(**qkv(2, 4, 2, t=19), mesh=make_mesh("sp"), axis_name="sp")
