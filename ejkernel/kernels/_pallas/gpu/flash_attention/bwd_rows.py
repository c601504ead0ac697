"""Before the attention backward: what it needs of every query row, and dq = 0 to add to.

A flag says whether any logsumexp is so large that weights have to be exact.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.gpu._blocks import launch, mosaic
from ejkernel.kernels._pallas.gpu.flash_attention import bwd_plan

_ROWS = mosaic.ROWS
_OWN = 5  # a named barrier
# Up to this logsumexp, starting scores from -lse / scale changes weights by 5e-4 of themselves, an
# eighth of what bfloat16 rounds away.
_LARGE = 4096.0


class Rows(NamedTuple):
    """Of every query [b, h, t], in whole blocks of queries; rows that see nothing get weights of 0.

    Rows behind the last query see nothing.
    """

    start: jax.Array  # -lse / scale, with which scores start; -inf if nothing is seen
    lse: jax.Array  # inf if nothing is seen
    neg_delta: jax.Array  # dlse - sum(out * dout)
    exact: jax.Array  # [1], whether a logsumexp is large
    dq: jax.Array | None = None  # zeros in float32, in the form of `bwd_tiles.Results`


def prepare(
    plan: bwd_plan.Plan, out: jax.Array, dout: jax.Array, lse: jax.Array, dlse: jax.Array | None
) -> Rows:
    """`out` and `dout` [b, t, h, d] may be padded, `lse` and `dlse` [b, h, t] are not."""
    behind = ((0, 0), (0, 0), (0, plan.padded_q - plan.num_q))
    arrays = [out, dout, jnp.pad(lse, behind, constant_values=-jnp.inf)]
    if dlse is not None:
        arrays.append(jnp.pad(dlse.astype(jnp.float32), behind))
    vectors = (plan.batch, plan.heads, plan.padded_q)
    tiles = (plan.k_tiles,) if plan.twin else ()
    updated = [*(lax.empty(vectors, jnp.float32) for _ in range(3)), jnp.zeros(1, jnp.int32)]
    blank = []
    if not plan.in_order:
        updated.append(lax.empty((*tiles, *dout.shape), jnp.float32))
        blank = [plgpu.SMEM((_ROWS, _ROWS), jnp.float32, transforms=mosaic.WIDE_TRANSFORMS)]
    made = launch.launch(
        _Kernel(plan, has_dlse=dlse is not None),
        arrays,
        updated=updated,
        scratch=[
            *blank,
            mosaic.tile(2, _ROWS, plan.value_dim),
            plgpu.SMEM((2, _ROWS), jnp.float32),
            plgpu.SMEM((3, _ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=len(arrays)),
        ],
        programs=plan.batch * plan.heads * cdiv(plan.padded_q, _ROWS),
        warpgroups=1,
    )
    return Rows(*made)


class _Kernel:
    """A program, one warpgroup, has 64 rows of a head."""

    def __init__(self, plan: bwd_plan.Plan, has_dlse: bool):
        self.plan, self.has_dlse = plan, has_dlse

    def __call__(self, out: Any, dout: Any, lse: Any, *refs: Any) -> None:
        dlse, *rest = refs if self.has_dlse else (None, *refs)
        plan = self.plan
        *vectors, exact = rest[:4]
        *clears, tiles, loads, stores, loaded = rest[4:]
        blocks, heads = cdiv(plan.padded_q, _ROWS), plan.heads
        pair, block = _divmod(lax.axis_index("cta"), blocks)
        batch, head = _divmod(pair, heads)
        rows = pl.ds(block * _ROWS, _ROWS)
        for i, gmem in enumerate((out, dout)):
            plgpu.copy_gmem_to_smem(gmem.at[batch, rows, head], tiles.at[i], loaded)
        for i, gmem in enumerate((lse, dlse)):
            if gmem is not None:
                plgpu.copy_gmem_to_smem(gmem.at[batch, head, rows], loads.at[i], loaded)
        if not plan.in_order:
            dq, zeros = clears
            self._clear(dq, zeros, batch, rows, head)
        plgpu.barrier_wait(loaded)
        *found, is_large = self._found(tiles, loads)
        flag = mosaic.any_set(is_large, mosaic.ROW, _OWN, mosaic.WARPGROUP, plan.twin)

        @pl.when(flag > 0)
        def _() -> None:
            exact[0] = 1  # as any other program that writes it

        for i, value in enumerate(found):
            stores.at[i][...] = value
        plgpu.commit_smem()
        for i, gmem in enumerate(vectors):
            plgpu.copy_smem_to_gmem(stores.at[i], gmem.at[batch, head, rows])
        plgpu.wait_smem_to_gmem(0)

    def _clear(self, dq: Any, zeros: Any, batch: Any, rows: Any, head: Any) -> None:
        """Writes zeros to 64 rows."""
        blank = jnp.zeros((_ROWS, _ROWS), jnp.float32)
        zeros[...] = plgpu.layout_cast(blank, mosaic.WGMMA)
        plgpu.commit_smem()
        for column in range(0, self.plan.head_dim, _ROWS):
            at = (batch, rows, head, pl.ds(column, _ROWS))
            for tile in range(self.plan.k_tiles) if self.plan.twin else (None,):
                plgpu.copy_smem_to_gmem(zeros, dq.at[at if tile is None else (tile, *at)])

    def _found(self, tiles: Any, loads: Any) -> tuple[jax.Array, ...]:
        """start, lse and neg_delta of 64 rows, and 1 where lse is large."""
        out, dout = (mosaic.load(tiles.at[i], mosaic.WGMMA).astype(jnp.float32) for i in range(2))
        products = out * dout
        if self.plan.limits:  # the output of padding is 0, whatever its cotangent is
            products = jnp.where(out == 0.0, 0.0, products)
        neg_delta = -jnp.sum(products, axis=1)
        lse = mosaic.load(loads.at[0], mosaic.ROW)
        if self.has_dlse:
            neg_delta = neg_delta + mosaic.load(loads.at[1], mosaic.ROW)
        is_empty = lse == -jnp.inf
        start = jnp.where(is_empty, lse, lse * (-1.0 / self.plan.scale))
        # a row that saw no key has output 0 whatever its cotangent is
        neg_delta = jnp.where(is_empty, 0.0, neg_delta)
        is_large = ~is_empty & (jnp.abs(lse) > _LARGE)
        filled = jnp.where(is_empty, jnp.inf, lse)
        return start, filled, neg_delta, is_large.astype(jnp.int32)


def _divmod(x: Any, y: int) -> tuple[Any, Any]:
    return lax.div(x, jnp.int32(y)), lax.rem(x, jnp.int32(y))
