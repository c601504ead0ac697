"""Everything that happens to one tile of query-key pairs: bias, caps, masks and dropout.

Tiles have axes b, g, r, t, s (batch, key heads, query heads of a key head, queries, keys) in the
order "ts", or b, g, s, r, t in the order "st", which the backward pass multiplies without copies.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _attention
from ejkernel.kernels._shared.products import wide
from ejkernel.kernels._xla._blocks import block_ranges, loops, philox
from ejkernel.xla_utils import positions


class Tile(NamedTuple):
    """Indices of a block: batch rows, key heads, queries, keys."""

    b: Any
    g: Any
    i: Any
    j: Any


class Blocks(NamedTuple):
    """Sizes of blocks along batch, key heads, queries and keys."""

    b: int
    g: int
    q: int
    k: int


def pad(x: Any, axis: int, size: int, value: Any = 0) -> Any:
    """Pads the end of an axis to `size`."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    module = np if isinstance(x, np.ndarray) else jnp
    return module.pad(x, widths, constant_values=value)


class Pairs:
    """The pairs of one attention call, cut into tiles."""

    def __init__(self, args: Any, blocks: Blocks):
        self.args, self.blocks = args, blocks
        self.dtype = wide(args.query.dtype)
        batch, self.t, self.heads, _ = args.query.shape
        _, self.s, self.groups, _ = args.key.shape
        self.batch, self.repeat = batch, self.heads // self.groups
        self.num_q, self.num_k = -(-self.t // blocks.q), -(-self.s // blocks.k)
        self.padded_t, self.padded_s = self.num_q * blocks.q, self.num_k * blocks.k
        self.q_pos, self.k_pos, self.ids = self._positions()
        self.bias, self.mask = self._pairwise(args.bias), self._pairwise(args.attention_mask)
        self.slopes = None
        if args.alibi_slopes is not None:
            shape = (1, self.groups, self.repeat)
            self.slopes = args.alibi_slopes.astype(self.dtype).reshape(shape)
        self.seen = self._seen()

    # Arrays of the call in the kernel's layout

    def queries(self, x: jax.Array) -> jax.Array:
        """[b, t, h, d] -> [b, g, r, T, d], padded."""
        split = x.reshape(*x.shape[:2], self.groups, self.repeat, x.shape[-1])
        return pad(split.transpose(0, 2, 3, 1, 4), 3, self.padded_t)

    def keys(self, x: jax.Array) -> jax.Array:
        """[b, s, g, d] -> [b, g, S, d], padded."""
        return pad(x.transpose(0, 2, 1, 3), 2, self.padded_s)

    def rows(self, x: jax.Array) -> jax.Array:
        """[b, h, t] -> [b, g, r, T], padded."""
        return pad(x.reshape(self.batch, self.groups, self.repeat, self.t), 3, self.padded_t)

    def sinks(self) -> jax.Array | None:
        """[1 or h, n] -> [1, 1 or g, 1 or r, n]."""
        sinks = self.args.softmax_aux
        if sinks is None:
            return None
        shared = sinks.shape[0] == 1
        shape = (1, 1, 1) if shared else (1, self.groups, self.repeat)
        return sinks.astype(self.dtype).reshape(*shape, sinks.shape[-1])

    def _pairwise(self, x: jax.Array | None) -> jax.Array | None:
        """[b, h, t, s] with broadcast axes -> [b, g, r, T, S]."""
        if x is None:
            return None
        shape = (1, 1) if x.shape[1] == 1 else (self.groups, self.repeat)
        x = x.reshape(x.shape[0], *shape, *x.shape[2:])
        x = x if x.shape[3] == 1 else pad(x, 3, self.padded_t)
        return x if x.shape[4] == 1 else pad(x, 4, self.padded_s)

    # Masks

    def _positions(self) -> tuple[Any, Any, list[tuple[Any, Any]]]:
        """Positions [b or 1, T] and [b or 1, S], and ids that must be equal and not negative."""
        t, s = self.t, self.s
        tokens = positions.of_attention(self.args)
        # NumPy, where the index tells: tables of such positions are known while tracing
        q_pos, k_pos = tokens.both(t, s, np)
        ids: list[tuple[Any, Any]] = list(tokens.ids)
        if not ids and (self.padded_t != t or self.padded_s != s):
            ids.append((np.zeros((1, t), np.int32), np.zeros((1, s), np.int32)))
        ids = [(pad(q, 1, self.padded_t, -1), pad(k, 1, self.padded_s, -1)) for q, k in ids]
        return pad(q_pos, 1, self.padded_t), pad(k_pos, 1, self.padded_s), ids

    def _seen(self) -> Any:
        """Block pairs [b or 1, nq, nk] that may hold a visible pair; NumPy when static."""
        valid_q = valid_k = None
        for q, k in self.ids:
            valid_q = q >= 0 if valid_q is None else valid_q & (q >= 0)
            valid_k = k >= 0 if valid_k is None else valid_k & (k >= 0)

        def extents(q: Any, k: Any) -> tuple[Any, Any]:
            return (
                block_ranges.extent(q, self.blocks.q, valid_q),
                block_ranges.extent(k, self.blocks.k, valid_k),
            )

        seen = block_ranges.near(*extents(self.q_pos, self.k_pos), self.args.sliding_window)
        for q, k in self.ids:
            seen = seen & block_ranges.overlap(*extents(q, k))
        return seen

    def key_bounds(self, b: Any, i: Any) -> tuple[Any, Any]:
        """Blocks of keys that queries block i of batch block b may see."""
        return block_ranges.bounds(self.table(b), i)

    def query_bounds(self, b: Any, j: Any) -> tuple[Any, Any]:
        """Blocks of queries that may see keys block j."""
        return block_ranges.bounds(self.table(b).T, j)

    def table(self, b: Any) -> Any:
        seen = self.seen
        if isinstance(seen, np.ndarray):
            return seen[0]  # static tables do not depend on the row
        return loops.take(seen, b, self.blocks.b, 0).any(axis=0)

    def visible(self, at: Tile, order: str) -> jax.Array | None:
        """Which pairs of a tile are seen; None when all are."""
        terms = []
        for q, k in self.ids:
            q, k = self._q(q, at, order), self._k(k, at, order)
            terms.append((q == k) & (q >= 0))
        left, right = self.args.sliding_window
        if left is not None or right is not None:
            q_pos, k_pos = self._q(self.q_pos, at, order), self._k(self.k_pos, at, order)
            most = jnp.iinfo(q_pos.dtype)  # a limit added to a position stops there
            if right is not None:
                terms.append(k_pos <= jnp.minimum(q_pos, most.max - right) + right)
            if left is not None:
                terms.append(k_pos >= jnp.maximum(q_pos, most.min + left) - left)
        if self.mask is not None:
            terms.append(self._pair(self.mask, at, order))
        if not terms:
            return None
        seen = terms[0]
        for term in terms[1:]:
            seen = seen & term
        return seen

    # Logits

    def logits(self, dots: jax.Array, at: Tile, order: str) -> jax.Array:
        """Scores of a tile from its dot products, before masks."""
        return self.add_offsets(self.capped(dots), at, order)

    def capped(self, dots: jax.Array) -> jax.Array:
        """Scaled and capped dot products, before bias and slopes."""
        x = dots * self.args.softmax_scale
        cap = self.args.logits_soft_cap
        return x if cap is None else cap * jnp.tanh(x / cap)

    def add_offsets(self, x: jax.Array, at: Tile, order: str) -> jax.Array:
        """Adds bias and slopes to the capped scores of a tile."""
        if self.bias is not None:
            x = x + self._pair(self.bias, at, order).astype(self.dtype)
        if self.slopes is not None:
            slopes = loops.take(self.slopes, at.g, self.blocks.g, 1)
            slopes = slopes[:, :, :, None, None] if order == "ts" else slopes[:, :, None, :, None]
            q_pos, k_pos = self._q(self.q_pos, at, order), self._k(self.k_pos, at, order)
            x = x + slopes * _attention.distance(q_pos, k_pos, self.dtype)
        return x

    def slope_of_cap(self, x: jax.Array) -> jax.Array | float:
        """The derivative of `capped` by the scaled products, from what it returned."""
        cap = self.args.logits_soft_cap
        return 1.0 if cap is None else 1.0 - jnp.square(x / cap)

    def dropout(self, at: Tile, order: str) -> jax.Array | None:
        """Factors 0 or 1 / (1 - prob) of a tile; None without dropout."""
        args, blocks = self.args, self.blocks
        if not args.dropout_prob:
            return None
        offset = jnp.zeros(2, jnp.uint32) if args.dropout_offset is None else args.dropout_offset

        def index(block: Any, size: int) -> jax.Array:
            return jnp.asarray(block * size + jnp.arange(size, dtype=jnp.int32), jnp.uint32)

        head = index(at.g, blocks.g * self.repeat) + offset[1]
        kept = philox.keep(
            args.dropout_seed,
            args.dropout_prob,
            batch=(index(at.b, blocks.b) + offset[0])[:, None, None, None],
            head=head.reshape(1, blocks.g, self.repeat, 1),
            query=index(at.i, blocks.q),
            first_key=jnp.asarray(at.j * blocks.k, jnp.uint32),
            num_keys=blocks.k,
        )
        kept = kept if order == "ts" else kept.transpose(0, 1, 4, 2, 3)
        return kept.astype(self.dtype) / (1.0 - args.dropout_prob)

    # Blocks of arrays, placed for an order of axes

    def q_block(self, x: jax.Array, at: Tile) -> jax.Array:
        """The tile's part of an array [b, g, r, T, …]."""
        x = loops.take(loops.take(x, at.b, self.blocks.b, 0), at.g, self.blocks.g, 1)
        return loops.take(x, at.i, self.blocks.q, 3)

    def k_block(self, x: jax.Array, at: Tile) -> jax.Array:
        """The tile's part of an array [b, g, S, …]."""
        x = loops.take(loops.take(x, at.b, self.blocks.b, 0), at.g, self.blocks.g, 1)
        return loops.take(x, at.j, self.blocks.k, 2)

    def head_block(self, x: jax.Array | None, at: Tile) -> jax.Array | None:
        """The tile's part of an array [1, g, …]."""
        return None if x is None else loops.take(x, at.g, self.blocks.g, 1)

    def _q(self, x: Any, at: Tile, order: str) -> jax.Array:
        x = loops.take(jnp.asarray(x), at.b, self.blocks.b, 0)
        x = loops.take(x, at.i, self.blocks.q, 1)
        return x[:, None, None, :, None] if order == "ts" else x[:, None, None, None, :]

    def _k(self, x: Any, at: Tile, order: str) -> jax.Array:
        x = loops.take(jnp.asarray(x), at.b, self.blocks.b, 0)
        x = loops.take(x, at.j, self.blocks.k, 1)
        return x[:, None, None, None, :] if order == "ts" else x[:, None, :, None, None]

    def _pair(self, x: jax.Array, at: Tile, order: str) -> jax.Array:
        x = loops.take(loops.take(x, at.b, self.blocks.b, 0), at.g, self.blocks.g, 1)
        x = loops.take(loops.take(x, at.i, self.blocks.q, 3), at.j, self.blocks.k, 4)
        return x if order == "ts" else x.transpose(0, 1, 4, 2, 3)
