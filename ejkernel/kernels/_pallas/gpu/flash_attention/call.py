"""One attention call as the kernels see it: sizes, the list of tiles, arrays and their tiles."""

import functools
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._pallas.gpu._blocks import deal, launch, mosaic, ranges
from ejkernel.kernels._pallas.gpu.flash_attention import config, masks

_TILE_ROWS = 8  # TMA copies tiles of eight rows: lengths are padded to a multiple
_FLAGS = 128  # a warpgroup loads as many flags at a time
_SCRATCH = (
    *("q_smem", "k_smem", "v_smem", "o_smem", "lse_smem"),
    *("q_full", "k_full", "v_full", "q_free"),
)


class Tile(NamedTuple):
    """A tile of queries: scalars."""

    batch: Any
    head: Any
    row: Any  # its first query
    blocks: ranges.Blocks  # that its warpgroups see together


class Call:
    """The arrays and sizes of a call; all but the arrays is known when the kernel is compiled."""

    def __init__(self, args: Any, cfg: config.Config, sides: Any = None, limits: Any = ()):
        """`sides` and `limits` are those of `segment_ranges`, where ids or lengths decide."""
        self.cfg, self.twin = cfg, launch.interpreted()
        self.batch, self.t, self.num_heads, self.d = args.query.shape
        _, self.s, num_groups, self.e = args.value.shape
        self.group = self.num_heads // num_groups
        self.scale = float(args.softmax_scale)
        self.cap = None if args.logits_soft_cap is None else float(args.logits_soft_cap)
        self.tiles = -(-self.t // cfg.block_q)
        if sides is None:
            left, right = args.sliding_window
            reach = ranges.Reach(self.t, self.s, left, right, cfg.block_k)
            self.masks: Any = masks.ByIndex(reach, cfg, self.tiles)
        else:
            self.masks = masks.ByTokens(sides, limits, cfg, self.tiles)
        self._deal()
        self._add_arrays(args)

    def _deal(self) -> None:
        """The list of tiles."""
        pairs = self.batch * self.num_heads
        programs = min(self.cfg.num_programs, pairs * self.tiles)
        bytes_a_pair = 2 * self.s * (self.d + self.e)
        limit = self.cfg.section << 20
        width = deal.section(pairs, self.tiles, bytes_a_pair, self.group, limit, programs)
        work = self.masks.work
        if isinstance(work, tuple):
            self.deal = deal.deal(work, pairs, width, programs, _FLAGS)
            self.rounds = deal.rounds(self.deal)
        else:
            made = deal.deal_on_device(work, self.num_heads, width, programs, _FLAGS)
            self.deal, self.rounds = made

    def _add_arrays(self, args: Any) -> None:
        # the interpreter takes no part of a block, which TMA fills with zeros and leaves unwritten
        many_q = self.cfg.block_q if self.twin else _TILE_ROWS
        many_k = self.cfg.block_k if self.twin else _TILE_ROWS
        self.padded_t = max(-(-self.t // many_q) * many_q, mosaic.ROWS)
        self.padded_s = max(-(-self.s // many_k) * many_k, self.cfg.block_k)
        self.arrays = {
            "query": _padded(args.query, self.padded_t),
            "key": _padded(args.key, self.padded_s),
            "value": _padded(args.value, self.padded_s),
            "deal": jnp.asarray(self.deal),
            **self.masks.arrays,
        }
        if args.softmax_aux is not None:
            sinks = jax.nn.logsumexp(args.softmax_aux.astype(jnp.float32), axis=-1)
            self.arrays["sinks"] = jnp.broadcast_to(sinks, (self.num_heads,))

    def tile(self, refs: Any, item: Any) -> Tile:
        """The tile with a number of the list."""
        pair, index = lax.div(item, jnp.int32(self.tiles)), lax.rem(item, jnp.int32(self.tiles))
        row = index * self.cfg.block_q
        batch = lax.div(pair, jnp.int32(self.num_heads))
        head = lax.rem(pair, jnp.int32(self.num_heads))
        return Tile(batch, head, row, self.masks.of_tile(refs, batch, row))

    # Launches

    def named(self, refs: Sequence[Any], again: bool) -> Any:
        """The refs of a launch by name; those that it lacks are None."""
        results = ("flags", "out", "lse") if again else ("out", "lse", "flags")
        names = (*self.arrays, *results, *_SCRATCH, *(("v_raw",) * self.masks.has_padding))
        return types.SimpleNamespace(**{"sinks": None} | dict(zip(names, refs, strict=True)))

    def _launcher(self) -> Any:
        cfg, warpgroups = self.cfg, self.cfg.warpgroups
        scratch = [
            mosaic.tile(warpgroups, mosaic.ROWS, self.d),
            mosaic.tile(cfg.num_stages, cfg.block_k, self.d),
            mosaic.tile(cfg.num_stages, cfg.block_k, self.e),
            mosaic.tile(warpgroups, mosaic.ROWS, self.e),
            plgpu.SMEM((warpgroups, mosaic.ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=warpgroups),
            plgpu.Barrier(num_barriers=cfg.num_stages),
            plgpu.Barrier(num_barriers=cfg.num_stages),
            plgpu.Barrier(num_barriers=warpgroups),
        ]
        if self.masks.has_padding:
            scratch.append(plgpu.Barrier())
        return functools.partial(
            launch.launch,
            scratch=scratch,
            programs=self.deal.shape[0],
            warpgroups=warpgroups + 1,
        )

    def launch(self, kernel: Any) -> tuple[jax.Array, ...]:
        """Output, logsumexp and flags."""
        rows = (self.batch, self.padded_t, self.num_heads, self.e)
        # Whole tiles: rows of one head that are contiguous are stored without a tensor map, and
        # those behind the last row would be the next head's.
        vectors = (self.batch, self.num_heads, self.tiles * self.cfg.block_q)
        outputs = (
            (rows, self.arrays["query"].dtype),
            (vectors, jnp.float32),
            ((self.cfg.warpgroups, *self.deal.shape), jnp.int32),
        )
        return self._launcher()(kernel, list(self.arrays.values()), outputs=outputs)

    def launch_again(
        self, kernel: Any, flags: jax.Array, out: jax.Array, lse: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Output and logsumexp with flagged tiles computed again."""
        arrays = [*self.arrays.values(), flags]
        return self._launcher()(kernel, arrays, updated=(out, lse))

    def taken(self, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Output and logsumexp without padding."""
        return out[:, : self.t], lse[:, :, : self.t]


def _padded(x: jax.Array, length: int) -> jax.Array:
    """Zeros behind the tokens of an array [b, t, h, d]."""
    if length == x.shape[1]:
        return x
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))
