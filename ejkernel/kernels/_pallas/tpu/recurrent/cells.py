"""One step of each cell and its transpose on tiles of a TPU, a tile for each gate.

The columns of a step are in units of the state's features: `_specs/recurrent.py` says what forward
keeps, `_shared/cells.py` in which order backward gives gradients.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tiles = tuple[jax.Array, ...]


class Activation(NamedTuple):
    """A function and its derivative, given both the argument and the value."""

    value: Callable[[jax.Array], jax.Array]
    slope: Callable[[jax.Array, jax.Array], jax.Array]

    def both(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value = self.value(x)
        return value, self.slope(x, value)


def _softsign_slope(x: jax.Array, value: jax.Array) -> jax.Array:
    rest = 1.0 - jnp.abs(value)  # 1 / (1 + |x|)
    return rest * rest


ACTIVATIONS = {
    "tanh": Activation(jnp.tanh, lambda x, a: 1.0 - a * a),
    "sigmoid": Activation(jax.nn.sigmoid, lambda x, a: a * (1.0 - a)),
    "relu": Activation(
        lambda x: jnp.maximum(x, 0.0), lambda x, a: jnp.where(x > 0, 1.0, 0.0).astype(x.dtype)
    ),
    "softsign": Activation(lambda x: x / (1.0 + jnp.abs(x)), _softsign_slope),
    "identity": Activation(lambda x: x, lambda x, a: jnp.ones_like(x)),
}


class Step(NamedTuple):
    """What a step gives: the states after it, and the columns that it keeps."""

    h: jax.Array
    c: Any  # of an lstm
    kept: Tiles


class Back(NamedTuple):
    """What the transpose of a step gives.

    The gradients of columns, and those of the states before the step without the share that goes
    through the states' projection; None is zero.
    """

    columns: Tiles
    dh: Any
    dc: Any


class Cell:
    """The cell of a call."""

    def __init__(self, args: Any):
        self.kind = args.cell_type
        self._act = ACTIVATIONS[args.activation]
        self._gate = ACTIVATIONS[args.gate_activation]

    def step(self, x: Tiles, y: Tiles, h: Any, c: Any) -> Step:
        """`x` and `y` are the projections of the input and of the state, a tile for each gate.

        An rnn and an lstm need no `h`, a gru and an rnn no `c`.
        """
        act, gate = self._act.value, self._gate.value
        kept = tuple(a + b for a, b in zip(x, y, strict=True))
        if self.kind == "rnn":
            return Step(act(kept[0]), None, kept)
        if self.kind == "lstm":
            i, f, g, o = gate(kept[0]), gate(kept[1]), act(kept[2]), gate(kept[3])
            c = f * c + i * g
            return Step(o * act(c), c, kept)
        r, z = gate(kept[0]), gate(kept[1])
        n = act(x[2] + r * y[2])
        return Step((1.0 - z) * n + z * h, None, (kept[0], kept[1], x[2], y[2]))

    def back(self, kept: Tiles, state: Any, dh: jax.Array, dc: Any) -> Back:
        """`state` is the cell state before the step of an lstm, or the hidden state of a gru."""
        act, gate = self._act.both, self._gate.both
        if self.kind == "rnn":
            return Back((dh * act(kept[0])[1],), None, None)
        if self.kind == "lstm":
            (i, di), (f, df), (g, dg), (o, do) = map(
                lambda function, x: function(x), (gate, gate, act, gate), kept
            )
            a, da = act(f * state + i * g)
            dc = dc + dh * o * da
            return Back((dc * g * di, dc * state * df, dc * i * dg, dh * a * do), None, dc * f)
        (r, dr), (z, dz) = gate(kept[0]), gate(kept[1])
        n, dn = act(kept[2] + r * kept[3])
        dn = dh * (1.0 - z) * dn
        columns = (dn, dn * kept[3] * dr, dh * (state - n) * dz, dn * r)
        return Back(columns, dh * z, None)
