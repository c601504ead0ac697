"""Pairs of tokens where every element has its own gate, by levels (Yang et al., 2023).

A pair meets at the middle of the smallest block of 2, 4, 8, … tokens that has both: keys decay up
to the middle, queries from it. At each level a token is on one side only, so one tile `u` holds the
decayed queries and keys, and `u @ u.T` has the level's pairs, those of other levels being dropped.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas.tpu.linear_recurrence import chunk, halves


class Chunk(chunk.AbstractChunk):
    """Gates of rows by element, of columns by element, or of both."""

    def __init__(self, x: chunk.Operands, dtype: Any):
        super().__init__(x, dtype)
        self.c = x.k.shape[0]
        self.sizes = halves.sizes(self.c)
        self._row_levels: list[Any] = [None] * len(self.sizes)
        self._column_levels: list[Any] = [None] * len(self.sizes)
        if x.rows is not None:
            self.rows, self._row_levels = halves.decays(x.rows)
        if x.columns is not None:
            self.columns, self._column_levels = halves.decays(x.columns)
        rows, lanes = chunk.places(self.c)
        self._apart = rows ^ lanes  # the highest bit is the level's size
        self._earlier = lanes < rows

    def pairs(self) -> jax.Array:
        q, k, v = self.x.q, self.x.k, self.x.v
        own = (q * k).sum(axis=1, keepdims=True)  # [c, 1]
        if self.columns is None:
            return self.dot(jnp.where(self._earlier, self._scores(), 0.0), v) + own * v
        out = own * v
        for i in range(len(self.sizes)):
            u, decay = self._meet(i, q, k, self._row_levels), self._column_levels[i]
            scores = jnp.where(self._at(i) & self._earlier, self.dot(u, u, transpose=True), 0.0)
            out = out + self.dot(scores, v * decay) * decay
        return out

    def pair_gradients(self, dout: jax.Array) -> tuple[dict[str, jax.Array], Any, Any]:
        q, k, v = self.x.q, self.x.k, self.x.v
        own, down = ((a * b).sum(axis=1, keepdims=True) for a, b in ((q, k), (dout, v)))
        dq, dk, dv = down * k, down * q, own * dout
        row_logs, column_logs = [], []
        if self.columns is None:
            # gradients of scores, [t, s], and their mirror image, [s, t]
            lower, upper = self.dot(dout, v, transpose=True), self.dot(v, dout, transpose=True)
            dscores = jnp.where(self._earlier, lower, upper)
            later = ~self._earlier & (self._apart != 0)
            dv = dv + self.dot(jnp.where(later, self._scores(), 0.0), dout)
        for i, size in enumerate(self.sizes):
            u = self._meet(i, q, k, self._row_levels)
            if self.columns is not None:
                w = self._meet(i, dout, v, self._column_levels)
                dscores = self.dot(w, w, transpose=True)
                scores = jnp.where(self._at(i), self.dot(u, u, transpose=True), 0.0)
                dw = self.dot(scores, w)  # [c, e]
                column_logs.append(dw * w)
                dw = dw * self._column_levels[i]
                dv = dv + jnp.where(halves.is_second(size, *dw.shape), 0.0, dw)
            du = self.dot(jnp.where(self._at(i), dscores, 0.0), u)  # [c, d]
            row_logs.append(du * u)
            if self.rows is not None:
                du = du * self._row_levels[i]
            second = halves.is_second(size, *du.shape)
            dq, dk = dq + jnp.where(second, du, 0.0), dk + jnp.where(second, 0.0, du)
        return {"q": dq, "k": dk, "v": dv}, row_logs, column_logs

    def row_gates(self, top: halves.Side, inner: Any) -> jax.Array:
        return halves.gate_gradients(top, inner)

    def column_gates(self, top: halves.Side, inner: Any) -> jax.Array:
        return halves.gate_gradients(top, inner)

    def _meet(self, i: int, later: jax.Array, earlier: jax.Array, decays: Any) -> jax.Array:
        """Second halves of `later` and first halves of `earlier`, decayed to their middle."""
        u = jnp.where(halves.is_second(self.sizes[i], *later.shape), later, earlier)
        return u if decays[i] is None else u * decays[i]

    def _at(self, i: int) -> jax.Array:
        """Pairs of one level, [c, c]."""
        return (self._apart >= self.sizes[i]) & (self._apart < 2 * self.sizes[i])

    def _scores(self) -> jax.Array:
        """Of each two tokens, [c, c], symmetric; the diagonal is 0."""
        made = jnp.zeros((self.c, self.c), jnp.float32)
        for i, size in enumerate(self.sizes):
            u = self._meet(i, self.x.q, self.x.k, self._row_levels)
            made = jnp.where(self._apart >= size, self.dot(u, u, transpose=True), made)
        return made
