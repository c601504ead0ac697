"""The cases of the linear recurrence and of the ops that are special forms of it."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _spec

# (batch, t, heads, d, e): odd lengths, d != e; the first can be packed
_SHAPES = {"plain": (1, 21, 4, 8, 12), "rows": (2, 19, 2, 12, 8)}
_HEADS = {"plain": (4, 2, 2), "rows": (2, 2, 2)}  # of queries, keys and values
_PACKED = (0, 5, 5, 16, 19, 19)  # an empty sequence, one of two chunks, tokens of none


def _gate(key: jax.Array, shape: tuple[int, ...], strong: bool, dtype: Any) -> jax.Array:
    """Log gates of about -0.1; strong ones are -20 at every third step."""
    gate = jax.nn.log_sigmoid(jax.random.normal(key, shape) + 2.0)
    if strong:
        third = jnp.arange(shape[1]) % 3 == 1
        gate = jnp.where(third.reshape(-1, *(1,) * (len(shape) - 2))[None], -20.0, gate)
    return gate.astype(dtype)


def _values(row: dict[str, Any], dtype: Any, key: jax.Array) -> dict[str, Any]:
    """Public arguments of one row of options; every array from a key of its own."""
    shape = row.get("shape", "plain")
    batch, t, heads, d, e = _SHAPES[shape]
    q_heads, k_heads, v_heads = row.get("heads", _HEADS[shape])
    keys = iter(jax.random.split(key, 10))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

    values: dict[str, Any] = {
        "query": normal(batch, t, q_heads, d),
        "key": normal(batch, t, k_heads, d),
        "value": normal(batch, t, v_heads, e),
    }
    shapes = {"g": (batch, t, heads), "gk": (batch, t, heads, d), "gv": (batch, t, heads, e)}
    for name in row.get("gates", ()):
        gate = _gate(next(keys), shapes[name], row.get("strong", False), dtype)
        values[row.get("rename", {}).get(name, name)] = gate
    if row.get("gamma"):
        values["g_gamma"] = -0.3 * jnp.arange(1, heads + 1).astype(dtype) / heads
    rows = batch
    if row.get("packed"):
        values["cu_seqlens"] = jnp.asarray(_PACKED, jnp.int32)
        rows = len(_PACKED) - 1
    if row.get("state"):
        values |= {"initial_state": normal(rows, heads, d, e), "return_state": True}
    if row.get("reverse"):
        values["reverse"] = True
    return values | row.get("more", {})


def _table(rows: dict[str, dict[str, Any]]) -> Sequence[_spec.Case]:
    tags = frozenset({"core", "full"})
    return tuple(
        _spec.Case(name, functools.partial(_values, row), tags) for name, row in rows.items()
    )


def linear_recurrence() -> Sequence[_spec.Case]:
    mamba = {"heads": (2, 1, 4)}  # keys and queries serve groups of values
    scaled = {"more": {"softmax_scale": 0.5}}
    return _table(
        {
            "plain": {},
            "cover00": {"shape": "rows", "gates": ("g", "gk", "gv"), "gamma": True, "state": True},
            "scalar": {"gates": ("g",), "gamma": True, "reverse": True, "state": True} | mamba,
            "columns": {"shape": "rows", "gates": ("gv",), "state": True, "reverse": True},
            "scalar_columns": {"gates": ("g", "gv"), "strong": True, "state": True},
            "strong": {"shape": "rows", "gates": ("gk",), "strong": True, "state": True} | scaled,
            "packed": {"gates": ("gk", "gv"), "packed": True, "state": True},
            "packed_reverse": {"gates": ("g",), "packed": True, "state": True, "reverse": True},
        }
    )


def gla() -> Sequence[_spec.Case]:
    rename = {"rename": {"gk": "g"}}
    return _table(
        {
            "plain": {},
            "cover00": {"shape": "rows", "gates": ("gk",), "gamma": True, "state": True} | rename,
            "decay": {"gamma": True, "reverse": True, "more": {"softmax_scale": 0.5}},
            "strong": {"gates": ("gk",), "strong": True, "state": True} | rename,
            "packed": {"gates": ("gk",), "packed": True, "state": True, "reverse": True} | rename,
        }
    )


def lightning_attention() -> Sequence[_spec.Case]:
    more = {"more": {"layer_idx": 1, "num_layers": 4}}
    return _table(
        {
            "plain": more,
            "cover00": {"shape": "rows", "gamma": True, "state": True, "reverse": True},
            "packed": {
                "packed": True,
                "state": True,
                "more": more["more"] | {"softmax_scale": 0.5},
            },
        }
    )


def _common_changes() -> dict[str, dict[str, Any]]:
    _, _, heads, d, e = _SHAPES["plain"]
    return {
        "softmax_scale": {"softmax_scale": 0.7},
        "initial_state": {"initial_state": jax.random.normal(jax.random.key(7), (1, heads, d, e))},
        "reverse": {"reverse": True},
        "cu_seqlens": {"cu_seqlens": jnp.asarray(_PACKED, jnp.int32)},
        "return_state": {"return_state": True},
    }


def linear_recurrence_changes() -> dict[str, dict[str, Any]]:
    batch, t, heads, d, e = _SHAPES["plain"]
    keys = jax.random.split(jax.random.key(23), 3)
    shapes = {"g": (batch, t, heads), "gk": (batch, t, heads, d), "gv": (batch, t, heads, e)}
    gates = {
        name: {name: _gate(key, shape, False, jnp.float32)}
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return gates | {"g_gamma": {"g_gamma": -jnp.linspace(0.1, 0.5, heads)}} | _common_changes()


def gla_changes() -> dict[str, dict[str, Any]]:
    made = linear_recurrence_changes()
    return {"g": {"g": made["gk"]["gk"]}, "g_gamma": made["g_gamma"]} | _common_changes()


def lightning_attention_changes() -> dict[str, dict[str, Any]]:
    decays = linear_recurrence_changes()["g_gamma"] | {"layer_idx": None, "num_layers": None}
    layer = {"layer_idx": {"layer_idx": 3}, "num_layers": {"num_layers": 8}}
    return layer | {"g_gamma": decays} | _common_changes()
