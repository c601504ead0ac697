"""A chunk of tokens and its gradients, as products of matrices in VMEM.

What goes through the state is the same for all gates; pairs of tokens inside the chunk depend on
the gates (`scalar.py`, `levels.py`). States are transposed, [e, d], so that the decays of their
rows lie along lanes. Decays are at most 1 where gates forget.
"""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas.tpu._blocks import tiles
from ejkernel.kernels._pallas.tpu.linear_recurrence.halves import Side


class Operands(NamedTuple):
    """A chunk in float32; gates are logs, and absent ones None."""

    q: Any  # [c, d], scaled; None where only states are wanted
    k: Any  # [c, d]
    v: Any  # [c, e]
    rows: jax.Array | None  # [c, d], gates of the state's rows
    columns: jax.Array | None  # [c, e], gates of its columns
    token: Any  # [8, c], one gate for all rows, and sums of it: `scalar.token_rows`
    gamma: Any  # a number, the gate of the first `count` tokens
    count: Any  # tokens that are real; zeros follow


class AbstractChunk(abc.ABC):
    """A chunk with its decays; a subclass knows the pairs of tokens inside."""

    rows: Side | None = None
    columns: Side | None = None

    def __init__(self, x: Operands, dtype: Any):
        self.x, self.dtype = x, dtype

    @abc.abstractmethod
    def pairs(self) -> jax.Array:
        """Outputs of the pairs inside, [c, e]."""

    @abc.abstractmethod
    def pair_gradients(self, dout: jax.Array) -> tuple[dict[str, jax.Array], Any, Any]:
        """Of q, k and v; and of the logs of decays inside, of rows and of columns."""

    @abc.abstractmethod
    def row_gates(self, top: Side, inner: Any) -> jax.Array:
        """Gradients of the gates of rows from those of the logs of decays."""

    def column_gates(self, top: Side, inner: Any) -> jax.Array:
        raise NotImplementedError

    def dot(self, a: jax.Array, b: jax.Array, transpose: bool = False) -> jax.Array:
        return tiles.product(a.astype(self.dtype), b.astype(self.dtype), transpose)

    def fade(self, h: jax.Array) -> jax.Array:
        """A state [e, d] after the chunk's decays."""
        if self.rows is not None:
            h = h * self.rows.total
        if self.columns is not None:
            h = h * tiles.wide(tiles.to_column(self.columns.total), h.shape[1])
        return h

    def advance(self, h: jax.Array) -> jax.Array:
        """The state after the chunk."""
        return self.fade(h) + self.dot(self._v_end.T, self._k_end)

    def output(self, h: jax.Array) -> jax.Array:
        """[c, e], from the state before."""
        through = self.dot(self._q_start, h, transpose=True)
        return _times(through, self.columns and self.columns.start) + self.pairs()

    def gradients(
        self, h: jax.Array, dh: jax.Array, dout: jax.Array, gated: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Of the state before and of the operands, from the gradient of the state after."""
        rows, columns = self.rows, self.columns
        q, k, v = self._q_start, self._k_end, self._v_end
        dout_start = _times(dout, columns and columns.start)
        dq, dk = self.dot(dout_start, h), self.dot(v, dh)  # [c, d]
        dv = self.dot(k, dh, transpose=True)  # [c, e]
        found, row_logs, column_logs = self.pair_gradients(dout)
        found["q"] += _times(dq, rows and rows.start)
        found["k"] += _times(dk, rows and rows.end)
        found["v"] += _times(dv, columns and columns.end)
        if gated and (rows is not None or columns is not None):
            kept = self.fade(h) * dh  # [e, d]
        if gated and rows is not None:
            top = Side(dq * q, dk * k, kept.sum(axis=0, keepdims=True))
            found["rows"] = self.row_gates(top, row_logs)
        if gated and columns is not None:
            ones = jnp.ones((8, kept.shape[1]), jnp.float32)
            total = tiles.product(ones, kept, transpose=True)[:1]  # [1, e]
            through = self.dot(q, h, transpose=True)
            top = Side(dout_start * through, dv * v, total)
            found["columns"] = self.column_gates(top, column_logs)
        return self.fade(dh) + self.dot(dout_start.T, q), found

    @property
    def _q_start(self) -> jax.Array:
        return _times(self.x.q, self.rows and self.rows.start)

    @property
    def _k_end(self) -> jax.Array:
        return _times(self.x.k, self.rows and self.rows.end)

    @property
    def _v_end(self) -> jax.Array:
        return _times(self.x.v, self.columns and self.columns.end)


def _times(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    return x if factor is None else x * factor


def places(c: int) -> tuple[jax.Array, jax.Array]:
    """Row and lane numbers of a [c, c] tile."""
    rows, lanes = (jax.lax.broadcasted_iota(jnp.int32, (c, c), axis) for axis in (0, 1))
    return rows, lanes
