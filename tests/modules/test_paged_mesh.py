"""Paged ops with their heads split over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.errors import EjkernelWarning
from ejkernel.modules import (
    ragged_page_attention,
    ragged_page_attention_v3,
    update_kv_pages,
    update_latent_pages,
    update_paged_cache,
)
from tests.kernels import harness

HEADS, PAGES = P(None, "x"), P(None, None, "x")
# op -> specs by name, specs of the outputs
SPLIT = {
    ragged_page_attention: ({"queries": HEADS}, (HEADS, HEADS)),
    ragged_page_attention_v3: (
        {"queries": HEADS, "keys": HEADS, "kv_pages": PAGES},
        (HEADS, PAGES, HEADS),
    ),
}

pytestmark = pytest.mark.filterwarnings(f"ignore::{EjkernelWarning.__module__}.EjkernelWarning")


def make_mesh(count):
    return jax.make_mesh((count,), ("x",), devices=jax.devices()[:count])


def values(op, name="plain"):
    made = harness.find_case(op.__name__, name).values(jnp.float32, jax.random.key(3))
    return made | {"return_lse": True}


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        a, e = (np.asarray(x, np.float32) for x in (a, e))
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["plain", pytest.param("causal_window_sinks", marks=pytest.mark.slow), "float8_scales"],
)
@pytest.mark.parametrize("op", SPLIT)
def test_heads_over_two_devices(op, name):
    """Four query heads and two key heads."""
    call, mesh = values(op, name), make_mesh(2)
    in_specs, out_specs = SPLIT[op]
    actual = op(**call, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    assert_same(actual, op(**call))
    for x, spec in zip(actual, out_specs, strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


def one_key_head(op):
    """Eight query heads over one key head."""
    call = values(op)
    call["queries"] = jnp.concatenate([call["queries"], 2 * call["queries"]], axis=1)
    call["kv_pages"] = call["kv_pages"][:, :, :2]
    return call | {name: call[name][:, :1] for name in ("keys", "values") if name in call}


def test_one_key_head_stays_whole():
    call, mesh = one_key_head(ragged_page_attention), make_mesh(8)
    given = {"mesh": mesh, "in_specs": {"queries": HEADS}, "out_specs": (HEADS, HEADS)}
    assert_same(ragged_page_attention(**call, **given), ragged_page_attention(**call))
    with pytest.raises(ValueError, match="'g2' of `kv_pages`"):
        ragged_page_attention(**call, **given | {"in_specs": {"kv_pages": PAGES}})


def test_one_key_head_has_one_writer():
    call, mesh = one_key_head(ragged_page_attention_v3), make_mesh(2)
    expected = ragged_page_attention_v3(**call)
    in_specs, out_specs = SPLIT[ragged_page_attention_v3]
    whole = {"in_specs": {"queries": HEADS}, "out_specs": (HEADS, P(), HEADS)}
    with pytest.raises(ValueError, match="repeat it, one a device"):
        ragged_page_attention_v3(**call, mesh=mesh, **whole)
    repeated = {
        "keys": jnp.repeat(call["keys"], 2, axis=1),
        "values": jnp.repeat(call["values"], 2, axis=1),
        "kv_pages": jnp.tile(call["kv_pages"], (1, 1, 2, 1)),
    }
    out, pages, lse = ragged_page_attention_v3(
        **call | repeated, mesh=mesh, in_specs=in_specs, out_specs=out_specs
    )
    assert_same((out, pages[:, :, :2], lse), expected)


def test_keys_are_not_parted_from_their_values():
    """Four heads of pages over four devices would give one the keys and one the values."""
    call, mesh = values(ragged_page_attention), make_mesh(4)
    in_specs, out_specs = SPLIT[ragged_page_attention]
    with pytest.raises(ValueError, match="the number of devices must divide the key heads"):
        ragged_page_attention(**call, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def test_tokens_and_head_size_stay_whole():
    call, mesh = values(ragged_page_attention_v3), make_mesh(2)
    for spec, axis in ((P("x"), "n"), (P(None, None, "x"), "d")):
        with pytest.raises(ValueError, match=f"splits axis '{axis}' of `queries`"):
            ragged_page_attention_v3(
                **call, mesh=mesh, in_specs={"queries": spec}, out_specs=(HEADS, PAGES, HEADS)
            )


def test_split_pages_are_donated():
    call, mesh = values(ragged_page_attention_v3), make_mesh(2)
    in_specs, out_specs = SPLIT[ragged_page_attention_v3]
    expected = ragged_page_attention_v3(**call)
    pages = call.pop("kv_pages")
    options = {name: call.pop(name) for name in list(call) if not hasattr(call[name], "shape")}
    placed = jax.device_put(pages, NamedSharding(mesh, PAGES))
    step = jax.jit(
        lambda pages, call: ragged_page_attention_v3(
            kv_pages=pages, **call, **options, mesh=mesh, in_specs=in_specs, out_specs=out_specs
        ),
        donate_argnums=0,
    )
    compiled = step.lower(placed, call).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= pages.nbytes // 2
    assert "all-gather" not in compiled.as_text()
    assert_same(compiled(placed, call), expected)
    assert placed.is_deleted()


def test_update_over_two_devices():
    made = harness.find_case("update_paged_cache", "plain").values(jnp.float32, jax.random.key(3))
    given = {"mesh": make_mesh(2), "in_specs": (HEADS, HEADS), "out_specs": (HEADS, HEADS)}
    assert_same(update_paged_cache(**made, **given), update_paged_cache(**made))
    caches = {name: made.pop(name) + 0 for name in ("key_cache", "value_cache")}
    expected = update_paged_cache(**caches, **made)
    assert_same(update_paged_cache(**caches, **made, **given, donate_cache=True), expected)


def test_update_of_interleaved_pages_over_two_devices():
    made = harness.find_case("update_kv_pages", "plain").values(jnp.float32, jax.random.key(3))
    given = {"mesh": make_mesh(2), "in_specs": (PAGES, HEADS, HEADS), "out_specs": PAGES}
    np.testing.assert_array_equal(update_kv_pages(**made, **given), update_kv_pages(**made))
    with pytest.raises(ValueError, match="4 devices do not divide the 2 elements of axis 'g'"):
        update_kv_pages(**made, **given | {"mesh": make_mesh(4)})
    one = made | {"kv_pages": made["kv_pages"][:, :, :2]}
    one |= {name: made[name][:, :1] for name in ("keys", "values")}
    with pytest.raises(ValueError, match="'g2' of `kv_pages`"):
        update_kv_pages(**one, **given)


def test_latent_pages_are_not_split():
    made = harness.find_case("update_latent_pages", "plain").values(jnp.float32, jax.random.key(3))
    given = {"mesh": make_mesh(2), "in_specs": (P("x"),), "out_specs": P("x")}
    with pytest.raises(ValueError, match="keep a copy of the pages on each device"):
        update_latent_pages(**made, **given)
