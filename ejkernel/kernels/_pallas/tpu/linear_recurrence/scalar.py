"""Pairs of tokens where a token has one gate, or all have the same, or none has any.

All pairs are one product, times the decay between the two tokens: exp of the sum of the gates
between them, itself a product with a matrix of zeros and ones, and no difference of longer sums.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas.tpu._blocks import tiles
from ejkernel.kernels._pallas.tpu.linear_recurrence import chunk
from ejkernel.kernels._pallas.tpu.linear_recurrence.halves import Side

_LEAST = -128.0  # exp of it is 0 in float32; a sum may not have -inf times zero
_TOP = -(1 << 16)  # the bits of a float32 that a bfloat16 has


class Chunk(chunk.AbstractChunk):
    """At most one gate a token."""

    def __init__(self, x: chunk.Operands, dtype: Any):
        super().__init__(x, dtype)
        self.c, d = x.k.shape
        self._rows, self._lanes = chunk.places(self.c)
        self._seen = self._lanes <= self._rows
        self._decay = None
        if x.token is None and x.gamma is None:
            return
        start, end, between = self._constant() if x.token is None else self._sums()
        start, end = jnp.exp(start), jnp.exp(end)  # [c, LANES]
        self.rows = Side(*(tiles.wide(y, d) for y in (start, end, start[-1:])))
        self._decay = jnp.exp(between)  # [c, c]

    def _constant(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Logs of decays of a gate that all real tokens have."""
        step = jax.lax.broadcasted_iota(jnp.int32, (self.c, tiles.LANES), 0)
        start = jnp.minimum(step + 1, self.x.count)
        end = jnp.maximum(self.x.count - 1 - step, 0)
        between = jnp.maximum(self._rows - self._lanes, 0)
        gamma = jnp.maximum(self.x.gamma, _LEAST)
        start, end, between = (y.astype(jnp.float32) * gamma for y in (start, end, between))
        return start, end, between

    def _sums(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Logs of decays from the tokens' own gates."""
        gate = tiles.to_column(jnp.maximum(self.x.token, _LEAST))  # [c, LANES]
        later = ~self._seen
        start = _sums_of_rows(self._seen, gate)
        end = _sums_of_rows(later, gate)
        # the gate of row r counts for pairs whose key, a lane, comes before it
        before = jnp.where(self._lanes < self._rows, tiles.wide(gate, self.c), 0.0)
        return start, end, _sums_of_rows(self._seen, before)

    def pairs(self) -> jax.Array:
        return self.dot(self._scores(), self.x.v)

    def pair_gradients(self, dout: jax.Array) -> tuple[dict[str, jax.Array], Any, Any]:
        q, k, v = self.x.q, self.x.k, self.x.v
        scores = self._scores()
        dscores = self.dot(dout, v, transpose=True)
        ddots = self._masked(dscores)
        found = {
            "q": self.dot(ddots, k),
            "k": self.dot(ddots.T, q),
            "v": self.dot(scores.T, dout),
        }
        return found, dscores * scores, None

    def row_gates(self, top: Side, inner: Any) -> jax.Array:
        """One number for each token, [1, c]."""
        start, end = (y.sum(axis=1, keepdims=True) for y in (top.start, top.end))  # [c, 1]
        # a gate r is in the decays of pairs around it: sums over s < r, then over t >= r
        around = _sums_of_lanes(inner, self._rows < self._lanes)  # [t, r]
        later = self._rows >= self._lanes
        each = jnp.where(later, around + start, end)
        made = each.sum(axis=0, keepdims=True) + top.total.sum(axis=1, keepdims=True)
        if self.x.token is None:
            made = jnp.where(self._lanes[:1] < self.x.count, made, 0.0)
        return made

    def _scores(self) -> jax.Array:
        return self._masked(self.dot(self.x.q, self.x.k, transpose=True))

    def _masked(self, pairs: jax.Array) -> jax.Array:
        return jnp.where(self._seen, pairs if self._decay is None else pairs * self._decay, 0.0)


def _sums_of_rows(chosen: jax.Array, x: jax.Array) -> jax.Array:
    """Sums of the chosen rows: [c, c] bool times [c, w], with all digits of float32."""
    ones = chosen.astype(jnp.float32).astype(jnp.bfloat16)
    return sum(tiles.product(ones, part) for part in _parts(x))


def _sums_of_lanes(x: jax.Array, chosen: jax.Array) -> jax.Array:
    ones = chosen.astype(jnp.float32).astype(jnp.bfloat16)
    return sum(tiles.product(part, ones) for part in _parts(x))


def _parts(x: jax.Array) -> list[jax.Array]:
    """Three bfloat16 that sum to a float32: products with ones are exact in them."""
    parts = []
    for _ in range(3):
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & _TOP
        top = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(top.astype(jnp.bfloat16))
        x = x - top
    return parts
