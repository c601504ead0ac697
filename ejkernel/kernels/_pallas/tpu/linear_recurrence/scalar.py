"""Pairs of tokens where a token has one gate, or all have the same, or none has any.

All pairs are one product, times the decay between the two tokens: exp of the sum of the gates
between them, itself a product with a matrix of zeros and ones, and no difference of longer sums.
Sums from a chunk's start and to its end are made outside, by XLA: they are small.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas.tpu._blocks import tiles
from ejkernel.kernels._pallas.tpu.linear_recurrence import chunk
from ejkernel.kernels._pallas.tpu.linear_recurrence.halves import Side

LEAST = -128.0  # exp of it is 0 in float32; a sum may not have -inf times zero
_TOP = -(1 << 16)  # the bits of a float32 that a bfloat16 has


class Chunk(chunk.AbstractChunk):
    """At most one gate a token."""

    def __init__(self, x: chunk.Operands, dtype: Any):
        super().__init__(x, dtype)
        self.c, d = x.k.shape
        self._rows, self._lanes = chunk.places(self.c)
        self._seen = self._lanes <= self._rows
        if x.token is None and x.gamma is None:
            return
        start, end, self._between = self._constant() if x.token is None else self._sums()
        start, end = jnp.exp(start), jnp.exp(end)  # [c, LANES]
        self.rows = Side(*(tiles.wide(y, d) for y in (start, end, start[-1:])))

    @functools.cached_property
    def _decay(self) -> jax.Array | None:
        """Of each pair, [c, c]; states need none of it."""
        return None if self.rows is None else jnp.exp(self._between())

    def _constant(self) -> tuple[jax.Array, jax.Array, Any]:
        """Logs of decays of a gate that all real tokens have."""
        step = jax.lax.broadcasted_iota(jnp.int32, (self.c, tiles.LANES), 0)
        start = jnp.minimum(step + 1, self.x.count)
        end = jnp.maximum(self.x.count - 1 - step, 0)
        gamma = jnp.maximum(self.x.gamma, LEAST)
        start, end = (y.astype(jnp.float32) * gamma for y in (start, end))
        apart = lambda: jnp.maximum(self._rows - self._lanes, 0).astype(jnp.float32) * gamma
        return start, end, apart

    def _sums(self) -> tuple[jax.Array, jax.Array, Any]:
        """Logs of decays from the tokens' own gates."""
        columns = self.x.token.T  # [c, 8]
        gate, start, end = (
            jnp.broadcast_to(columns[:, i : i + 1], (self.c, tiles.LANES)) for i in range(3)
        )

        def between() -> Any:
            # the gate of row r counts for pairs whose key, a lane, comes before it
            before = jnp.where(self._lanes < self._rows, tiles.wide(gate, self.c), 0.0)
            ones = self._seen.astype(jnp.float32).astype(jnp.bfloat16)
            return sum(tiles.product(ones, part) for part in self._parts(before))

        return start, end, between

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
        earlier = (self._rows < self._lanes).astype(jnp.float32).astype(jnp.bfloat16)
        around = sum(tiles.product(part, earlier) for part in self._parts(inner))  # [t, r]
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

    def _parts(self, x: jax.Array) -> list[jax.Array]:
        """Narrow numbers that sum to a float32: products with ones are exact in them.

        Three have all of its digits; two have 16, twice those of bfloat16 operands.
        """
        parts = []
        for _ in range(3 if self.dtype == jnp.float32 else 2):
            bits = jax.lax.bitcast_convert_type(x, jnp.int32) & _TOP
            top = jax.lax.bitcast_convert_type(bits, jnp.float32)
            parts.append(top.astype(jnp.bfloat16))
            x = x - top
        return parts


def token_rows(gate: jax.Array, size: int) -> jax.Array:
    """[8, …, t]: gates of tokens, then sums of gates from a chunk's start and to its end.

    A chunk has `size` tokens. Sums are those of a chunk's own gates: nothing is taken from a longer
    sum. The rest is zero, and fills a register's rows.
    """
    gate = jnp.maximum(gate, LEAST)
    chunks = gate.reshape(*gate.shape[:-1], -1, size)
    start = jnp.cumsum(chunks, axis=-1)
    later = jnp.cumsum(jnp.flip(chunks, -1), axis=-1)
    end = jnp.flip(jnp.pad(later[..., :-1], ((0, 0),) * gate.ndim + ((1, 0),)), -1)
    rows = [gate, start.reshape(gate.shape), end.reshape(gate.shape)]
    return jnp.stack([*rows, *[jnp.zeros_like(gate)] * 5])
