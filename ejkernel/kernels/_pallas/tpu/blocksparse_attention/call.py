"""One block-sparse call: the kernels of dense attention, over lists of blocks instead of ranges.

Each held block has a list of the streamed blocks to visit, made on the device: first those whose
pairs are all visible, then those that need the mask. A program copies some of them at a time into
one of two buffers while it works on the other, so that blocks which are not listed cost nothing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.tpu._blocks import block_ranges, grid, logits
from ejkernel.kernels._pallas.tpu.blocksparse_attention import config
from ejkernel.kernels._pallas.tpu.flash_attention import call as dense
from ejkernel.kernels._pallas.tpu.flash_attention import dq

_IN_HBM = object()  # in place of a block spec, for arrays that a program copies from


class Call(dense.Call):
    """The operands of one kernel; blocks are those of the mask, or whole parts of them.

    A mask whose blocks are no multiple of a register's 128 lanes has its blocks padded to one.
    """

    _checked = False  # every id of a list is that of a block: lists are made by sorting

    def __init__(self, args: Any, cfg: Any, holds_keys: bool, every_fetch: bool = False):
        self.args, self.cfg, self.holds_keys = args, cfg, holds_keys
        self.batch, self.t, self.num_heads, self.d = args.query.shape
        _, self.s, self.num_groups, self.e = args.value.shape
        self.group = self.num_heads // self.num_groups
        self.size, self.held_size = config.sizes(args.block_size)
        self.step, self.per_fetch = self.held_size, cfg.stream
        self.fetched = self.step * self.per_fetch
        queries, keys = (self._padded_side(side) for side in block_ranges.sides(args))
        left, right = args.sliding_window
        if holds_keys:
            self.held, self.streamed, reach = keys, queries, (right, left)
        else:
            self.held, self.streamed, reach = queries, keys, (left, right)
        self.num_held, self.num_streamed = (
            cdiv(side.length, self.step) for side in (self.held, self.streamed)
        )
        blocks = (self.held_size, self.step)
        # queries beyond the length have weight zero in backward, and no mask is needed for them
        seen = block_ranges.table(self.held, self.streamed, reach, blocks, whole=not holds_keys)
        self.hides = bool(keys.ids) or reach != (None, None)
        self.rules = self._rules(len(keys.ids))
        self.operands = grid.Operands(dense.OPTIONAL)
        self.buffers: dict[str, Any] = {}
        self.dq = dq.InOnePass(self, visits=0) if holds_keys and cfg.one_pass else None
        self.table, lists = self._lists(seen)
        self.lead = lists.shape[:2]
        self._add_lists(lists)
        self._add_extras()

    def _lists(self, seen: Any) -> tuple[jax.Array, jax.Array]:
        """How many blocks to visit [b or 1, h or 1, held, 2], whole ones and all; and their list.

        `seen` is a table of `ranges`.
        """
        mask = jnp.repeat(self.args.sparsity_mask, self.args.block_size // self.size, axis=2)
        mask = jnp.repeat(mask, self.args.block_size // self.size, axis=3)
        mask = mask[:, :, : cdiv(self.t, self.size), : cdiv(self.s, self.size)]
        if self.holds_keys:
            mask = mask.swapaxes(2, 3)
        first, full, ragged, last = jnp.moveaxis(jnp.asarray(seen), -1, 0)[:, :, None, :, None]
        index = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, self.num_streamed), 3)
        listed = mask & (index >= first) & (index < last)
        whole = listed & (index >= full) & (index < ragged)
        rank = 2 - listed.astype(jnp.int8) - whole.astype(jnp.int8)
        order = jnp.argsort(rank, axis=-1, stable=True)
        counts = jnp.stack([whole.sum(-1), listed.sum(-1)], axis=-1)
        return counts.astype(jnp.int32), order.astype(jnp.int32)

    def _add_lists(self, lists: jax.Array) -> None:
        """A list at a time, in scalar memory: all of them need not fit there."""
        many_rows, many_heads = (n > 1 for n in self.lead)
        spec = self.spec(
            (None, None, None, 1, self.num_streamed),
            lambda b, h, g, i, f: (b if many_rows else 0, h if many_heads else 0, i, 0, 0),
        )
        spec = pl.BlockSpec(spec.block_shape, spec.index_map, memory_space=pltpu.SMEM)
        self.operands.add("list", lists[:, :, :, None], spec)

    # Arrays in blocks

    def _padded_side(self, side: block_ranges.Side) -> block_ranges.Side:
        """Tokens with those that fill blocks up; these have a negative id."""
        if self.size == self.held_size:
            return side
        at = jnp.arange(side.length, dtype=jnp.int32)[None] + jnp.int32(side.start)
        at = at if side.positions is None else side.positions
        ids = (jnp.zeros((1, side.length), jnp.int32), *side.ids)
        made = [self._in_blocks(x, 1, -1) for x in (at, *ids)]
        return block_ranges.Side(made[0].shape[1], side.start, tuple(made[1:]), made[0])

    def _in_blocks(self, x: jax.Array, axis: int, fill: float) -> jax.Array:
        blocks = cdiv(x.shape[axis], self.size)
        x = grid.pad_to(x, axis, blocks * self.size, fill)
        x = x.reshape(*x.shape[:axis], blocks, self.size, *x.shape[axis + 1 :])
        x = grid.pad_to(x, axis + 1, self.held_size, fill)
        return x.reshape(*x.shape[:axis], blocks * self.held_size, *x.shape[axis + 2 :])

    def lay_out(self, x: jax.Array, axis: int, side: int, fill: float = 0.0) -> jax.Array:
        return self._in_blocks(x, axis, fill)

    def taken(self, x: jax.Array, axis: int, side: int) -> jax.Array:
        x = x.reshape(*x.shape[:axis], -1, self.held_size, *x.shape[axis + 1 :])
        x = jax.lax.slice_in_dim(x, 0, self.size, axis=axis + 1)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return super().taken(x, axis, side)

    @property
    def padded(self) -> tuple[int, int]:
        held, streamed = self.num_held * self.held_size, self.num_streamed * self.step
        return (streamed, held) if self.holds_keys else (held, streamed)

    # The grid

    @property
    def grid(self) -> tuple[int, ...]:
        if self.holds_keys:
            return (self.batch, self.num_groups, self.num_held, self.group)
        return (self.batch, self.num_heads, self.num_held)

    def place(self, table: Any, *ids: Any) -> tuple[Any, Any, Any, Any, Any]:
        if self.holds_keys:
            b, g, held, r = ids
            return b, g * self._int(self.group) + r, g, held, None
        b, h, held = ids
        return b, h, jax.lax.div(h, self._int(self.group)), held, None

    @property
    def _vmem_limit(self) -> int:
        return config.vmem_limit(self.args, self.cfg)

    def here(self, refs: Any) -> dense.Place:
        ids = [pl.program_id(i) for i in range(len(self.grid))]
        b, h, _, held, _ = self.place(refs.table, *ids)
        rows, heads = self.lead
        row = (b if rows > 1 else 0) * heads + (h if heads > 1 else 0)
        row = (row * self.num_held + held) * 2
        bounds = (refs.table[row], refs.table[row + 1])
        return dense.Place(b, h, held, jnp.int32(0), bounds, ())

    # What passes by

    def query_spec(self, width: int) -> Any:
        return _IN_HBM if self.holds_keys else super().query_spec(width)

    def key_spec(self, width: int) -> Any:
        return super().key_spec(width) if self.holds_keys else _IN_HBM

    def query_row_spec(self, count: int) -> Any:
        return _IN_HBM if self.holds_keys else super().query_row_spec(count)

    def add(self, name: str, array: jax.Array, spec: Any) -> None:
        if name == "streamed_rows" or spec is _IN_HBM:
            # of "rows" and "streamed_rows" the last axis is that of tokens
            wide = name in ("rows", "streamed_rows")
            shape = (array.shape[-2], self.fetched) if wide else (self.fetched, array.shape[-1])
            self.buffers[name] = pltpu.VMEM((2, *shape), array.dtype)
            self.operands.add_whole(f"all_{name}", array)
        else:
            self.operands.add(name, array, spec)

    def run(self, name: str, body: Any, out: Any, scratch: Any) -> list[jax.Array]:
        scratch = dict(scratch)
        scratch |= {f"two_{key}": buffer for key, buffer in self.buffers.items()}
        scratch["arrived"] = pltpu.SemaphoreType.DMA((2, len(self.buffers), self.per_fetch))
        return super().run(name.replace("flash", "blocksparse"), body, out, scratch)

    def tiles(self, refs: Any, at: dense.Place, step: dense.Step) -> None:
        """Runs `step` for the tiles of each listed block."""
        num_whole, num_listed = at.bounds
        per = self._int(self.per_fetch)

        def tile(j: Any, u: Any, blocks: int, masked: bool) -> logits.Tile:
            """Several blocks at once if not masked: their places in the call do not matter."""
            size = self._int(self.step)
            starts = tuple(refs.list[0, j * per + u + i] * size for i in range(blocks))
            return logits.Tile(
                row=0,
                lane=pl.multiple_of(u * size, self.step),
                held=at.held * size,
                streamed=starts[0],
                shape=(self.held_size, blocks * self.step),
                masked=masked,
                starts=starts,
            )

        def visit(j: Any, slot: Any) -> None:
            for name in self.buffers:
                setattr(refs, name, getattr(refs, f"two_{name}").at[slot])
            parts = self.cfg.parts
            blocks = self.per_fetch // parts
            whole = (j + 1) * per <= num_whole

            @pl.when(whole)
            def _() -> None:
                starts = (np.int32(i * blocks) for i in range(parts))
                grid.overlap([step(tile(j, u, blocks, False)) for u in starts])

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                first = jnp.int32(0)
                if parts > 1:
                    pieces = jax.lax.div(jnp.maximum(num_whole - j * per, 0), self._int(blocks))
                    each(jnp.int32(0), pieces, lambda i: tile(j, i * blocks, blocks, False))
                    first = pieces * blocks
                count = jnp.minimum(num_listed - j * per, per)
                each(first, count, lambda u: tile(j, u, 1, True))

        def each(first: Any, last: Any, tile_of: Any) -> None:
            """Runs `step` for one tile after the other."""

            def one(i: Any, carry: Any) -> Any:
                for _ in step(tile_of(i)):
                    pass
                return carry

            jax.lax.fori_loop(first, last, one, np.int32(0))

        copies = functools.partial(self._copies, refs, at)
        grid.stream(jax.lax.div(num_listed + (per - 1), per), copies, visit)

    def _copies(self, refs: Any, at: dense.Place, j: Any, slot: Any) -> list[Any]:
        """Of the blocks of step j; what is beyond the list's end is its last block again."""
        made = []
        for u in range(self.per_fetch):
            index = jnp.minimum(j * self.per_fetch + u, at.bounds[1] - 1)
            start = pl.multiple_of(refs.list[0, index] * self._int(self.step), self.step)
            tokens, lanes = pl.ds(start, self.step), pl.ds(u * self.step, self.step)
            for i, name in enumerate(self.buffers):
                source, target = getattr(refs, f"all_{name}"), getattr(refs, f"two_{name}")
                if name == "streamed_rows":
                    row = at.batch if source.shape[0] > 1 else 0
                    source, target = source.at[row, :, tokens], target.at[slot, :, lanes]
                elif name == "rows":
                    source = source.at[at.batch, at.head, :, tokens]
                    target = target.at[slot, :, lanes]
                else:
                    head = at.head
                    if not self.holds_keys:
                        head = jax.lax.div(head, self._int(self.group))
                    source, target = source.at[at.batch, head, tokens], target.at[slot, lanes]
                made.append(pltpu.make_async_copy(source, target, refs.arrived.at[slot, i, u]))
        return made
