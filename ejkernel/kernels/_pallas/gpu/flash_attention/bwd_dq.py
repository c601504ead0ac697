"""Attention backward on Hopper, dq alone: three products a tile, summed in a fixed order.

A program holds 128 queries and their cotangents, 64 in each of two warpgroups, and passes the
blocks of keys that they see, from the first to the last. Tiles are [queries, keys]: ds goes from
registers into dq, which stays in registers. A third warpgroup loads keys and values.

A thread holds values of two queries only, so that exp2(c x - lse) takes one instruction besides
exp2, and scores need not start from -lse / scale as in `bwd_products`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._pallas.gpu._blocks import mosaic
from ejkernel.kernels._pallas.gpu.flash_attention import (
    bwd_kernel,
    bwd_plan,
    bwd_products,
    config,
    steps,
)


class Results(NamedTuple):
    """Device memory that is written."""

    dq: Any


class Shared(NamedTuple):
    """Shared memory: of each warpgroup, then of each stage."""

    q: Any
    dout: Any
    lse: Any
    neg_delta: Any
    k: Any
    v: Any


class Barriers(NamedTuple):
    """Of the tiles of each warpgroup, and of blocks of keys with their values."""

    queries_loaded: Any
    loaded: Any
    read: Any


class Place(NamedTuple):
    """What a program works on."""

    batch: Any
    head: Any
    row: Any  # its first query
    bounds: bwd_plan.Bounds


class Kernel(bwd_kernel.AbstractKernel):
    """Writes `dq`, scaled; `operands.rows` are logsumexps whether weights are exact or not."""

    kinds = (Results, Shared, Barriers)

    @property
    def programs(self) -> int:
        return self.plan.batch * self.plan.heads * self.plan.q_tiles

    def scratch(self) -> tuple[Any, Any]:
        plan, stages, warpgroups = self.plan, config.DQ_STAGES, bwd_plan.WARPGROUPS
        vector = plgpu.SMEM((warpgroups, mosaic.ROWS), jnp.float32)
        shared = Shared(
            q=mosaic.tile(warpgroups, mosaic.ROWS, plan.head_dim),
            dout=mosaic.tile(warpgroups, mosaic.ROWS, plan.value_dim),
            lse=vector,
            neg_delta=vector,
            k=mosaic.tile(stages, plan.block_k, plan.head_dim),
            v=mosaic.tile(stages, plan.block_k, plan.value_dim),
        )
        barriers = Barriers(
            queries_loaded=plgpu.Barrier(num_arrivals=4, num_barriers=warpgroups),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            read=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        )
        return shared, barriers

    def place(self, program: Any, tokens: Any) -> Place:
        batch, head, tile = self.plan.place_queries(program)
        return Place(batch, head, tile * bwd_plan.TILE_QUERIES, self.plan.query_bounds(tile))

    def load(self, refs: bwd_kernel.Refs, place: Place) -> None:
        """Copies the tiles of queries, then blocks of keys as fast as they are read."""
        plan, operands, shared, barriers = self.plan, refs.operands, refs.shared, refs.barriers
        for i in range(bwd_plan.WARPGROUPS):
            rows = pl.ds(place.row + i * mosaic.ROWS, mosaic.ROWS)
            tile, vector = (place.batch, rows, place.head), (place.batch, place.head, rows)
            for gmem, smem in (
                (operands.q.at[tile], shared.q),
                (operands.dout.at[tile], shared.dout),
                (operands.rows.at[vector], shared.lse),
                (operands.neg_delta.at[vector], shared.neg_delta),
            ):
                plgpu.copy_gmem_to_smem(gmem, smem.at[i], barriers.queries_loaded.at[i])
        key_head = lax.div(place.head, jnp.int32(plan.group))

        def block(j: Any, carry: None) -> None:
            number = j - place.bounds.first
            slot = bwd_plan.slot(number, config.DQ_STAGES)
            at = (place.batch, pl.ds(j * plan.block_k, plan.block_k), key_head)
            is_used = number >= config.DQ_STAGES
            pl.when(is_used)(lambda: plgpu.barrier_wait(barriers.read.at[slot]))
            for gmem, smem in ((operands.k, shared.k), (operands.v, shared.v)):
                plgpu.copy_gmem_to_smem(gmem.at[at], smem.at[slot], barriers.loaded.at[slot])
            return carry

        lax.fori_loop(place.bounds.first, place.bounds.last, block, None)

    def compute(self, refs: bwd_kernel.Refs, place: Place, warpgroup: Any) -> None:
        _Compute(self, refs, place, warpgroup).run()


class _Compute:
    """What one of the warpgroups that compute does."""

    def __init__(self, kernel: Kernel, refs: bwd_kernel.Refs, place: Place, warpgroup: Any):
        self.plan, self.exact, self.bounds = kernel.plan, kernel.exact, place.bounds
        self.shared, self.barriers = refs.shared, refs.barriers
        self.row = place.row + warpgroup * mosaic.ROWS
        self.dq = refs.results.dq.at[place.batch, pl.ds(self.row, mosaic.ROWS), place.head]
        self.warpgroup, self.barrier = warpgroup, bwd_kernel.OWN + warpgroup

    def run(self) -> None:
        plgpu.barrier_wait(self.barriers.queries_loaded.at[self.warpgroup])
        lse, neg_delta = (
            mosaic.load(x.at[self.warpgroup], mosaic.ROW)
            for x in (self.shared.lse, self.shared.neg_delta)
        )
        if not self.exact:
            lse = lse * bwd_products.LOG2_E
        dq = steps.cleared(self.plan.head_dim, mosaic.ACCUMULATOR)

        def loop(start: Any, stop: Any, masked: bool, dq: Any) -> Any:
            def step(j: Any, dq: Any) -> Any:
                return self._step(j, lse, neg_delta, dq, masked)

            return lax.fori_loop(start, stop, step, dq)

        first, full, ragged, last = self.bounds
        # 1. blocks that a window cuts on the left
        if self.plan.left is not None:
            dq = loop(first, full, True, dq)
        # 2. blocks that need no mask
        dq = loop(full, ragged, False, dq)
        # 3. blocks that a mask cuts on the right, or the last block
        if self.plan.masks_last_keys:
            dq = loop(ragged, last, True, dq)
        self._store(dq)

    def _step(self, j: Any, lse: Any, neg_delta: Any, dq: Any, masked: bool) -> Any:
        slot = bwd_plan.slot(j - self.bounds.first, config.DQ_STAGES)
        q, dout = (x.at[self.warpgroup] for x in (self.shared.q, self.shared.dout))
        k, v = (x.at[slot] for x in (self.shared.k, self.shared.v))
        plgpu.barrier_wait(self.barriers.loaded.at[slot])
        x, dp = _scores(q, dout, k, v, self.plan.twin)
        p = self._weights(x, lse)
        if masked:
            queries, keys = mosaic.indices(x.shape, self.row, j * self.plan.block_k)
            p = jnp.where(self.plan.query_reach.sees(queries, keys), p, 0.0)
        dq = _add(p, dp, neg_delta, k, dq, self.plan.twin)
        plgpu.barrier_arrive(self.barriers.read.at[slot])
        return dq

    def _weights(self, x: Any, lse: Any) -> Any:
        """Weights [queries, keys], times the slope of a cap; `lse` is in bits if not `exact`."""
        lse, plan = lax.broadcast_in_dim(lse, x.shape, [0]), self.plan
        if plan.cap is not None:
            p, slope = bwd_products.capped_weights(x, lse, plan.scale, plan.cap)
            return p * slope
        if self.exact:
            return bwd_products.exact_weights(x * plan.scale, lse)
        return jnp.exp2(x * (plan.scale * bwd_products.LOG2_E) - lse)

    def _store(self, dq: Any) -> None:
        """Writes dq, through the memory of queries."""
        q = self.shared.q.at[self.warpgroup]
        dq = plgpu.layout_cast(dq, mosaic.WGMMA) * self.plan.scale
        # all threads have read queries for the last time
        mosaic.named_barrier("sync", self.barrier, mosaic.WARPGROUP)
        q[...] = dq.astype(jnp.bfloat16)
        mosaic.publish(self.barrier)
        plgpu.copy_smem_to_gmem(q, self.dq)


def _scores(q: Any, dout: Any, k: Any, v: Any, twin: bool) -> tuple[Any, Any]:
    """q @ k.T and, under way, dout @ v.T, both [64, bk]."""
    if twin:
        return (
            mosaic.twin_product(None, q, k.transpose((1, 0))),
            mosaic.twin_product(None, dout, v.transpose((1, 0))),
        )
    shape = (mosaic.ROWS, k.shape[0])
    results = ((shape, jnp.float32, mosaic.WGMMA), (shape, jnp.float32, mosaic.ACCUMULATOR))

    @mosaic.inlined((mosaic.TILE,) * 4, results)
    def issue(q: Any, dout: Any, k: Any, v: Any) -> Any:
        mosaic.fence()
        x = mosaic.product(None, q, mosaic.transposed(k))
        mosaic.commit()
        dp = mosaic.product(None, dout, mosaic.transposed(v))
        mosaic.commit()
        mosaic.wait(1)
        return mosaic.as_wgmma(mosaic.pinned(x)), dp

    return issue(q, dout, k, v)


def _add(p: Any, dp: Any, neg_delta: Any, k: Any, dq: Any, twin: bool) -> Any:
    """dq + ds @ k [64, d] with ds = p * (dp - delta), finished."""
    if twin:
        ds = p * (dp + lax.broadcast_in_dim(neg_delta, p.shape, [0]))
        return mosaic.twin_product(dq, ds.astype(jnp.bfloat16), k)
    types = (mosaic.WGMMA, mosaic.ACCUMULATOR, mosaic.ROW, mosaic.TILE, mosaic.ACCUMULATOR)

    @mosaic.inlined(types, ((dq.shape, jnp.float32, mosaic.ACCUMULATOR),))
    def issue(p: Any, dp: Any, neg_delta: Any, k: Any, dq: Any) -> Any:
        p = mosaic.pinned(p)
        mosaic.wait(0)
        dp = mosaic.as_wgmma(mosaic.pinned(dp))
        ds = p * (dp + mosaic.along_rows(neg_delta, p.shape))
        ds, dq = mosaic.pinned(mosaic.to_bfloat16(ds), dq)
        mosaic.fence()
        dq = mosaic.product(dq, ds, k)
        mosaic.commit()
        mosaic.wait(0)
        return (mosaic.pinned(dq),)

    return issue(p, dp, neg_delta, k, dq)[0]
