"""One step of each cell, and its transpose: all that is between two matrix products.

`x` and `y` are the projections [b, m] of a step's input and of the state before it. A step gives
the new state and the columns that its transpose needs besides the old state; the transpose gives
the gradients of columns, in the order of `_shared/cells.py`, and of the old state, without the
share that goes through `y`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._specs import recurrent as spec

State = tuple[jax.Array, ...]


class Activations(NamedTuple):
    """The two functions of a call; callables may be any that JAX differentiates."""

    cell: Callable[[jax.Array], jax.Array]
    gate: Callable[[jax.Array], jax.Array]


class Cell(NamedTuple):
    """A cell: the step, its transpose, and columns of the residual `gates`, see the spec."""

    step: Callable[[Activations, jax.Array, jax.Array, State], tuple[State, jax.Array]]
    back: Callable[[Activations, jax.Array, State, State], tuple[jax.Array, Any]]
    kept: int


def of(args: Any) -> tuple[Cell, Activations]:
    """The cell and the functions of a call."""
    functions = Activations(spec.function(args.activation), spec.function(args.gate_activation))
    return _CELLS[args.cell_type], functions


def _with_slope(f: Callable[..., Any], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(f, (x,), (jnp.ones_like(x),))


def _lstm_gates(functions: Activations, x: jax.Array) -> jax.Array:
    # both functions of all columns and a choice: one pass over memory, where four of a quarter each
    # make an LSTM step on CPU a fifth slower (256 x 16 x 256 steps, batch, features; AMD EPYC)
    is_cell = np.arange(x.shape[-1]) // (x.shape[-1] // 4 or 1) == 2
    return jnp.where(is_cell, functions.cell(x), functions.gate(x))


def _lstm(functions: Activations, x: jax.Array, y: jax.Array, state: State) -> Any:
    kept = x + y
    i, f, g, o = jnp.split(_lstm_gates(functions, kept), 4, axis=-1)
    c = f * state[1] + i * g
    return (o * functions.cell(c), c), kept


def _lstm_back(functions: Activations, kept: jax.Array, state: State, grad: State) -> Any:
    (_, c), (dh, dc) = state, grad
    gates, slopes = _with_slope(lambda x: _lstm_gates(functions, x), kept)
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    a, slope = _with_slope(functions.cell, f * c + i * g)
    dc = dc + dh * o * slope
    d = jnp.concatenate([dc * g, dc * c, dc * i, dh * a], axis=-1) * slopes
    return d, (None, dc * f)


def _gru(functions: Activations, x: jax.Array, y: jax.Array, state: State) -> Any:
    d = state[0].shape[-1]
    before, xn, yn = x[:, : 2 * d] + y[:, : 2 * d], x[:, 2 * d :], y[:, 2 * d :]
    r, z = jnp.split(functions.gate(before), 2, axis=-1)
    n = functions.cell(xn + r * yn)
    return ((1 - z) * n + z * state[0],), jnp.concatenate([before, xn, yn], axis=-1)


def _gru_back(functions: Activations, kept: jax.Array, state: State, grad: State) -> Any:
    (h,), (dh,) = state, grad
    before, more = jnp.split(kept, 2, axis=-1)
    xn, yn = jnp.split(more, 2, axis=-1)
    gates, slopes = _with_slope(functions.gate, before)
    r, z = jnp.split(gates, 2, axis=-1)
    n, slope = _with_slope(functions.cell, xn + r * yn)
    dn = dh * (1 - z) * slope
    drz = jnp.concatenate([dn * yn, dh * (h - n)], axis=-1) * slopes
    return jnp.concatenate([dn, drz, dn * r], axis=-1), (dh * z,)


def _rnn(functions: Activations, x: jax.Array, y: jax.Array, state: State) -> Any:
    kept = x + y
    return (functions.cell(kept),), kept


def _rnn_back(functions: Activations, kept: jax.Array, state: State, grad: State) -> Any:
    d = grad[0] * _with_slope(functions.cell, kept)[1]
    return d, (None,)


_CELLS = {
    "lstm": Cell(_lstm, _lstm_back, spec.KEPT["lstm"]),
    "gru": Cell(_gru, _gru_back, spec.KEPT["gru"]),
    "rnn": Cell(_rnn, _rnn_back, spec.KEPT["rnn"]),
}
