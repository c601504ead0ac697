"""The calls of recurrent cells that tests, tuning and benchmarks make."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _cases, _spec

GATES = {"lstm": 4, "gru": 3, "rnn": 1}

# b, t, i, d and lengths: odd sizes, one step, an empty sequence
_SHAPES = {
    "small": (3, 7, 5, 4, (7, 0, 3)),
    "one": (1, 1, 3, 2, (1,)),
    "wide": (2, 5, 9, 6, (2, 5)),
}


def _swish(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


def _steep(x: jax.Array) -> jax.Array:
    return 0.5 + 0.5 * jnp.tanh(x)


_CHOICES = {
    "cell_type": [*GATES],
    "way": ["forward", "reverse", "both"],
    "lengths": [False, True],
    "biases": [True, False],
    "activation": ["tanh", "softsign", _swish],
}


def make_weights(
    keys: Iterator[jax.Array], sizes: tuple[int, int, int], biases: bool, endings: Sequence[str]
) -> dict[str, jax.Array]:
    """Random weights; `sizes` are those of all gates, of inputs and of states."""
    m, i, d = sizes
    shapes: dict[str, tuple[int, ...]] = {"w_ih": (m, i), "w_hh": (m, d)}
    shapes |= {"b_ih": (m,), "b_hh": (m,)} if biases else {}
    return {
        name + ending: 0.6 * jax.random.normal(next(keys), shape)
        for ending in endings
        for name, shape in shapes.items()
    }


def _values(row: dict[str, Any], dtype: Any, key: jax.Array) -> dict[str, Any]:
    b, t, i, d, lengths = _SHAPES[row.get("shape", "small")]
    cell_type, both = row.get("cell_type", "lstm"), row.get("way") == "both"
    keys = iter(jax.random.split(key, 12))
    states = [jax.random.normal(next(keys), ((2,) if both else ()) + (b, d)) for _ in range(2)]
    sizes, endings = (GATES[cell_type] * d, i, d), ("", "_reverse") if both else ("",)
    values: dict[str, Any] = {
        "inputs": jax.random.normal(next(keys), (b, t, i)),
        "hidden": tuple(states) if cell_type == "lstm" else states[0],
        "weights": make_weights(keys, sizes, row.get("biases", True), endings),
    }
    values = jax.tree.map(lambda x: x.astype(dtype), values)
    values |= {"cell_type": cell_type, "bidirectional": both}
    values |= {"reverse": row.get("way") == "reverse", "activation": row.get("activation", "tanh")}
    if values["activation"] == "softsign" and cell_type != "rnn":
        values["gate_activation"] = _steep
    if row.get("lengths"):
        values["lengths"] = jnp.asarray(lengths, jnp.int32)
    return values


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    tags = frozenset({"core", "full"})
    rows: dict[str, dict[str, Any]] = {"plain": {}, "cover00": {"way": "both", "lengths": True}}
    for number, row in enumerate(_cases.pairwise(_CHOICES, seed=3)[:10], 1):
        rows[f"cover{number:02d}"] = row | {"shape": [*_SHAPES][number % 3]}
    return tuple(
        _spec.Case(name, functools.partial(_values, row), tags) for name, row in rows.items()
    )


def changes() -> dict[str, dict[str, Any]]:
    """For each option, arguments that set it on the plain case; tests look for the effect."""
    _, _, i, d, lengths = _SHAPES["small"]
    keys = iter(jax.random.split(jax.random.key(6), 8))
    # two directions of half the size, so that outputs have one shape
    halves = make_weights(keys, (2 * d, i, d // 2), False, ("", "_reverse"))
    return {
        "cell_type": _values({"cell_type": "gru"}, jnp.float32, jax.random.key(2)),
        "bidirectional": {"bidirectional": True, "hidden": None, "weights": halves},
        "activation": {"activation": "identity"},
        "gate_activation": {"gate_activation": "softsign"},
        "lengths": {"lengths": jnp.asarray(lengths, jnp.int32)},
        "reverse": {"reverse": True},
    }


def examples(args: Any) -> dict[str, jax.Array]:
    """Most steps count; weights of the size that models start with."""
    batch, t, _ = args.inputs.shape
    made = {"lengths": t - jnp.arange(batch, dtype=jnp.int32) % max(t // 4, 1)}
    bound = max(args.w_hh.shape[2], 1) ** -0.5
    for index, name in enumerate(("w_ih", "w_hh", "b_ih", "b_hh")):
        if (weight := getattr(args, name)) is not None:
            key = jax.random.key(41 + index)
            made[name] = jax.random.uniform(key, weight.shape, minval=-bound, maxval=bound)
    return made
