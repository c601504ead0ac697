"""Attention backward on Hopper: dq, dk and dv in one pass, five products a tile (Dao, 2023).

A program holds 128 keys, 64 in each of two warpgroups, and passes the blocks of queries that see
them, for all query heads of its key head. dk and dv stay in registers. ds [keys, queries] goes to
shared memory once: it is an operand of dk in the same step and of dq in the next, so that
warpgroups do not wait for each other within a step. TMA adds dq in device memory, in an order that
varies from run to run. A third warpgroup loads queries and cotangents.
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
    bwd_tokens,
    masks,
)

# Named barriers: ds is stored; ds may be stored. Each has one for every warpgroup that waits and
# every buffer.
_STORED, _FREE = 8, 12
_BOTH = bwd_plan.WARPGROUPS * mosaic.WARPGROUP
_BUFFERS = 2  # of ds


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
    rows: Any
    neg_delta: Any
    ds: Any
    dq: Any


class Barriers(NamedTuple):
    """Of the tile of keys, and of blocks of queries with all that belongs to them."""

    keys_loaded: Any
    loaded: Any
    read: Any
    raw: Any = None  # of tiles with padding, where ids or lengths decide


class Place(NamedTuple):
    """What a program works on: `count` blocks of queries for each head of a group."""

    batch: Any
    key_head: Any
    tile: Any
    bounds: bwd_plan.Bounds
    count: Any


class Kernel(bwd_kernel.AbstractKernel):
    """Adds to `dq` and writes `dk` and `dv`."""

    kinds = (Results, Shared, Barriers)

    @property
    def products(self) -> bwd_products.Products:
        kind = bwd_products.Twin if self.plan.twin else bwd_products.Products
        return kind(self.plan.block_q, self.plan.scale, self.exact, self.plan.cap)

    @property
    def programs(self) -> int:
        return self.plan.batch * self.plan.key_heads * self.plan.k_tiles

    def scratch(self) -> tuple[Any, Any]:
        block_q, part = self.plan.block_q, (bwd_plan.WARPGROUPS, *bwd_products.PART)
        shared = Shared(
            *self.tiles(),
            ds=mosaic.tile(_BUFFERS, bwd_plan.TILE_KEYS, block_q),
            dq=plgpu.SMEM(part, jnp.float32, transforms=mosaic.WIDE_TRANSFORMS),
        )
        return shared, self.barriers()

    def tiles(self) -> tuple[Any, ...]:
        """Of keys, values, queries and cotangents, and two vectors of queries."""
        plan, stages = self.plan, self.plan.num_stages
        vector = plgpu.SMEM((stages, plan.block_q), jnp.float32)
        return (
            mosaic.tile(bwd_plan.TILE_KEYS, plan.head_dim),
            mosaic.tile(bwd_plan.TILE_KEYS, plan.value_dim),
            mosaic.tile(stages, plan.block_q, plan.head_dim),
            mosaic.tile(stages, plan.block_q, plan.value_dim),
            vector,
            vector,
        )

    def barriers(self) -> Barriers:
        stages = self.plan.num_stages
        return Barriers(
            keys_loaded=plgpu.Barrier(num_arrivals=2),
            loaded=plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            read=plgpu.Barrier(num_arrivals=bwd_plan.WARPGROUPS, num_barriers=stages),
            raw=plgpu.Barrier(num_arrivals=2) if self.plan.limits else None,
        )

    def place(self, program: Any, tokens: Any) -> Place:
        batch, key_head, tile = self.plan.place(program)
        if tokens is None:
            bounds = self.plan.bounds(tile)
        else:
            bounds = bwd_tokens.bounds(tokens, batch, tile)
        return Place(batch, key_head, tile, bounds, bounds.last - bounds.first)

    def compute(self, refs: bwd_kernel.Refs, place: Place, warpgroup: Any) -> None:
        Compute(self, refs, place, warpgroup).run()

    def load(self, refs: bwd_kernel.Refs, place: Place) -> None:
        """Copies a tile of keys, then blocks of queries as fast as they are read."""
        plan, (operands, _, shared, barriers, tokens) = self.plan, refs
        keys = pl.ds(place.tile * bwd_plan.TILE_KEYS, bwd_plan.TILE_KEYS)
        at = (place.batch, keys, place.key_head)
        tiles = ((operands.k.at[at], shared.k), (operands.v.at[at], shared.v))
        if tokens is None:
            for source, smem in tiles:
                plgpu.copy_gmem_to_smem(source, smem, barriers.keys_loaded)
        else:
            ids = tokens.keys.at[place.batch, keys]
            is_padded = tokens.key_padding[place.batch, place.tile] > 0
            bwd_tokens.load_tiles(tiles, ids, is_padded, barriers.raw, barriers.keys_loaded)

        def block(number: Any, head: Any, j: Any) -> None:
            slot = bwd_plan.slot(number, plan.num_stages)
            rows = pl.ds((place.bounds.first + j) * plan.block_q, plan.block_q)
            tile, vector = (place.batch, rows, head), (place.batch, head, rows)

            is_padded = None
            if tokens is not None:  # read early: copies would wait for it
                is_padded = tokens.query_padding[place.batch, place.bounds.first + j] > 0
            is_used = number >= plan.num_stages
            pl.when(is_used)(lambda: plgpu.barrier_wait(barriers.read.at[slot]))
            loaded = barriers.loaded.at[slot]
            copies = [
                (operands.q.at[tile], shared.q.at[slot]),
                (operands.rows.at[vector], shared.rows.at[slot]),
                (operands.dout.at[tile], shared.dout.at[slot]),
                (operands.neg_delta.at[vector], shared.neg_delta.at[slot]),
            ]
            if tokens is not None:
                ids = tokens.queries.at[place.batch, rows]
                bwd_tokens.load_tiles(copies[::2], ids, is_padded, barriers.raw, loaded)
                copies = copies[1::2]
            for gmem, smem in copies:
                plgpu.copy_gmem_to_smem(gmem, smem, loaded)

        def of_head(r: Any, carry: None) -> None:
            first, head = r * place.count, place.key_head * plan.group + r
            lax.fori_loop(0, place.count, lambda j, _: block(first + j, head, j), carry)

        lax.fori_loop(0, plan.group, of_head, None)


class Compute:
    """What one of the warpgroups that compute does; steps are counted over all heads."""

    first = 1  # step of the first head in `_head`; `run` takes those before

    def __init__(self, kernel: Kernel, refs: bwd_kernel.Refs, place: Place, warpgroup: Any):
        self.plan, self.products, self.place = kernel.plan, kernel.products, place
        self.results, self.shared, self.barriers = refs.results, refs.shared, refs.barriers
        self.tokens = refs.tokens
        self.warpgroup, self.other = warpgroup, 1 - warpgroup
        self.own = pl.ds(warpgroup * mosaic.ROWS, mosaic.ROWS)
        self.barrier = bwd_kernel.OWN + warpgroup

    def run(self) -> None:
        plgpu.barrier_wait(self.barriers.keys_loaded)
        for buffer in range(_BUFFERS):
            self._signal("arrive", _FREE, self.other, buffer)
        dk, dv = self._heads(self._first_step(*self._zeros()))
        last = self.plan.group * self.place.count - 1
        ds = self._ds_of(last)
        dq = self.products.queries(*ds)
        self._ds_read(last)
        self._add(dq, self.plan.group - 1, self.place.count - 1)
        # the other warpgroup has read keys and ds for the last time
        for buffer in range(_BUFFERS):
            self._signal("sync", _FREE, self.warpgroup, buffer)
        self._store(dk, dv)

    def _zeros(self) -> tuple[Any, Any]:
        """dk and dv before the first step."""
        sizes = (self.plan.head_dim, self.plan.value_dim)
        dk, dv = (self.products.zeros((mosaic.ROWS, size)) for size in sizes)
        return dk, dv

    def _heads(self, sums: Any) -> Any:
        """Adds the steps of all query heads in their order."""
        if self.plan.group == 1:
            return self._head(0, sums)
        return lax.fori_loop(0, self.plan.group, self._head, sums)

    def _head(self, r: Any, sums: Any) -> Any:
        """Adds the steps of one query head, for the first head from step `first` on."""
        bounds = self.place.bounds
        full, ragged = bounds.full - bounds.first, bounds.ragged - bounds.first
        begin = jnp.int32(self.first)
        if self.first and self.plan.group > 1:
            begin = jnp.where(r == 0, self.first, 0)
        full = jnp.maximum(full, begin) if self.plan.masks else begin
        ragged = jnp.maximum(ragged, full)

        def loop(start: Any, stop: Any, masked: bool, sums: Any) -> Any:
            def step(j: Any, sums: Any) -> Any:
                return self._step(r, j, sums, masked)

            return lax.fori_loop(start, stop, step, sums)

        # 1. blocks that a mask cuts on the right, or all blocks of the last keys
        if self.plan.right is not None or self.plan.cuts_keys or self.plan.limits:
            sums = loop(begin, full, True, sums)
        # 2. blocks that need no mask
        sums = loop(full, ragged, False, sums)
        # 3. blocks that a window cuts on the left
        if self.plan.left is not None or self.plan.limits:
            sums = loop(ragged, self.place.count, True, sums)
        return sums

    def _first_step(self, dk: Any, dv: Any) -> Any:
        slot, zero = jnp.int32(0), jnp.int32(0)
        ds, dv = self._ds(slot, zero, dv, self.plan.masks)
        self._publish_ds(ds, zero)
        own, q = self.shared.ds.at[0, self.own], self.shared.q.at[slot]
        dk, dv = self.products.keys_alone(own, q, dk, dv)
        plgpu.barrier_arrive(self.barriers.read.at[slot])
        return dk, dv

    def _step(self, r: Any, j: Any, sums: Any, masked: bool) -> Any:
        dk, dv = sums
        number = r * self.place.count + j
        slot = bwd_plan.slot(number, self.plan.num_stages)
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
        limits = self._limits(j) if masked else None
        plgpu.barrier_wait(self.barriers.loaded.at[slot])
        rows, neg_delta = (
            mosaic.load(x.at[slot], mosaic.COLUMN) for x in (shared.rows, shared.neg_delta)
        )
        q, dout = shared.q.at[slot], shared.dout.at[slot]
        keys, values = shared.k.at[self.own], shared.v.at[self.own]
        p, dp = self.products.scores(keys, values, q, dout, rows, neg_delta)
        if masked:
            p = jnp.where(self._visible(j, limits), p, 0.0)
        return self.products.weigh(p, dp, dout, dv)

    def _limits(self, j: Any) -> Any:
        """What `_visible` compares and is in memory, to be read before products."""
        if self.tokens is None:
            return None
        at = (self.place.batch, *self._first_tokens(j))
        return bwd_tokens.limits(self.plan, self.tokens, *at)

    def _first_tokens(self, j: Any) -> tuple[Any, Any]:
        """The first key of this warpgroup, and the first query of a block."""
        key = self.place.tile * bwd_plan.TILE_KEYS + self.warpgroup * mosaic.ROWS
        return key, (self.place.bounds.first + j) * self.plan.block_q

    def _visible(self, j: Any, limits: Any) -> Any:
        k_first, q_first = self._first_tokens(j)
        if self.tokens is not None:
            return masks.within_limits(limits, q_first, self.plan.block_q)
        keys, queries = mosaic.indices(self.products.tile, k_first, q_first)
        return self.plan.sees(queries, keys)

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

    def _signal(self, operation: str, kind: int, warpgroup: Any, buffer: Any) -> None:
        """At the barrier of a kind on which a warpgroup waits for a buffer."""
        mosaic.named_barrier(operation, kind + _BUFFERS * warpgroup + buffer, _BOTH)


def _buffer(number: Any) -> Any:
    return bwd_plan.slot(number, _BUFFERS)
