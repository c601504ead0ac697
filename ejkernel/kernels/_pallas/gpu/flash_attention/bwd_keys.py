"""Attention backward on Hopper without dq: dk and dv in one pass, four products a tile.

A program is that of `bwd_tiles`, but its warpgroups share nothing except the tiles that they read:
ds goes from registers into dk. All sums have a fixed order, also those over the heads of a group.
"""

from typing import Any, NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._pallas.gpu._blocks import mosaic
from ejkernel.kernels._pallas.gpu.flash_attention import bwd_kernel, bwd_plan, bwd_tiles


class Results(NamedTuple):
    """Device memory that is written."""

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


class Kernel(bwd_tiles.Kernel):
    """Writes `dk` and `dv`."""

    kinds = (Results, Shared, bwd_tiles.Barriers)

    def scratch(self) -> tuple[Any, Any]:
        return Shared(*self.tiles()), self.barriers()

    def compute(self, refs: bwd_kernel.Refs, place: bwd_tiles.Place, warpgroup: Any) -> None:
        _Compute(self, refs, place, warpgroup).run()


class _Compute(bwd_tiles.Compute):
    first = 0

    def run(self) -> None:
        plgpu.barrier_wait(self.barriers.keys_loaded)
        dk, dv = self._heads(self._zeros())
        # all threads have read keys and values for the last time
        mosaic.named_barrier("sync", self.barrier, mosaic.WARPGROUP)
        self._store(dk, dv)

    def _step(self, r: Any, j: Any, sums: Any, masked: bool) -> Any:
        dk, dv = sums
        slot = bwd_plan.slot(r * self.place.count + j, self.plan.num_stages)
        ds, dv = self._ds(slot, j, dv, masked)
        dk, dv = self.products.keys_alone(ds, self.shared.q.at[slot], dk, dv)
        plgpu.barrier_arrive(self.barriers.read.at[slot])
        return dk, dv
