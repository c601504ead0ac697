"""Work and benchmark shapes of linear recurrences and recurrent cells."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _work
from ejkernel.kernels._specs._work import BACKWARD, CHECK, CPU, DEVICE

_GATES = ("g", "gk", "gv", "g_gamma")
_GRADIENTS = frozenset({"query", "key", "value", "initial_state", *_GATES})


def _heads(args: Any) -> int:
    return max(x.shape[2] for x in (args.query, args.key, args.value))


def flops(args: Any, direction: str) -> int:
    """Of the recurrence itself, however it is computed: 4·d·e a token and head.

    Forward adds one product to the state and reads it once. Backward makes the states again, reads
    them once for the query, adds to their gradient, and reads that for the key and the value.
    """
    batch, t, _, d = args.query.shape
    tokens = int(_work.lengths_of(args.cu_seqlens, t, batch).sum())
    return (10 if direction == BACKWARD else 4) * tokens * _heads(args) * d * args.value.shape[-1]


def _outputs(args: Any) -> int:
    (batch, t, _, d), e = args.query.shape, args.value.shape[-1]
    out = jax.ShapeDtypeStruct((batch, t, _heads(args), e), args.query.dtype)
    rows = batch if args.cu_seqlens is None else args.cu_seqlens.shape[0] - 1
    state = jax.ShapeDtypeStruct((rows, _heads(args), d, e), jnp.float32)
    return _work.size_of(out, state if args.return_state else None)


traffic = _work.streamed(_outputs, _GRADIENTS)


def gated(
    dtype: Any, key: jax.Array, b: int, t: int, h: int, d: int, gates: tuple[str, ...], more: Any
) -> dict[str, Any]:
    """Keys have length one, as models have them, and gates are below zero."""
    made = _work.normals(dtype, key, dict.fromkeys(("query", "key", "value"), (b, t, h, d)))
    norm = jnp.linalg.norm(made["key"].astype(jnp.float32), axis=-1, keepdims=True)
    made["key"] = (made["key"] / norm.astype(dtype)).astype(dtype)
    shapes = {"g": (b, t, h, d), "gk": (b, t, h, d)}
    for index, name in enumerate(gates):
        noise = jax.random.normal(jax.random.fold_in(key, index + 1), shapes[name])
        made[name] = jax.nn.log_sigmoid(noise + 2.0)
    return made | more


_LAYER = {"layer_idx": 3, "num_layers": 12}


def _rows(gates: tuple[str, ...], more: dict[str, Any]) -> Any:
    sizes = {
        "B1 T2048 H4 d64": (CPU, (1, 2048, 4, 64)),
        "B4 T4096 H16 d128": (DEVICE, (4, 4096, 16, 128)),
        "B1 T16384 H16 d128": (DEVICE, (1, 16384, 16, 128)),
    }
    rows = [(name, tag, (*size, gates, more)) for name, (tag, size) in sizes.items()]
    return _work.table(gated, rows)


# Recurrent cells


def _steps(args: Any) -> int:
    """Steps of all sequences that count."""
    lengths, (batch, t, _) = _spec.known(args.lengths), args.inputs.shape
    return batch * t if lengths is None else int(np.clip(lengths, 0, t).sum())


def _cell_flops(args: Any, direction: str) -> int:
    """Two products a step; backward one each for data and for weights."""
    count, gates, features = args.w_ih.shape
    products = 2 * count * _steps(args) * gates * (features + args.w_hh.shape[-1])
    return products * (2 if direction == BACKWARD else 1)


def _cell_outputs(args: Any) -> int:
    (batch, t, _), (count, _, d) = args.inputs.shape, args.w_hh.shape
    out = jax.ShapeDtypeStruct((batch, t, count * d), args.inputs.dtype)
    return _work.size_of(out, args.hidden, args.cell)


def cell(
    dtype: Any, key: jax.Array, cell_type: str, b: int, t: int, i: int, d: int
) -> dict[str, Any]:
    gates, bound = {"lstm": 4, "gru": 3}[cell_type] * d, d**-0.5
    weights = {"w_ih": (gates, i), "w_hh": (gates, d), "b_ih": (gates,), "b_hh": (gates,)}
    keys = jax.random.split(key, len(weights) + 1)
    made = {
        name: jax.random.uniform(k, shape, minval=-bound, maxval=bound).astype(dtype)
        for k, (name, shape) in zip(keys, weights.items(), strict=False)
    }
    states = _work.normals(dtype, keys[-1], {"inputs": (b, t, i), "h": (b, d), "c": (b, d)})
    hidden = (states["h"], states["c"]) if cell_type == "lstm" else states["h"]
    call = {"inputs": states["inputs"], "hidden": hidden, "weights": made}
    return call | {"cell_type": cell_type}


_CELLS = (
    ("LSTM B16 T128 256", CPU, ("lstm", 16, 128, 256, 256)),
    ("GRU B16 T128 256", CPU, ("gru", 16, 128, 256, 256)),
    ("LSTM B2 T5 16", CHECK, ("lstm", 2, 5, 16, 16)),
    ("GRU B2 T5 16", CHECK, ("gru", 2, 5, 16, 16)),
    ("LSTM B64 T512 1024", DEVICE, ("lstm", 64, 512, 1024, 1024)),
    ("GRU B64 T512 1024", DEVICE, ("gru", 64, 512, 1024, 1024)),
)


def _cell_cases() -> Any:
    grads = ("inputs", "hidden", "weights")
    return tuple(_work.case(name, tag, cell, *sizes, grads=grads) for name, tag, sizes in _CELLS)


_CELL_GRADIENTS = frozenset({"inputs", "hidden", "cell", "w_ih", "w_hh", "b_ih", "b_hh"})

linear_recurrence = _spec.Work(flops, traffic, _rows(("gk",), {}))
gla = _spec.Work(flops, traffic, _rows(("g",), {}))
lightning_attention = _spec.Work(flops, traffic, _rows((), _LAYER))
recurrent = _spec.Work(
    _cell_flops, _work.streamed(_cell_outputs, _CELL_GRADIENTS, saved=True), _cell_cases
)
