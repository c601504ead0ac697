"""Attention forward for Hopper in Pallas Mosaic GPU.

One persistent program a multiprocessor: warpgroups with 64 queries each compute, one more loads
tiles with TMA. A list deals tiles of queries to programs; the host makes it, or the device where
ids or lengths decide. Blocks of keys are visited from the last visible one down. Step j issues
S_j = Q K_j^T and O += P_{j-1} V_{j-1} together, and computes the weights P_j while the second
product runs; the warpgroups take turns.

Weights are exp2(x - m). Every row sees its own last key in the first, masked blocks, so m is the
maximum over these and is never updated: `acc` needs no rescaling, and only overflow can go wrong.
A (tile, warpgroup) whose sums leave the range of float32 is flagged, as is one with a large m; a
second launch computes flagged tiles again and leaves at once when there are none. It keeps a
running maximum, and subtracts it from scores before anything is rounded.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._pallas.gpu._blocks import batching, mosaic, segment_ranges
from ejkernel.kernels._pallas.gpu.flash_attention import call, config, steps
from ejkernel.ops.core.kernel import FORWARD

_ROWS = mosaic.ROWS
_load: Any = plgpu.load  # its signature differs between versions of JAX
_LOG2_E = math.log2(math.e)
# Named barriers from here on: whose turn it is to issue products, one of each warpgroup's own, and
# which tiles of keys and of values are free. Mosaic uses those before.
_TURN = 5
_PAIR = 2 * mosaic.WARPGROUP  # threads of two warpgroups
# Sums of weights that a fixed reference may give: the maximum has weight 1, less rounding.
_LEAST, _MOST = 0.5, 2.0**100
# Up to this reference in bits, its rounding and a logsumexp's change weights by 5e-4 of themselves.
_LARGE = 4096.0


class State(NamedTuple):
    """What a warpgroup carries from block to block."""

    weights: jax.Array  # [64, bk] bfloat16 of the block before, whose values are not yet added
    sums: jax.Array  # [64, 8] of weights, partial
    acc: jax.Array  # [64, e] weighted values
    reference: jax.Array  # [64] maxima, in `Kernel.unit`; -inf for a row that has seen nothing


class Kernel:
    """The body of a launch."""

    def __init__(self, made: call.Call, running: bool):
        """`running`: with a running maximum, for flagged tiles alone."""
        self.call, self.masks, self.running, self.twin = made, made.masks, running, made.twin
        cfg = made.cfg
        self.warpgroups, self.stages, self.block_k = cfg.warpgroups, cfg.num_stages, cfg.block_k
        self.turns = cfg.turns and self.warpgroups > 1
        self.own, self.free = _TURN + self.warpgroups, _TURN + 2 * self.warpgroups
        self.threads = mosaic.WARPGROUP * (self.warpgroups + 1)
        # logits in a unit of a score, or of what a soft cap makes of it, and bits
        self.scale = made.scale if made.cap is None else 1.0
        self.factor = _LOG2_E * self.scale
        # References are in bits, so that a weight takes one addition and product in one; or in
        # units of scores, so that their difference is exact.
        self.unit = 1.0 if running else self.factor

    def __call__(self, *refs: Any) -> None:
        named = self.call.named(refs, self.running)
        warpgroup = lax.axis_index("warpgroup")

        def body() -> None:
            pl.when(warpgroup < self.warpgroups)(lambda: self._compute(named, warpgroup))
            pl.when(warpgroup == self.warpgroups)(lambda: self._load(named))

        pl.when(self._any_flag(named))(body) if self.running else body()

    # The list of tiles

    def _any_flag(self, refs: Any) -> jax.Array:
        """Whether this program has a flagged tile."""
        cta = lax.axis_index("cta")
        strided = plgpu.Layout.WG_STRIDED((self.call.deal.shape[1],), vec_size=1)
        found = _load(refs.flags.at[0, cta], layout=strided)
        for i in range(1, self.warpgroups):
            found = found | _load(refs.flags.at[i, cta], layout=strided)
        items = _load(refs.deal.at[cta], layout=strided)
        found = jnp.where(items >= 0, found, 0)  # beyond the list nobody wrote flags
        return mosaic.any_set(found, strided, self.own, self.threads, self.twin) > 0

    def _tiles(self, refs: Any, visit: Any) -> None:
        """Calls visit(tile, index, first) for each tile; `first` counts blocks loaded before."""
        cta = lax.axis_index("cta")

        def one(index: Any, carry: Any) -> Any:
            first, item = carry
            ahead = refs.deal[cta, index + 1]
            tile = self.call.tile(refs, jnp.maximum(item, 0))
            needed = item >= 0
            if self.running:
                flags = [refs.flags[i, cta, index] for i in range(self.warpgroups)]
                needed = needed & (functools.reduce(jnp.bitwise_or, flags) > 0)
            pl.when(needed)(lambda: visit(tile, index, first))
            return first + jnp.where(needed, tile.blocks.top - tile.blocks.bottom, 0), ahead

        lax.fori_loop(0, self.call.rounds, one, (jnp.int32(0), refs.deal[cta, 0]))

    def _slot(self, count: Any) -> Any:
        if self.stages & (self.stages - 1):
            return lax.rem(count, jnp.int32(self.stages))
        return count & (self.stages - 1)  # a remainder of a signed number takes two steps more

    # The warpgroup that loads

    def _load(self, refs: Any) -> None:
        if self.warpgroups > 1:
            plgpu.set_max_registers(self.call.cfg.load_registers, action="decrease")
        self._tiles(refs, functools.partial(self._load_tile, refs))

    def _load_tile(self, refs: Any, tile: call.Tile, index: Any, first: Any) -> None:
        del index
        kv_head = lax.div(tile.head, jnp.int32(self.call.group))

        def queries() -> None:
            for i in range(self.warpgroups):
                rows = pl.ds(tile.row + i * _ROWS, _ROWS)
                plgpu.barrier_wait(refs.q_free.at[i])
                q_gmem = refs.query.at[tile.batch, rows, tile.head]
                plgpu.copy_gmem_to_smem(q_gmem, refs.q_smem.at[i], refs.q_full.at[i])

        def block(i: Any, carry: Any) -> Any:
            slot = self._slot(first + i)
            j = tile.blocks.top - 1 - i
            at = (tile.batch, pl.ds(j * self.block_k, self.block_k), kv_head)
            is_used = first + i >= self.stages
            # read early: the copy of values would wait for it
            is_padded = refs.padding[tile.batch, j] > 0 if self.masks.has_padding else None

            def fill(kind: int, gmem: Any, smem: Any, full: Any) -> None:
                free = self.free + kind * self.stages + slot
                pl.when(is_used)(lambda: self._sync(free, self.threads))
                copy = functools.partial(plgpu.copy_gmem_to_smem, gmem.at[at], smem.at[slot])
                if kind == 0 or is_padded is None:
                    copy(full.at[slot])
                    return
                pl.when(is_padded)(lambda: self._load_clean(refs, copy, slot, at))
                pl.when(~is_padded)(lambda: copy(full.at[slot]))

            fill(0, refs.key, refs.k_smem, refs.k_full)
            pl.when(i == 0)(queries)
            fill(1, refs.value, refs.v_smem, refs.v_full)
            return carry

        lax.fori_loop(0, tile.blocks.top - tile.blocks.bottom, block, None)

    def _load_clean(self, refs: Any, copy: Any, slot: Any, at: Any) -> None:
        """Values with zeros for padding: 0 * nan is nan."""
        batch, keys, _ = at
        copy(refs.v_raw)
        plgpu.barrier_wait(refs.v_raw)
        mosaic.clear_rows(refs.v_smem.at[slot], refs.keys.at[batch, keys])
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.v_full.at[slot])

    def _sync(self, barrier: Any, threads: int) -> None:
        mosaic.named_barrier("sync", barrier, threads)

    def _arrive(self, barrier: Any, threads: int) -> None:
        mosaic.named_barrier("arrive", barrier, threads)

    # The warpgroups that compute

    def _compute(self, refs: Any, warpgroup: Any) -> None:
        if self.warpgroups > 1:  # two warpgroups have all that they can name
            plgpu.set_max_registers(self.call.cfg.registers, action="increase")
        plgpu.barrier_arrive(refs.q_free.at[warpgroup])
        if self.turns:
            pl.when(warpgroup == self.warpgroups - 1)(lambda: self._arrive(_TURN, _PAIR))
        self._tiles(refs, functools.partial(self._compute_tile, refs, warpgroup))
        plgpu.wait_smem_to_gmem(0)

    def _take_turn(self, warpgroup: Any) -> None:
        if self.turns:
            self._sync(_TURN + warpgroup, _PAIR)

    def _signals(self, warpgroup: Any, slot: Any) -> steps.Signals:
        following = lax.rem(warpgroup + 1, jnp.int32(self.warpgroups))
        turn = _TURN + following if self.turns else None
        return steps.Signals(turn, _PAIR, self.free + slot, self.threads)

    def _free_values(self, slot: Any) -> None:
        self._arrive(self.free + self.stages + slot, self.threads)

    def _skip(self, refs: Any, warpgroup: Any, first: Any, count: Any) -> None:
        """Blocks that only other warpgroups of the tile see."""

        def one(i: Any, carry: Any) -> Any:
            slot = self._slot(first + i)
            signals = self._signals(warpgroup, slot)
            self._take_turn(warpgroup)
            plgpu.barrier_wait(refs.k_full.at[slot])
            signals.free_keys()
            plgpu.barrier_wait(refs.v_full.at[slot])
            self._free_values(slot)
            signals.give_turn()
            return carry

        lax.fori_loop(0, count, one, None)

    def _compute_tile(
        self, refs: Any, warpgroup: Any, tile: call.Tile, index: Any, first: Any
    ) -> None:
        row = tile.row + warpgroup * _ROWS
        mine = self.masks.of_warpgroup(refs, tile, row)
        last = first + tile.blocks.top - 1  # block j was loaded as number last - j
        plgpu.barrier_wait(refs.q_full.at[warpgroup])
        if self.masks.is_uneven:
            self._skip(refs, warpgroup, first, tile.blocks.top - mine.top)
        at = (refs, warpgroup, tile, last)
        state = self._first(at, mine.top - 1)
        if self.masks.has_edges:
            state = self._loop(at, state, mine.top - 2, mine.edge, "edge", running=True)
        if not self.running:
            state = state._replace(reference=self._finite(state.reference))
        state = self._loop(at, state, mine.edge - 1, mine.inner, None, self.running)
        if self.masks.has_left:
            state = self._loop(at, state, mine.inner - 1, mine.bottom, "left", self.running)
        plgpu.barrier_arrive(refs.q_free.at[warpgroup])
        slot = self._slot(last - mine.bottom)
        plgpu.barrier_wait(refs.v_full.at[slot])
        self._take_turn(warpgroup)
        signals = self._signals(warpgroup, slot)
        acc = steps.values(state.weights, refs.v_smem.at[slot], state.acc, signals, self.twin)
        self._free_values(slot)
        if self.masks.is_uneven:
            below = last - mine.bottom + 1
            self._skip(refs, warpgroup, below, mine.bottom - tile.blocks.bottom)
        self._store(refs, warpgroup, tile, row, index, state._replace(acc=acc))

    def _first(self, at: Any, j: Any) -> State:
        """The first block of a tile: scores alone, which give the reference."""
        refs, warpgroup, _, last = at
        slot = self._slot(last - j)
        plgpu.barrier_wait(refs.k_full.at[slot])
        self._take_turn(warpgroup)
        signals = self._signals(warpgroup, slot)
        s = steps.scores(refs.q_smem.at[warpgroup], refs.k_smem.at[slot], signals, self.twin)
        x = self._hidden(self._logits(s), at, j, "edge" if self.masks.masks_first else None)
        reference = jnp.max(x, axis=1) * self.unit
        sums = steps.cleared(8, mosaic.WGMMA)
        p, sums = self._weights(x, self._finite(reference), sums)
        acc = steps.cleared(self.call.e, mosaic.ACCUMULATOR)
        return State(p.astype(jnp.bfloat16), sums, acc, reference)

    def _loop(
        self, at: Any, state: State, start: Any, stop: Any, mask: str | None, running: bool
    ) -> State:
        """Blocks from `start` down to `stop`, both included."""

        def one(i: Any, state: State) -> State:
            return self._step(at, start - i, state, mask, running)

        return lax.fori_loop(0, start - stop + 1, one, state)

    def _step(self, at: Any, j: Any, state: State, mask: str | None, running: bool) -> State:
        """Adds the values of the block before, and finds the weights of block j."""
        refs, warpgroup, _, last = at
        slot, before = self._slot(last - j), self._slot(last - j - 1)
        plgpu.barrier_wait(refs.k_full.at[slot])
        plgpu.barrier_wait(refs.v_full.at[before])
        self._take_turn(warpgroup)
        s, acc = steps.scores_and_values(
            refs.q_smem.at[warpgroup],
            refs.k_smem.at[slot],
            state.weights,
            refs.v_smem.at[before],
            state.acc,
            self._signals(warpgroup, slot),
            self.twin,
        )
        sums, reference = state.sums, state.reference
        hide = functools.partial(self._hidden, at=at, j=j, mask=mask)
        if running:
            x = hide(self._logits(s))
            reference = jnp.maximum(reference, jnp.max(x, axis=1) * self.unit)
            alpha = jnp.exp2(self._bits(state.reference - self._finite(reference)))
            sums = sums * _along_rows(alpha, sums.shape)
            p, sums = self._weights(x, self._finite(reference), sums)
        else:  # a mask between the product and the difference would keep them from being fused
            p, sums = self._summed(hide(self._exponents(s, reference)), sums)
        weights, sums, acc = steps.settle(p, sums, acc, self.twin)
        self._free_values(before)
        if running:
            scaled = plgpu.layout_cast(acc, mosaic.WGMMA) * _along_rows(alpha, acc.shape)
            acc = plgpu.layout_cast(scaled, mosaic.ACCUMULATOR)
        return State(weights, sums, acc, reference)

    def _finite(self, reference: jax.Array) -> jax.Array:
        """-inf - -inf is nan: rows that have seen nothing take 0."""
        return jnp.where(reference == -jnp.inf, 0.0, reference)

    def _bits(self, difference: jax.Array) -> jax.Array:
        """A difference from a reference in bits."""
        return difference * self.factor if self.running else difference

    def _logits(self, s: jax.Array) -> jax.Array:
        """Scores [64, bk] with a cap."""
        if self.call.cap is None:
            return s
        return self.call.cap - (2.0 * self.call.cap) * self._share(s, self.call.cap)

    def _share(self, s: jax.Array, cap: float) -> jax.Array:
        """1 / (1 + exp(2 y / cap)) of scores y: cap * tanh(y / cap) is cap - 2 cap times this.

        The instruction for tanh has 11 bits. A division takes ten, the square of rsqrt two.
        """
        root = lax.rsqrt(1.0 + jnp.exp2(s * (2.0 * _LOG2_E * self.call.scale / cap)))
        return root * root

    def _exponents(self, s: jax.Array, reference: jax.Array) -> jax.Array:
        """Scores [64, bk] with a cap, less a fixed reference, in bits."""
        if self.call.cap is None:
            return s * self.unit - _along_rows(reference, s.shape)
        most = self.call.cap * self.unit  # less the reference, this is one number a row
        rest = _along_rows(most - reference, s.shape)
        return rest - (2.0 * most) * self._share(s, self.call.cap)

    def _hidden(self, x: jax.Array, at: Any, j: Any, mask: str | None) -> jax.Array:
        """Values [64, bk] of block j, -inf where rows do not see keys."""
        if mask is None:
            return x
        refs, warpgroup, tile, _ = at
        row = tile.row + warpgroup * _ROWS
        return jnp.where(self.masks.seen(refs, tile, row, j, mask), x, -jnp.inf)

    def _weights(self, x: Any, reference: Any, sums: Any) -> tuple[jax.Array, jax.Array]:
        """exp2(x - reference) [64, bk] in float32, and their sums."""
        return self._summed(self._bits(x * self.unit - _along_rows(reference, x.shape)), sums)

    def _summed(self, exponents: Any, sums: Any) -> tuple[jax.Array, jax.Array]:
        p = jnp.exp2(exponents)
        return p, mosaic.partial_sums(p, sums, self.twin)

    def _natural(self, reference: jax.Array) -> jax.Array:
        """A reference as backward scales a score: the product is rounded before anything is added.

        The maximum keeps the product and a sum from being fused.
        """
        if not self.running:
            return reference * (1.0 / _LOG2_E)
        return jnp.maximum(reference * self.scale, float(jnp.finfo(jnp.float32).min))

    def _store(
        self, refs: Any, warpgroup: Any, tile: call.Tile, row: Any, index: Any, state: State
    ) -> None:
        acc, sums = plgpu.layout_cast(state.acc, mosaic.WGMMA), state.sums
        if not self.running:
            # nan where `acc` is not finite
            sums = mosaic.partial_sums(acc * 0.0, sums, self.twin)
        l, m = jnp.sum(sums, axis=1), self._finite(state.reference)
        if not self.running:
            is_right = ((l >= _LEAST) & (l <= _MOST)) | (l == 0.0)
            wrong = jnp.where(is_right & (jnp.abs(m) <= _LARGE), 0, 1)
            own = self.own + warpgroup
            flag = mosaic.any_set(wrong, mosaic.ROW, own, mosaic.WARPGROUP, self.twin)
            refs.flags[warpgroup, lax.axis_index("cta"), index] = flag
        m = self._natural(m)
        factor = jnp.ones_like(l)
        if refs.sinks is not None:
            sink = refs.sinks[tile.head]
            higher = self._finite(jnp.maximum(jnp.where(l == 0.0, -jnp.inf, m), sink))
            factor = jnp.where(l == 0.0, 0.0, jnp.exp2((m - higher) * _LOG2_E))
            l, m = l * factor + jnp.exp2((sink - higher) * _LOG2_E), higher
        acc = acc * _along_rows(factor / jnp.where(l == 0.0, 1.0, l), acc.shape)
        o_smem = refs.o_smem.at[warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_smem[...] = acc.astype(jnp.bfloat16)
        refs.lse_smem.at[warpgroup][...] = m + jnp.log2(l) * (1.0 / _LOG2_E)
        plgpu.commit_smem()
        rows = pl.ds(row, _ROWS)
        plgpu.copy_smem_to_gmem(o_smem, refs.out.at[tile.batch, rows, tile.head])
        lse_gmem = refs.lse.at[tile.batch, tile.head, rows]
        plgpu.copy_smem_to_gmem(refs.lse_smem.at[warpgroup], lse_gmem)


def _along_rows(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(vector, shape, (0,))


def forward(args: Any, cfg: Any) -> tuple[Any, Any]:
    """Outputs, and the logsumexp for backward."""
    config.check(args, FORWARD, cfg)
    extra, tree = jax.tree.flatten(segment_ranges.sides(args))
    limits = segment_ranges.limits(args)
    args = segment_ranges.without(args)
    arrays = args.arrays()

    def run(*values: jax.Array) -> tuple[jax.Array, jax.Array]:
        sides = jax.tree.unflatten(tree, values[len(arrays) :])
        given = args.with_arrays(dict(zip(arrays, values[: len(arrays)], strict=True)))
        made = call.Call(given, cfg, sides, limits)
        out, lse, flags = made.launch(Kernel(made, running=False))
        out, lse = made.launch_again(Kernel(made, running=True), flags, out, lse)
        return made.taken(out, lse)

    sinks = [i for i, name in enumerate(arrays) if name == "softmax_aux"]
    out, lse = batching.joins_batch(run, sinks)(*arrays.values(), *extra)
    return ((out, lse) if args.return_lse else (out,)), (lse,)
