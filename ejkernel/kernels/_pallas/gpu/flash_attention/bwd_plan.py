"""What a program of the attention backward works on: keys, and the blocks of queries they meet.

Where dq has a kernel of its own, a program of that works on queries and the blocks of their keys.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.gpu._blocks import deal, mosaic, ranges
from ejkernel.kernels._pallas.gpu.flash_attention import config

WARPGROUPS = config.BACKWARD_WARPGROUPS
TILE_KEYS = WARPGROUPS * mosaic.ROWS
TILE_QUERIES = WARPGROUPS * mosaic.ROWS  # of the kernel of dq alone


class Bounds(NamedTuple):
    """Blocks of queries [first, last) meet keys of a tile; those in [full, ragged) see them all.

    Or, of a tile of queries, blocks of keys that it sees; all of it, those in [full, ragged).
    """

    first: Any
    full: Any
    ragged: Any
    last: Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and options of a call, known when its kernels are compiled.

    `left` and `right` limit the distance of keys before and behind a query; None: no limit.
    """

    batch: int
    num_q: int
    num_k: int
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    scale: float
    cap: float | None  # of scores
    left: int | None
    right: int | None
    block_q: int
    num_stages: int
    registers: tuple[int, int]  # of a thread that computes, and of one that loads
    section: int  # MiB of queries and their gradients that programs work on at a time
    num_programs: int  # that run at a time
    twin: bool  # for JAX's interpreter
    in_order: bool = False  # dq has a kernel of its own, and all sums a fixed order
    limits: tuple[str, ...] = ()  # of keys by `segment_ranges`, where ids or lengths decide

    @property
    def group(self) -> int:
        return self.heads // self.key_heads

    @property
    def k_tiles(self) -> int:
        return cdiv(self.num_k, TILE_KEYS)

    @property
    def padded_q(self) -> int:
        """Queries in whole blocks, or in whole tiles where dq has a kernel of its own."""
        size = TILE_QUERIES if self.in_order else self.block_q
        return cdiv(self.num_q, size) * size

    @property
    def q_tiles(self) -> int:
        return cdiv(self.num_q, TILE_QUERIES)

    @property
    def block_k(self) -> int:
        """Keys in a block of the kernel of dq alone."""
        return config.dq_block_k(self.head_dim)

    @property
    def cuts_keys(self) -> bool:
        """Whether the last tile has rows behind the last key."""
        return self.num_k % TILE_KEYS != 0

    @property
    def masks(self) -> bool:
        """Whether any tile needs a mask.

        Rows behind the last query need none: they have no logsumexp, so that their weights are 0.
        """
        near = self.left is not None or self.right is not None
        return self.cuts_keys or near or bool(self.limits)

    @functools.cached_property
    def reach(self) -> ranges.Reach:
        """Which queries a key meets: the roles of queries and keys are exchanged."""
        return ranges.Reach(self.num_k, self.num_q, self.right, self.left, self.block_q)

    def place(self, program: Any) -> tuple[Any, Any, Any]:
        """Batch, key head and tile; under a causal mask the longest tiles come first.

        The (batch, key head) pairs of a section take turns: their queries and gradients of queries
        stay in the L2 cache, and their tiles are enough for nearly all multiprocessors.
        """
        bytes_each = 8 * self.group * self.num_q * self.head_dim  # queries and their gradients
        first = np.arange(self.k_tiles) * TILE_KEYS
        # where ids or lengths decide, as many as without them
        blocks = self.reach.blocks(first, first + (TILE_KEYS - 1))
        steps = tuple((self.group * (blocks.top - blocks.bottom)).tolist())
        width = self._balanced(steps, self.key_heads, bytes_each)
        return _place(program, self.batch, self.key_heads, self.k_tiles, width)

    def _balanced(self, steps: tuple[int, ...], heads: int, bytes_each: int) -> int:
        fitting = max((self.section << 20) // max(bytes_each, 1), 1)
        return deal.balanced(steps, self.batch * heads, fitting, self.num_programs)

    def place_queries(self, program: Any) -> tuple[Any, Any, Any]:
        """Batch, head and tile of queries; under a causal mask the longest tiles come first.

        The heads of a section take turns, and their keys and values stay in the L2 cache.
        """
        bytes_each = 2 * self.num_k * (self.head_dim + self.value_dim) // self.group
        first = np.arange(self.q_tiles) * TILE_QUERIES
        blocks = self.query_reach.blocks(first, first + (TILE_QUERIES - 1))
        steps = tuple((blocks.top - blocks.bottom).tolist())
        width = self._balanced(steps, self.heads, bytes_each)
        batch, head, tile = _place(program, self.batch, self.heads, self.q_tiles, width)
        return batch, head, tile if self.right is None else self.q_tiles - 1 - tile

    def bounds(self, tile: Any) -> Bounds:
        """Of a tile of keys; at least one block, which may see none of them."""
        key = tile * TILE_KEYS
        blocks = self.reach.blocks(key, key + (TILE_KEYS - 1))
        first, last = blocks.bottom, blocks.top
        full, ragged = first, last
        offset = self.num_k - self.num_q  # position of the first query
        if self.right is not None:  # queries from here on see the last key
            full = _ceil(key + (TILE_KEYS - 1 - self.right - offset), self.block_q)
        if self.left is not None:  # queries before this one see the first key
            ragged = _floor(key + (self.left + 1 - offset), self.block_q)
        if self.cuts_keys:
            full = jnp.where(tile == self.k_tiles - 1, last, full)
        full = jnp.clip(full, first, last)
        return Bounds(first, full, jnp.clip(ragged, full, last), last)

    @functools.cached_property
    def query_reach(self) -> ranges.Reach:
        """Which keys a query sees."""
        return ranges.Reach(self.num_q, self.num_k, self.left, self.right, self.block_k)

    def query_bounds(self, tile: Any) -> Bounds:
        """Blocks of keys [first, last) that a tile of queries sees; [full, ragged) need no mask.

        There is at least one, which may be hidden from all of them.
        """
        row = tile * TILE_QUERIES
        blocks = self.query_reach.blocks(row, row + (TILE_QUERIES - 1))
        ragged = blocks.edge if self.masks_last_keys else blocks.top
        return Bounds(blocks.bottom, blocks.inner, ragged, blocks.top)

    @property
    def masks_last_keys(self) -> bool:
        """Whether the last blocks of keys that a tile of queries sees take a mask.

        A window takes it as well, whose left end may be in the last of them.
        """
        reach = self.query_reach
        return self.left is not None or self.right is not None or reach.is_ragged

    def sees(self, queries: Any, keys: Any) -> Any:
        """Whether queries see keys, for arrays of indices of one shape."""
        seen = self.reach.sees(keys, queries)
        if not self.cuts_keys:
            return seen
        inside = keys < self.num_k
        return inside if seen is None else seen & inside


def slot(number: Any, count: int) -> Any:
    """Which of `count` buffers a step uses."""
    if count & (count - 1):
        return lax.rem(number, jnp.int32(count))
    return number & (count - 1)  # a remainder of a signed number takes two steps more


def _place(program: Any, batch: int, heads: int, tiles: int, width: int) -> tuple[Any, Any, Any]:
    """Batch, head and tile of a program, in sections of `width` pairs of batch and head."""
    number, rest = _divmod(program, width * tiles)
    here = jnp.minimum(width, batch * heads - number * width)
    tile, within = _divmod(rest, here)
    return (*_divmod(number * width + within, heads), tile)


def _divmod(x: Any, y: Any) -> tuple[Any, Any]:
    y = jnp.asarray(y, jnp.int32)
    return lax.div(x, y), lax.rem(x, y)


def _floor(row: Any, size: int) -> Any:
    """The block of a row; 0 for rows before the first."""
    return lax.div(jnp.maximum(row, 0), jnp.int32(size))


def _ceil(row: Any, size: int) -> Any:
    return _floor(row + (size - 1), size)
