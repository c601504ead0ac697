"""dq made in the pass over keys, in VMEM: scores and weights are computed once, not twice.

A program that holds keys adds to the rows of dq of the blocks it visits. Those of all queries of a
key head stay in VMEM, in float32, while its blocks of keys are held one after the other, so that
each sum is still made in one place and in one order.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu._blocks import logits, tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile(logits.Tile):
    """A tile whose lanes are tokens of several blocks."""

    starts: tuple[Any, ...]  # the first token of each block


@dataclasses.dataclass(frozen=True)
class InOnePass:
    """What a kernel that holds keys needs to make dq too, transposed: [d, queries]."""

    of: Any  # the call

    @property
    def _shape(self) -> tuple[int, int]:
        return self.of.d, self.of.padded[0]

    def out(self) -> dict[str, Any]:
        lead = (self.of.batch, self.of.num_heads)
        shape = jax.ShapeDtypeStruct((*lead, *self._shape), jnp.float32)
        return {"dq": (shape, pl.BlockSpec(memory_space=pltpu.HBM))}

    def scratch(self) -> dict[str, Any]:
        of = self.of
        return {
            "dq_sum": pltpu.VMEM((of.group, *self._shape), jnp.float32),
            "turned_key": pltpu.VMEM((of.d, of.held_size), of.args.key.dtype),
            "dq_copied": pltpu.SemaphoreType.DMA,
        }

    def start(self, refs: Any, at: Any) -> None:
        """Zeros before a head's first block of keys; keys transposed, once a block."""
        size = self.of.step

        @pl.when(at.held == 0)
        def _() -> None:
            def clear(i: Any, carry: Any) -> Any:
                lanes = pl.ds(pl.multiple_of(i * size, size), size)
                refs.dq_sum[self._head(at), :, lanes] = jnp.zeros((self.of.d, size), jnp.float32)
                return carry

            # one store for all of it would be unrolled into thousands
            jax.lax.fori_loop(0, self.of.num_streamed, clear, jnp.int32(0))

        @pl.when(self.of.is_first())
        def _() -> None:
            refs.turned_key[...] = refs.key[...].T

    def add(self, refs: Any, at: Any, tile: Tile, ds: jax.Array) -> None:
        """The gradients [keys, queries] of a tile's logits, times its keys."""
        made = tiles.product(refs.turned_key[...], ds)  # [d, queries]
        size = tile.shape[1] // len(tile.starts)
        for i, start in enumerate(tile.starts):
            part = made[:, i * size : (i + 1) * size]
            refs.dq_sum[self._head(at), :, pl.ds(pl.multiple_of(start, size), size)] += part

    def finish(self, refs: Any, at: Any) -> None:
        """Copies a head's dq out behind its last block of keys."""

        @pl.when(at.held == self.of.num_held - 1)
        def _() -> None:
            copy = pltpu.make_async_copy(
                refs.dq_sum.at[self._head(at)], refs.dq.at[at.batch, at.head], refs.dq_copied
            )
            copy.start()
            copy.wait()

    def _head(self, at: Any) -> Any:
        """Which query head of its key head a program works on."""
        return jax.lax.rem(at.head, jnp.int32(self.of.group)) if self.of.group > 1 else 0

    def taken(self, dq: jax.Array) -> jax.Array:
        """[b, t, h, d] of the kernel's result."""
        dq = dq.transpose(0, 3, 1, 2) * float(self.of.args.softmax_scale)
        return self.of.taken(dq, 1, 0)
