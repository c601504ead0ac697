"""The products of one step of the attention backward, issued by the warpgroups themselves.

Several products are under way at once, some start from values other than 0, and what follows waits
for as few as it can. Tiles are [keys, queries], so that weights and ds leave the accumulators as
the operands that dv and dk need. `Twin` has the same steps in operations that an interpreter knows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._pallas.gpu._blocks import mosaic

LOG2_E = 1.4426950408889634
PART = (64, 64)  # of dq that a warpgroup computes in a step


@dataclasses.dataclass(frozen=True)
class Products:
    """Steps for a GPU.

    Scores start from `rows` = -lse / scale, which saves an addition each. If `exact`, they start
    from 0 and `rows` are the logsumexps: that takes more instructions, but no score is so large
    that its rounding matters. Either way a row without a logsumexp has weights of 0: `rows` is
    -inf there, or inf if `exact`. A `cap` needs `exact`.
    """

    block_q: int
    scale: float
    exact: bool
    cap: float | None = None

    @property
    def tile(self) -> tuple[int, int]:
        return (mosaic.ROWS, self.block_q)

    def scores(self, k: Any, v: Any, q: Any, dout: Any, rows: Any, neg_delta: Any) -> Any:
        """Weights [k, q] and, under way, dp - delta [k, q], times the slope of a cap."""
        if self.cap is not None:
            x, dp = self._dots(k, v, q, dout, neg_delta)
            return self._capped(x, dp, rows, self.cap)
        vectors = (mosaic.COLUMN, mosaic.COLUMN)

        @mosaic.inlined((*(mosaic.TILE,) * 4, *vectors), (_values(self.tile), _sums(self.tile)))
        def issue(k: Any, v: Any, q: Any, dout: Any, rows: Any, neg_delta: Any) -> Any:
            rows = mosaic.along_columns(rows, self.tile)
            dp = mosaic.as_accumulator(mosaic.along_columns(neg_delta, self.tile))
            if self.exact:
                x, dp = None, mosaic.pinned(dp)
            else:
                x, dp = mosaic.pinned(mosaic.as_accumulator(rows), dp)
            mosaic.fence()
            x = mosaic.product(x, k, mosaic.transposed(q))
            mosaic.commit()
            dp = mosaic.product(dp, v, mosaic.transposed(dout))
            mosaic.commit()
            mosaic.wait(1)
            x = mosaic.as_wgmma(mosaic.pinned(x))
            if self.exact:  # the minimum keeps a product and a difference from being fused
                x = (x * mosaic.constant(self.scale)).min(rows) - rows
                x = x * mosaic.constant(LOG2_E)
            else:
                x = x * mosaic.constant(self.scale * LOG2_E)
            return mosaic.pinned(x.exp2(approx=True)), dp

        return issue(k, v, q, dout, rows, neg_delta)

    def _dots(self, k: Any, v: Any, q: Any, dout: Any, neg_delta: Any) -> Any:
        """Products of queries and keys [k, q], and dp - delta, finished."""
        types = (*(mosaic.TILE,) * 4, mosaic.COLUMN)

        @mosaic.inlined(types, (_values(self.tile), _values(self.tile)))
        def issue(k: Any, v: Any, q: Any, dout: Any, neg_delta: Any) -> Any:
            dp = mosaic.as_accumulator(mosaic.along_columns(neg_delta, self.tile))
            dp = mosaic.pinned(dp)
            mosaic.fence()
            x = mosaic.product(None, k, mosaic.transposed(q))
            dp = mosaic.product(dp, v, mosaic.transposed(dout))
            mosaic.commit()
            mosaic.wait(0)
            x, dp = mosaic.pinned(x, dp)
            return mosaic.as_wgmma(x), mosaic.as_wgmma(dp)

        return issue(k, v, q, dout, neg_delta)

    def _capped(self, x: Any, dp: Any, rows: Any, cap: float) -> Any:
        """The results of `scores` from those of `_dots`."""
        rows = lax.broadcast_in_dim(rows, self.tile, [1])
        p, slope = capped_weights(x, rows, self.scale, cap)
        return p, self._as_sums(dp * slope)

    def _as_sums(self, values: Any) -> Any:
        return plgpu.layout_cast(values, mosaic.ACCUMULATOR)

    def weigh(self, p: Any, dp: Any, dout: Any, dv: Any) -> Any:
        """The rounded ds [k, q] and, under way, dv."""
        types = (mosaic.WGMMA, mosaic.ACCUMULATOR, mosaic.TILE, mosaic.ACCUMULATOR)

        @mosaic.inlined(types, (_values(self.tile, jnp.bfloat16), _sums(dv.shape)))
        def issue(p: Any, dp: Any, dout: Any, dv: Any) -> Any:
            mosaic.wait(0)
            dp = mosaic.as_wgmma(mosaic.pinned(dp))
            # rounding weights while a product is under way makes ptxas serialise all of them
            rounded, dv = mosaic.pinned(mosaic.to_bfloat16(p), dv)
            mosaic.fence()
            dv = mosaic.product(dv, rounded, dout)
            mosaic.commit()
            return mosaic.pinned(mosaic.to_bfloat16(p * dp)), dv

        return issue(p, dp, dout, dv)

    def keys_alone(self, ds: Any, q: Any, dk: Any, dv: Any) -> Any:
        """dk and dv of a step that has no dq to add; ds is a tile or an array."""
        kind = mosaic.WGMMA if isinstance(ds, jax.Array) else mosaic.TILE
        types = (kind, mosaic.TILE, *(mosaic.ACCUMULATOR,) * 2)

        @mosaic.inlined(types, (_sums(dk.shape), _sums(dv.shape)))
        def issue(ds: Any, q: Any, dk: Any, dv: Any) -> Any:
            mosaic.fence()
            dk = mosaic.product(dk, ds, q)
            mosaic.commit()
            mosaic.wait(0)
            return tuple(mosaic.pinned(dk, dv))

        return issue(ds, q, dk, dv)

    def keys(self, ds: Any, q: Any, dk: Any, dv: Any, before: Any, k: Any) -> Any:
        """Under way, dk; dv; and this warpgroup's part of dq of the step before."""
        types = (*(mosaic.TILE,) * 2, *(mosaic.ACCUMULATOR,) * 2, *(mosaic.TILE,) * 2)

        @mosaic.inlined(types, (_sums(dk.shape), _sums(dv.shape), _sums(PART)))
        def issue(ds: Any, q: Any, dk: Any, dv: Any, before: Any, k: Any) -> Any:
            mosaic.fence()
            dq = mosaic.product(None, mosaic.transposed(before), k)
            mosaic.commit()
            dk = mosaic.product(dk, ds, q)
            mosaic.commit()
            mosaic.wait(1)
            dq, dv = mosaic.pinned(dq, dv)
            return dk, dv, dq

        return issue(ds, q, dk, dv, before, k)

    def queries(self, ds: Any, k: Any) -> Any:
        """This warpgroup's part of dq of the last step."""

        @mosaic.inlined((mosaic.TILE, mosaic.TILE), (_sums(PART),))
        def issue(ds: Any, k: Any) -> Any:
            mosaic.fence()
            dq = mosaic.product(None, mosaic.transposed(ds), k)
            mosaic.commit()
            mosaic.wait(0)
            return (mosaic.pinned(dq),)

        return issue(ds, k)[0]

    def finish(self, sums: Any) -> Any:
        """Waits for all that is under way; `sums` is the last of it."""

        @mosaic.inlined((mosaic.ACCUMULATOR,), (_sums(sums.shape),))
        def wait(sums: Any) -> Any:
            mosaic.wait(0)
            return (mosaic.pinned(sums),)

        return wait(sums)[0]

    def zeros(self, shape: tuple[int, int]) -> jax.Array:
        return self._as_sums(jnp.zeros(shape, jnp.float32))


@dataclasses.dataclass(frozen=True)
class Twin(Products):
    """The same steps one after the other."""

    def scores(self, k: Any, v: Any, q: Any, dout: Any, rows: Any, neg_delta: Any) -> Any:
        x, dp = self._dots(k, v, q, dout, neg_delta)
        if self.cap is not None:
            return self._capped(x, dp, rows, self.cap)
        rows = lax.broadcast_in_dim(rows, self.tile, [1])
        if self.exact:
            return exact_weights(x * self.scale, rows), dp
        return jnp.exp2((rows + x) * (self.scale * LOG2_E)), dp

    def _dots(self, k: Any, v: Any, q: Any, dout: Any, neg_delta: Any) -> Any:
        neg_delta = lax.broadcast_in_dim(neg_delta, self.tile, [1])
        x = mosaic.twin_product(None, k, q.transpose((1, 0)))
        return x, mosaic.twin_product(neg_delta, v, dout.transpose((1, 0)))

    def weigh(self, p: Any, dp: Any, dout: Any, dv: Any) -> Any:
        dv = mosaic.twin_product(dv, p.astype(jnp.bfloat16), dout)
        return (p * dp).astype(jnp.bfloat16), dv

    def keys_alone(self, ds: Any, q: Any, dk: Any, dv: Any) -> Any:
        return mosaic.twin_product(dk, ds, q), dv

    def keys(self, ds: Any, q: Any, dk: Any, dv: Any, before: Any, k: Any) -> Any:
        return mosaic.twin_product(dk, ds, q), dv, self.queries(before, k)

    def queries(self, ds: Any, k: Any) -> Any:
        return mosaic.twin_product(None, ds.transpose((1, 0)), k)

    def finish(self, sums: Any) -> Any:
        return sums

    def _as_sums(self, values: Any) -> Any:
        return values


def capped_weights(x: Any, lse: Any, scale: float, cap: float) -> Any:
    """exp(y - lse) of scores under a cap, and the slope of y = cap * tanh(scale * x / cap)."""
    # tanh by exp2, since the instruction for it has 11 bits
    grown = jnp.exp2(x * (2.0 * LOG2_E * scale / cap))
    share = 1.0 - 2.0 / (1.0 + grown)
    return exact_weights(cap * share, lse), 1.0 - share * share


def exact_weights(x: Any, lse: Any) -> Any:
    """exp(x - lse); the minimum keeps a product and the difference from being fused."""
    return jnp.exp2((jnp.minimum(x, lse) - lse) * LOG2_E)


def _values(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    return (shape, dtype, mosaic.WGMMA)


def _sums(shape: tuple[int, ...]) -> Any:
    return (shape, jnp.float32, mosaic.ACCUMULATOR)
