"""Attention backward on Hopper: dq, dk and dv in one pass, five products a tile (Dao, 2023).

A program holds 128 keys, 64 in each of two warpgroups, and passes the blocks of queries that see
them, for all query heads of its key head. dk and dv stay in registers. ds [keys, queries] goes to
shared memory once: it is an operand of dk in the same step and of dq in the next, so that
warpgroups do not wait for each other within a step. TMA adds dq in device memory, in an order that
varies from run to run. A third warpgroup loads queries and cotangents.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._pallas.gpu._blocks import launch, mosaic
from ejkernel.kernels._pallas.gpu.flash_attention import bwd_plan, bwd_products

# Named barriers: of one warpgroup alone; ds is stored; ds may be stored. The last two have one for
# each warpgroup that waits and each of two buffers.
_OWN, _STORED, _FREE = 5, 8, 12
_BOTH = bwd_plan.WARPGROUPS * mosaic.WARPGROUP
_BUFFERS = 2  # of ds


class Operands(NamedTuple):
    """Device memory that is read; `rows` and `neg_delta` [b, h, t] have whole blocks of queries."""

    q: Any  # [b, t, h, d]
    k: Any  # [b, s, g, d]
    v: Any
    dout: Any
    rows: Any
    neg_delta: Any
    exact: Any  # [1]


class Results(NamedTuple):
    """Device memory that is written.

    JAX's interpreter cannot add to it: there dq is [tiles of keys, b, t, h, d].
    """

    dq: Any  # float32, not yet scaled
    dk: Any
    dv: Any


class Shared(NamedTuple):
    """Shared memory."""

    k: Any
    v: Any
    q: Any
    dout: Any
    ds: Any
    dq: Any
    rows: Any
    neg_delta: Any


class Barriers(NamedTuple):
    """Of the tile of keys, and of blocks of queries with all that belongs to them."""

    keys_loaded: Any
    loaded: Any
    read: Any


class Refs(NamedTuple):
    operands: Operands
    results: Results
    shared: Shared
    barriers: Barriers


class Place(NamedTuple):
    """What a program works on: `count` blocks of queries for each head of a group."""

    batch: Any
    key_head: Any
    tile: Any
    bounds: bwd_plan.Bounds
    count: Any


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel of a plan, with or without `exact` weights."""

    plan: bwd_plan.Plan
    exact: bool

    @property
    def products(self) -> bwd_products.Products:
        kind = bwd_products.Twin if self.plan.twin else bwd_products.Products
        return kind(self.plan.block_q, self.plan.scale, self.exact, self.plan.cap)

    def launch(self, operands: Operands, results: Results) -> Results:
        """Adds to `dq` and writes `dk` and `dv`, unless `operands.exact` names the other kernel."""
        plan = self.plan
        block_q, d, stages = plan.block_q, plan.head_dim, plan.num_stages
        part = (bwd_plan.WARPGROUPS, *bwd_products.PART)
        shared = Shared(
            k=mosaic.tile(bwd_plan.TILE_KEYS, d),
            v=mosaic.tile(bwd_plan.TILE_KEYS, d),
            q=mosaic.tile(stages, block_q, d),
            dout=mosaic.tile(stages, block_q, d),
            ds=mosaic.tile(_BUFFERS, bwd_plan.TILE_KEYS, block_q),
            dq=plgpu.SMEM(part, jnp.float32, transforms=mosaic.WIDE_TRANSFORMS),
            rows=plgpu.SMEM((stages, block_q), jnp.float32),
            neg_delta=plgpu.SMEM((stages, block_q), jnp.float32),
        )
        barriers = Barriers(
            keys_loaded=plgpu.Barrier(num_arrivals=2),
            loaded=plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            read=plgpu.Barrier(num_arrivals=bwd_plan.WARPGROUPS, num_barriers=stages),
        )
        made = launch.launch(
            self,
            operands,
            updated=results,
            scratch=[*shared, *barriers],
            programs=plan.batch * plan.key_heads * plan.k_tiles,
            warpgroups=bwd_plan.WARPGROUPS + 1,
            auto_barriers=False,
        )
        return Results(*made)

    def __call__(self, *given: Any) -> None:
        taken = iter(given)

        def bundle(kind: Any) -> Any:
            return kind(*itertools.islice(taken, len(kind._fields)))

        refs = Refs(bundle(Operands), bundle(Results), bundle(Shared), bundle(Barriers))
        batch, key_head, tile = self.plan.place(lax.axis_index("cta"))
        bounds = self.plan.bounds(tile)
        place = Place(batch, key_head, tile, bounds, bounds.last - bounds.first)
        warpgroup = lax.axis_index("warpgroup")

        def body() -> None:
            is_loading = warpgroup == bwd_plan.WARPGROUPS
            pl.when(is_loading)(lambda: self._load(refs, place))
            pl.when(~is_loading)(lambda: _Compute(self, refs, place, warpgroup).run())

        pl.when(refs.operands.exact[0] == int(self.exact))(body)

    def _load(self, refs: Refs, place: Place) -> None:
        """Copies a tile of keys, then blocks of queries as fast as they are read."""
        plan, (operands, _, shared, barriers) = self.plan, refs
        plgpu.set_max_registers(plan.registers[1], action="decrease")
        keys = pl.ds(place.tile * bwd_plan.TILE_KEYS, bwd_plan.TILE_KEYS)
        for gmem, smem in ((operands.k, shared.k), (operands.v, shared.v)):
            source = gmem.at[place.batch, keys, place.key_head]
            plgpu.copy_gmem_to_smem(source, smem, barriers.keys_loaded)

        def block(number: Any, head: Any, j: Any) -> None:
            slot = lax.rem(number, jnp.int32(plan.num_stages))
            rows = pl.ds((place.bounds.first + j) * plan.block_q, plan.block_q)
            tile, vector = (place.batch, rows, head), (place.batch, head, rows)

            is_used = number >= plan.num_stages
            pl.when(is_used)(lambda: plgpu.barrier_wait(barriers.read.at[slot]))
            for gmem, smem in (
                (operands.q.at[tile], shared.q),
                (operands.rows.at[vector], shared.rows),
                (operands.dout.at[tile], shared.dout),
                (operands.neg_delta.at[vector], shared.neg_delta),
            ):
                plgpu.copy_gmem_to_smem(gmem, smem.at[slot], barriers.loaded.at[slot])

        def of_head(r: Any, carry: None) -> None:
            first, head = r * place.count, place.key_head * plan.group + r
            lax.fori_loop(0, place.count, lambda j, _: block(first + j, head, j), carry)

        lax.fori_loop(0, plan.group, of_head, None)


class _Compute:
    """What one of the warpgroups that compute does; steps are counted over all heads."""

    def __init__(self, kernel: Kernel, refs: Refs, place: Place, warpgroup: Any):
        self.plan, self.products, self.place = kernel.plan, kernel.products, place
        self.results, self.shared, self.barriers = refs.results, refs.shared, refs.barriers
        self.warpgroup, self.other = warpgroup, 1 - warpgroup
        self.own = pl.ds(warpgroup * mosaic.ROWS, mosaic.ROWS)
        self.barrier = _OWN + warpgroup

    def run(self) -> None:
        plgpu.set_max_registers(self.plan.registers[0], action="increase")
        shape = (mosaic.ROWS, self.plan.head_dim)
        for buffer in range(_BUFFERS):
            self._signal("arrive", _FREE, self.other, buffer)
        plgpu.barrier_wait(self.barriers.keys_loaded)
        zeros = self.products.zeros(shape)
        dk, dv = self._first_step(zeros, zeros)
        if self.plan.group == 1:
            dk, dv = self._head(0, (dk, dv))
        else:
            dk, dv = lax.fori_loop(0, self.plan.group, self._head, (dk, dv))
        last = self.plan.group * self.place.count - 1
        ds = self._ds_of(last)
        dq = self.products.queries(*ds)
        self._ds_read(last)
        self._add(dq, self.plan.group - 1, self.place.count - 1)
        # the other warpgroup has read keys and ds for the last time
        for buffer in range(_BUFFERS):
            self._signal("sync", _FREE, self.warpgroup, buffer)
        self._store(dk, dv)

    def _head(self, r: Any, sums: Any) -> Any:
        """Adds the steps of one query head, for the first head without the first step."""
        bounds = self.place.bounds
        full, ragged = bounds.full - bounds.first, bounds.ragged - bounds.first
        begin = jnp.where(r == 0, 1, 0) if self.plan.group > 1 else jnp.int32(1)
        full = jnp.maximum(full, begin) if self.plan.masks else begin
        ragged = jnp.maximum(ragged, full)

        def loop(start: Any, stop: Any, masked: bool, sums: Any) -> Any:
            def step(j: Any, sums: Any) -> Any:
                return self._step(r, j, sums, masked)

            return lax.fori_loop(start, stop, step, sums)

        # 1. blocks that a mask cuts on the right, or all blocks of the last keys
        if self.plan.right is not None or self.plan.cuts_keys:
            sums = loop(begin, full, True, sums)
        # 2. blocks that need no mask
        sums = loop(full, ragged, False, sums)
        # 3. blocks that a window cuts on the left
        if self.plan.left is not None:
            sums = loop(ragged, self.place.count, True, sums)
        return sums

    def _first_step(self, dk: Any, dv: Any) -> Any:
        slot, zero = jnp.int32(0), jnp.int32(0)
        ds, dv = self._ds(slot, zero, dv, self.plan.masks)
        self._publish_ds(ds, zero)
        own, q = self.shared.ds.at[0, self.own], self.shared.q.at[slot]
        dk, dv = self.products.first_keys(own, q, dk, dv)
        plgpu.barrier_arrive(self.barriers.read.at[slot])
        return dk, dv

    def _step(self, r: Any, j: Any, sums: Any, masked: bool) -> Any:
        dk, dv = sums
        number = r * self.place.count + j
        slot = lax.rem(number, jnp.int32(self.plan.num_stages))
        ds, dv = self._ds(slot, j, dv, masked)
        self._publish_ds(ds, number)
        before = self._ds_of(number - 1)
        own = self.shared.ds.at[_buffer(number), self.own]
        dk, dv, dq = self.products.keys(own, self.shared.q.at[slot], dk, dv, *before)
        self._ds_read(number - 1)
        if self.plan.group == 1:
            self._add(dq, r, j - 1)
        else:  # the step before may be the last one of another head
            is_first = j == 0
            at = jnp.where(is_first, self.place.count, j) - 1
            self._add(dq, jnp.where(is_first, r - 1, r), at)
        dk = self.products.finish(dk)
        plgpu.barrier_arrive(self.barriers.read.at[slot])
        return dk, dv

    def _ds(self, slot: Any, j: Any, dv: Any, masked: bool) -> Any:
        """ds [keys, queries], and dv with the product of this step under way."""
        shared = self.shared
        plgpu.barrier_wait(self.barriers.loaded.at[slot])
        rows, neg_delta = (
            mosaic.load(x.at[slot], mosaic.COLUMN) for x in (shared.rows, shared.neg_delta)
        )
        q, dout = shared.q.at[slot], shared.dout.at[slot]
        keys, values = shared.k.at[self.own], shared.v.at[self.own]
        p, dp = self.products.scores(keys, values, q, dout, rows, neg_delta)
        if masked:
            p = jnp.where(self._visible(j), p, 0.0)
        return self.products.weigh(p, dp, dout, dv)

    def _visible(self, j: Any) -> Any:
        shape = self.products.tile
        k_first = self.place.tile * bwd_plan.TILE_KEYS + self.warpgroup * mosaic.ROWS
        q_first = (self.place.bounds.first + j) * self.plan.block_q
        index = [
            lax.broadcast_in_dim(
                plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout) + first, shape, [axis]
            )
            for axis, (size, layout, first) in enumerate(
                ((shape[0], mosaic.ROW, k_first), (shape[1], mosaic.COLUMN, q_first))
            )
        ]
        return self.plan.sees(index[1], index[0])

    def _publish_ds(self, ds: Any, number: Any) -> None:
        """Stores ds, once the other warpgroup has read what the buffer held."""
        buffer = _buffer(number)
        self._signal("sync", _FREE, self.warpgroup, buffer)
        self.shared.ds.at[buffer, self.own][...] = ds
        mosaic.publish(self.barrier)
        self._signal("arrive", _STORED, self.other, buffer)

    def _ds_of(self, number: Any) -> tuple[Any, Any]:
        """Operands of a part of dq: ds of both warpgroups, and keys."""
        buffer = _buffer(number)
        self._signal("sync", _STORED, self.warpgroup, buffer)
        ds, k = self.shared.ds.at[buffer], self.shared.k
        if self._by_rows:
            return ds.at[:, self.own], k
        return ds, k.at[:, self.own]

    def _ds_read(self, number: Any) -> None:
        self._signal("arrive", _FREE, self.other, _buffer(number))

    @property
    def _by_rows(self) -> bool:
        """Whether a warpgroup's part of dq is a half of the rows; else, of the columns."""
        return self.plan.block_q > mosaic.ROWS

    def _add(self, part: Any, r: Any, j: Any) -> None:
        """Adds a part [64, 64] to dq."""
        buffer = self.shared.dq.at[self.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        mosaic.named_barrier("sync", self.barrier, mosaic.WARPGROUP)
        buffer[...] = plgpu.layout_cast(part, mosaic.WGMMA)
        mosaic.publish(self.barrier)
        row, columns = (self.place.bounds.first + j) * self.plan.block_q, self.own
        if self._by_rows:
            row, columns = row + self.warpgroup * mosaic.ROWS, pl.ds(0, mosaic.ROWS)
        head = self.place.key_head * self.plan.group + r
        at = (self.place.batch, pl.ds(row, mosaic.ROWS), head, columns)
        if self.plan.twin:
            plgpu.copy_smem_to_gmem(buffer, self.results.dq.at[self.place.tile, *at])
        else:
            plgpu.copy_smem_to_gmem(buffer, self.results.dq.at[at], reduction_op="add")

    def _store(self, dk: Any, dv: Any) -> None:
        """Writes dk and dv, through the memory of keys and values."""
        dk, dv = (plgpu.layout_cast(x, mosaic.WGMMA) for x in (dk, dv))
        first = self.place.tile * bwd_plan.TILE_KEYS + self.warpgroup * mosaic.ROWS
        at = (self.place.batch, pl.ds(first, mosaic.ROWS), self.place.key_head)
        k, v = self.shared.k.at[self.own], self.shared.v.at[self.own]
        k[...] = (dk * self.plan.scale).astype(jnp.bfloat16)
        v[...] = dv.astype(jnp.bfloat16)
        mosaic.publish(self.barrier)
        plgpu.copy_smem_to_gmem(k, self.results.dk.at[at])
        plgpu.copy_smem_to_gmem(v, self.results.dv.at[at])
        plgpu.wait_smem_to_gmem(0)

    def _signal(self, operation: str, kind: int, warpgroup: Any, buffer: Any) -> None:
        """At the barrier of a kind on which a warpgroup waits for a buffer."""
        mosaic.named_barrier(operation, kind + _BUFFERS * warpgroup + buffer, _BOTH)


def _buffer(number: Any) -> Any:
    return lax.rem(number, jnp.int32(_BUFFERS))
