"""dq made in the pass over keys, in VMEM: scores and weights are computed once, not twice.

A program that holds keys adds to the rows of dq of the blocks it visits. Those of all queries of a
key head stay in VMEM, in float32, while its blocks of keys are held one after the other, so that
each sum is still made in one place and in one order.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu._blocks import grid, logits, tiles


@dataclasses.dataclass(frozen=True)
class InOnePass:
    """What a kernel that holds keys needs to make dq too; the sums are transposed, [d, queries]."""

    of: Any  # the call
    visits: int  # how many of the grid's last axes count visits to one head and block of keys

    def out(self) -> dict[str, Any]:
        of = self.of
        shape = (of.batch, of.num_heads, of.padded[0], of.d)
        made = jax.ShapeDtypeStruct(shape, of.args.query.dtype)
        return {"dq": (made, pl.BlockSpec(memory_space=pltpu.HBM))}

    def scratch(self) -> dict[str, Any]:
        of, length = self.of, self.of.padded[0]
        return {
            "dq_sum": pltpu.VMEM((of.group, of.d, length), jnp.float32),
            "dq_done": pltpu.VMEM((length, of.d), of.args.query.dtype),
            "turned_key": pltpu.VMEM((of.d, of.held_size), of.args.key.dtype),
            "dq_copied": pltpu.SemaphoreType.DMA,
        }

    def start(self, refs: Any, at: Any) -> None:
        """Zeros before a head's first block of keys; keys transposed, once a block."""
        size = self.of.step

        @pl.when((at.held == 0) & grid.is_first(self.of.grid, self.visits))
        def _() -> None:
            def clear(tokens: Any) -> None:
                refs.dq_sum[self._head(at), :, tokens] = jnp.zeros((self.of.d, size), jnp.float32)

            self._each_block(clear)

        @pl.when(self.of.is_first())
        def _() -> None:
            refs.turned_key[...] = refs.key[...].T

    def add(self, refs: Any, at: Any, tile: logits.Tile, ds: jax.Array) -> None:
        """The gradients [keys, queries] of a tile's logits, times its keys."""
        made = tiles.product(refs.turned_key[:, tile.rows], ds)  # [d, queries]
        starts = tile.starts or (tile.streamed,)
        size = tile.shape[1] // len(starts)
        # a tile that a mask cuts begins at any register of its block
        whole = math.gcd(self.of.step, tiles.LANES)
        for i, start in enumerate(starts):
            part = made[:, i * size : (i + 1) * size]
            refs.dq_sum[self._head(at), :, pl.ds(pl.multiple_of(start, whole), size)] += part

    def finish(self, refs: Any, at: Any) -> None:
        """Scales, rounds and copies out a head's dq behind its last block of keys."""
        of = self.of
        scale = float(of.args.softmax_scale)

        @pl.when((at.held == of.num_held - 1) & grid.is_last(of.grid, self.visits))
        def _() -> None:
            def turn(tokens: Any) -> None:
                made = refs.dq_sum[self._head(at), :, tokens].T * scale
                refs.dq_done[tokens] = made.astype(refs.dq_done.dtype)

            self._each_block(turn)
            copy = pltpu.make_async_copy(
                refs.dq_done, refs.dq.at[at.batch, at.head], refs.dq_copied
            )
            copy.start()
            copy.wait()

    def _each_block(self, visit: Any) -> None:
        """Runs `visit` for the tokens of each block of queries: all at once would be unrolled."""
        size = self.of.step

        def one(i: Any, carry: Any) -> Any:
            visit(pl.ds(pl.multiple_of(i * size, size), size))
            return carry

        jax.lax.fori_loop(0, self.of.padded[0] // size, one, jnp.int32(0))

    def _head(self, at: Any) -> Any:
        """Which query head of its key head a program works on."""
        return jax.lax.rem(at.head, jnp.int32(self.of.group)) if self.of.group > 1 else 0

    def taken(self, dq: jax.Array) -> jax.Array:
        """[b, t, h, d] of the kernel's result."""
        return self.of.taken(dq, 2, 0).transpose(0, 2, 1, 3)
