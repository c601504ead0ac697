"""One attention call as the kernels see it: padded arrays, their blocks, and the grid.

Kernels hold a block of one side and stream the other: forward and dq hold queries, dk and dv keys.
Several streamed blocks are fetched at once and visited in a loop whose bounds come from a table, so
that blocks without a visible pair cost nothing. Arrays are [b, h, t, d], padded to whole blocks.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.tpu._blocks import block_ranges, grid, logits, softmax, tiles
from ejkernel.kernels._pallas.tpu.flash_attention import config, dq

OPTIONAL = (
    "bias", "mask", "held_rows", "streamed_rows", "slopes", "sinks", "seed", "dbias",
)  # fmt: skip
# The work on a tile, with a `yield` after each of its stages.
Step = Callable[[logits.Tile], Iterator[None]]
# Rows of the parts of a block on an edge of the mask: the fewer, the less is computed in vain.
_EDGE = 256


@dataclasses.dataclass(frozen=True)
class Place:
    """A program's place: scalars, `first` the first streamed block of those in VMEM."""

    batch: jax.Array
    head: jax.Array
    held: jax.Array
    first: jax.Array
    bounds: tuple[jax.Array, ...]  # of the streamed blocks in VMEM: first, full, ragged, last
    bands: tuple[jax.Array, ...]  # streamed blocks with a band, counted from those in VMEM


class Call:
    """The operands of one kernel, collected by name."""

    _checked = True  # addresses of copies, which no index of a table decides here
    dq: Any = None  # how a kernel that holds keys makes dq as well, where it does

    def __init__(self, args: Any, cfg: config.Config, holds_keys: bool, every_fetch: bool = False):
        """`every_fetch`: programs run even where they have nothing to visit."""
        self.args, self.cfg, self.holds_keys = args, cfg, holds_keys
        self.batch, self.t, self.num_heads, self.d = args.query.shape
        _, self.s, self.num_groups, self.e = args.value.shape
        self.group = self.num_heads // self.num_groups
        queries, keys = block_ranges.sides(args)
        left, right = args.sliding_window
        if holds_keys:
            self.held, self.streamed, reach = keys, queries, (right, left)
            self.held_size, self.step = cfg.block_k, cfg.block_q
        else:
            self.held, self.streamed, reach = queries, keys, (left, right)
            self.held_size, self.step = cfg.block_q, cfg.block_k
        self.num_held = cdiv(self.held.length, self.held_size)
        blocks = cdiv(self.streamed.length, self.step)
        self.fetches = cdiv(blocks, cfg.stream)
        self.per_fetch = cdiv(blocks, self.fetches)
        self.fetched = self.per_fetch * self.step
        # queries beyond the length have weight zero in backward, and no mask is needed for them
        whole = not holds_keys
        self._plan((self.held, self.streamed, reach, (self.held_size, self.step), whole))
        if every_fetch:
            self.visits = self.fetches
        self.hides = bool(keys.ids) or reach != (None, None) or args.attention_mask is not None
        self.rules = self._rules(len(keys.ids))
        self.operands = grid.Operands(OPTIONAL)
        self.dq = dq.InOnePass(self, visits=1) if holds_keys and cfg.one_pass else None
        self._add_extras()

    def _plan(self, described: Any) -> None:
        """The table, and what is known of it while compiling."""
        self.table = block_ranges.table(*described)
        self.bands: tuple[block_ranges.Band, ...] = ()
        self.masked = self.unmasked = True
        self.visits = self.fetches
        if not isinstance(self.table, np.ndarray):
            return
        first, full, ragged, last = np.moveaxis(self.table, -1, 0)
        visits = np.maximum(last - 1, first) // self.per_fetch - first // self.per_fetch + 1
        self.visits = int(visits.max())
        self.unmasked = bool((full < ragged).any())
        self.masked = bool(((first < full) | (ragged < last)).any())
        if self.step > tiles.LANES and self.step % tiles.LANES == 0:
            self.bands, index = block_ranges.bands(self.table, *described)
            self.masked &= not self.bands
            self.table = np.concatenate([self.table, index], axis=-1)

    def _rules(self, num_ids: int) -> logits.Rules:
        args = self.args
        left, right = args.sliding_window
        near = left is not None or right is not None
        extras = (args.bias, args.alibi_slopes, args.logits_soft_cap)
        # the maximum of a row is found before scaling, which a factor <= 0 would turn around
        natural = any(x is not None for x in extras) or args.softmax_scale <= 0
        positions = near or args.alibi_slopes is not None
        uneven = not self.holds_keys and not num_ids and self.s % self.step != 0
        prob = args.dropout_prob
        return logits.Rules(
            holds_keys=self.holds_keys,
            scale=float(args.softmax_scale) if natural else None,
            cap=None if args.logits_soft_cap is None else float(args.logits_soft_cap),
            left=left,
            right=right,
            offset=self.s - self.t,
            num_ids=num_ids,
            positions=positions and self.held.positions is not None,
            num_streamed=self.s if uneven else None,
            threshold=int(prob * 2.0**32) if prob else None,
            kept=1.0 / (1.0 - prob),
        )

    @property
    def units(self) -> float:
        """Bits in a unit of the logits."""
        natural = self.rules.scale is not None
        return softmax.LOG2_E * (1.0 if natural else float(self.args.softmax_scale))

    # Blocks

    @property
    def grid(self) -> tuple[int, ...]:
        if self.holds_keys:
            return (self.batch, self.num_groups, self.num_held, self.group, self.visits)
        return (self.batch, self.num_heads, self.num_held, self.visits)

    def place(self, table: Any, *ids: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Batch, head, group, held block and fetch of a program."""
        if self.holds_keys:
            b, g, held, r, visit = ids
            h = g * self._int(self.group) + r
        else:
            b, h, held, visit = ids
            g = jax.lax.div(h, self._int(self.group))
        if self.fetches == 1:
            return b, h, g, held, visit
        # a fetch that nobody looks at is one that is there already
        first, _, _, last, *_ = self._bounds(table, b, held)
        per = self._int(self.per_fetch)
        most = jax.lax.div(jnp.maximum(last - 1, first), per)
        fetch = jnp.clip(self._fetch(first, visit), jax.lax.div(first, per), most)
        return b, h, g, held, fetch

    def _fetch(self, first: Any, visit: Any) -> Any:
        """Which fetch a visit is: where masks are constant, the grid has only those in reach."""
        if self.visits == self.fetches:
            return visit
        return jax.lax.div(first, self._int(self.per_fetch)) + visit

    def _bounds(self, table: Any, b: Any, held: Any) -> list[Any]:
        row = held if self.table.shape[0] == 1 else b * self.num_held + held
        width = self.table.shape[-1]
        return [table[row * width + i] for i in range(width)]

    def _int(self, value: int) -> Any:
        return np.int32(value)

    def here(self, refs: Any) -> Place:
        """The place of the running program."""
        ids = [pl.program_id(i) for i in range(len(self.grid))]
        b, h, _, held, _ = self.place(refs.table, *ids)
        bounds = self._bounds(refs.table, b, held)
        first = self._fetch(bounds[0], ids[-1]) * self._int(self.per_fetch)
        bounds = [x - first for x in bounds]
        run = tuple(jnp.clip(x, 0, self.per_fetch) for x in bounds[:4])
        return Place(b, h, held, first, run, tuple(bounds[4:]))

    @property
    def _sequential(self) -> int:
        """Axes of the grid that a held block stays for."""
        return len(self.grid) - 3

    @property
    def _in_order(self) -> int:
        """Axes of the grid whose programs run one after the other."""
        return self._sequential + (self.dq is not None)

    def is_first(self) -> Any:
        """Whether a held block has just come."""
        return grid.is_first(self.grid, self._sequential)

    def is_last(self) -> Any:
        """Whether a held block is about to go."""
        return grid.is_last(self.grid, self._sequential)

    def spec(self, shape: tuple[Any, ...], index: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
        """A block spec from `index(batch, head, group, held, fetch)`."""

        def index_map(*given: Any) -> tuple[Any, ...]:
            *ids, table = given
            return index(*self.place(table, *ids))

        return pl.BlockSpec(shape, index_map)

    def query_spec(self, width: int) -> pl.BlockSpec:
        if self.holds_keys:
            return self.spec((None, None, self.fetched, width), lambda b, h, g, i, f: (b, h, f, 0))
        return self.spec((None, None, self.held_size, width), lambda b, h, g, i, f: (b, h, i, 0))

    def key_spec(self, width: int) -> pl.BlockSpec:
        if not self.holds_keys:
            return self.spec((None, None, self.fetched, width), lambda b, h, g, i, f: (b, g, f, 0))
        shape = (None, None, self.held_size, width)
        return self.spec(shape, lambda b, h, g, i, f: (b, g, i, 0))

    def query_row_spec(self, count: int) -> pl.BlockSpec:
        """Of [b, h, count, t]."""
        if self.holds_keys:
            return self.spec((None, None, count, self.fetched), lambda b, h, g, i, f: (b, h, 0, f))
        return self.spec((None, None, count, self.held_size), lambda b, h, g, i, f: (b, h, 0, i))

    # Arrays

    def add(self, name: str, array: jax.Array, spec: Any) -> None:
        self.operands.add(name, array, spec)

    @property
    def padded(self) -> tuple[int, int]:
        """Lengths of queries and keys in whole blocks."""
        held, streamed = self.num_held * self.held_size, self.fetches * self.fetched
        return (streamed, held) if self.holds_keys else (held, streamed)

    def lay_out(self, x: jax.Array, axis: int, side: int, fill: float = 0.0) -> jax.Array:
        """An array in whole blocks along the axis of queries (side 0) or keys (side 1)."""
        return grid.pad_to(x, axis, self.padded[side], fill)

    def taken(self, x: jax.Array, axis: int, side: int) -> jax.Array:
        """The reverse of `lay_out`."""
        return jax.lax.slice_in_dim(x, 0, (self.t, self.s)[side], axis=axis)

    def queries(self, x: jax.Array) -> jax.Array:
        """[b, t, h, d] as [b, h, padded t, d]."""
        return self.lay_out(x.transpose(0, 2, 1, 3), 2, 0)

    def keys(self, x: jax.Array) -> jax.Array:
        return self.lay_out(x.transpose(0, 2, 1, 3), 2, 1)

    def marked(self, x: jax.Array, others: jax.Array) -> jax.Array:
        """`x` with nan in the tokens whose row of `others` was not finite; see `clean`."""
        bad = ~jnp.isfinite(others).all(axis=-1, keepdims=True)
        return jnp.where(bad, jnp.nan, x) if self.hides else x

    def clean(self, x: jax.Array) -> jax.Array:
        """Zeros for what is not finite, where pairs may be hidden.

        A hidden pair has weight zero, and 0 * nan is nan: what is multiplied by weights has to be
        finite, and what makes them carries the mark.
        """
        return jnp.where(jnp.isfinite(x), x, 0.0).astype(x.dtype) if self.hides else x

    def _add_extras(self) -> None:
        args = self.args
        if args.bias is not None:
            self._add_pairs("bias", args.bias)
        if args.attention_mask is not None:
            mask = args.attention_mask
            # rows of bytes are packed four to a sublane, which a single row cannot be
            self._add_pairs("mask", mask.astype(jnp.int8 if mask.shape[2] > 1 else jnp.int32))
        if self.num_rows:
            held, streamed = reversed(self.padded) if self.holds_keys else self.padded
            self._add_rows("held_rows", self.held, held, False)
            self._add_rows("streamed_rows", self.streamed, streamed, True)
        if args.alibi_slopes is not None:
            self.operands.add_scalars("slopes", args.alibi_slopes.astype(jnp.float32))
        if args.softmax_aux is not None and not self.holds_keys:
            sinks = jax.nn.logsumexp(args.softmax_aux.astype(jnp.float32), axis=-1)
            self.operands.add_scalars("sinks", jnp.broadcast_to(sinks, (self.num_heads,)))
        if args.dropout_prob:
            offset = args.dropout_offset
            offset = jnp.zeros(2, jnp.uint32) if offset is None else offset.astype(jnp.uint32)
            words = jnp.concatenate([args.dropout_seed.astype(jnp.uint32), offset])
            self.operands.add_scalars("seed", jax.lax.bitcast_convert_type(words, jnp.int32))

    @property
    def num_rows(self) -> int:
        """Numbers that come with each token: ids, and a position."""
        return self.rules.num_ids + self.rules.positions

    def _add_rows(self, name: str, side: block_ranges.Side, length: int, streamed: bool) -> None:
        rows = [*side.ids, *([side.positions] if self.rules.positions else [])]
        lead = max(x.shape[0] for x in rows)
        rows = jnp.stack([jnp.broadcast_to(x, (lead, x.shape[1])) for x in rows], axis=1)
        pad = ((0, 0), (0, 0), (0, length - side.length))
        size = self.fetched if streamed else self.held_size
        spec = self.spec(
            (None, self.num_rows, size),
            lambda b, h, g, i, f: (b if lead > 1 else 0, 0, f if streamed else i),
        )
        self.add(name, jnp.pad(rows.astype(jnp.int32), pad, constant_values=-1), spec)

    def _add_pairs(self, name: str, x: jax.Array) -> None:
        """An array over pairs, each axis full or one."""
        wide_b, wide_h, wide_q, wide_k = (n > 1 for n in x.shape)
        x = grid.pad_to(x, 2, self.padded[0]) if wide_q else x
        x = grid.pad_to(x, 3, self.padded[1]) if wide_k else x
        size_q, size_k = self.held_size, self.fetched
        if self.holds_keys:
            size_q, size_k = self.fetched, self.held_size

        def index(b: Any, h: Any, g: Any, i: Any, f: Any) -> tuple[Any, ...]:
            q, k = (f, i) if self.holds_keys else (i, f)
            return b if wide_b else 0, h if wide_h else 0, q if wide_q else 0, k if wide_k else 0

        shape = (None, None, size_q if wide_q else 1, size_k if wide_k else 1)
        self.add(name, x, self.spec(shape, index))

    # The kernel

    def run(
        self,
        name: str,
        body: Callable[..., None],
        out: dict[str, tuple[Any, Any]],
        scratch: dict[str, Any],
    ) -> list[jax.Array]:
        """Results of `body(call, refs)`; `out` has shapes and specs by name."""
        scratch = dict(scratch)
        if self.num_rows:
            scratch["columns"] = pltpu.VMEM((self.num_rows, self.held_size, tiles.LANES), jnp.int32)
        return self.operands.run(
            name,
            functools.partial(body, self),
            jnp.asarray(self.table),
            out,
            scratch,
            self.grid,
            self._in_order,
            self._vmem_limit,
            self._checked,
        )

    @property
    def _vmem_limit(self) -> int:
        return config.vmem_limit(self.args, self.cfg)

    def fill_columns(self, refs: Any) -> None:
        """Ids and positions of the held side, once a held block."""
        for i in range(self.num_rows):
            refs.columns[i] = tiles.to_column(refs.held_rows[i : i + 1])

    def tiles(self, refs: Any, at: Place, step: Step) -> None:
        """Runs `step` for the tiles of each streamed block to visit.

        Tiles of a block are parts of the held rows: independent work for the units of a core.
        """
        first, full, ragged, last = at.bounds
        for i, (band, j) in enumerate(zip(self.bands, at.bands, strict=True)):
            always = self.fetches == 1 and bool((self.table[..., 4 + i] >= 0).all())
            here = always or ((j >= 0) & (j < self.per_fetch))
            pl.when(here)(functools.partial(self._visit_band, at, step, band, j))

        def visit(j: Any, carry: Any, masked: bool) -> Any:
            rows = self.held_size // self.cfg.parts
            starts, shape = range(0, self.held_size, rows), (rows, self.step)
            made = [step(self._tile(at, j, (row, 0), shape, masked)) for row in starts]
            for together in [made] if self.cfg.overlap else [[one] for one in made]:
                grid.overlap(together)
            return carry

        nothing = np.int32(0)
        if self.masked:
            jax.lax.fori_loop(first, full, functools.partial(visit, masked=True), nothing)
        if self.unmasked:
            jax.lax.fori_loop(full, ragged, functools.partial(visit, masked=False), nothing)
        if self.masked:
            jax.lax.fori_loop(ragged, last, functools.partial(visit, masked=True), nothing)

    def _visit_band(self, at: Place, step: Step, band: block_ranges.Band, j: Any) -> None:
        """Parts of a masked block, cut to the registers that hold something visible.

        Parts differ in size: taken one after the other they leave units idle, on v6e 0.4 of the
        time, and are overlapped in the order in which the compiler sees them.
        """
        size, width = self.held_size, self.step
        rows = _EDGE if size % _EDGE == 0 else size // self.cfg.parts
        made = []
        for row in range(0, size, rows):
            start, stop = band.extent(row, (rows, width), tiles.LANES)
            if start < stop:
                shape = (rows, stop - start)
                part = band.moved(row, start, shape)
                made.append(step(self._tile(at, j, (row, start), shape, True, part)))
        grid.overlap(made)

    def _tile(
        self,
        at: Place,
        j: Any,
        corner: tuple[int, int],
        shape: tuple[int, int],
        masked: bool,
        band: block_ranges.Band | None = None,
    ) -> logits.Tile:
        row, lane = (np.int32(x) for x in corner)
        return logits.Tile(
            row=corner[0],
            lane=pl.multiple_of(j * self._int(self.step), self.step) + lane,
            held=at.held * self._int(self.held_size) + row,
            streamed=(at.first + j) * self._int(self.step) + lane,
            shape=shape,
            masked=masked,
            band=band,
        )
