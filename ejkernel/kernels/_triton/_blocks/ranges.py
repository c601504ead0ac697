"""Which blocks of keys a block of queries has to visit, and which of them need no mask.

A table has a row [first, full, ragged, last] for each block: blocks from `first` to `last` may hold
visible pairs, and in those from `full` to `ragged` every pair is visible. Ordinary positions need
none: kernels compute their row; with ids or given positions the table is made on the device.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ejkernel.kernels._triton._blocks import table
from ejkernel.xla_utils import positions

Window = tuple[int | None, int | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """Positions and ids of queries and keys; None where they follow from the index."""

    num_q: int
    num_k: int
    offset: int  # position of the first query
    q_positions: jax.Array | None  # [b or 1, t]
    k_positions: jax.Array | None  # [b or 1, s]
    ids: Sequence[tuple[jax.Array, jax.Array]]  # at most two pairs of [b or 1, t] and [b or 1, s]

    @property
    def plain(self) -> bool:
        return not self.ids and self.q_positions is None and self.k_positions is None


def tokens(args: Any) -> Tokens:
    """The positions and ids of an attention call."""
    t, s = args.query.shape[1], args.key.shape[1]
    made = positions.of_attention(args)
    # kernels take the positions of both sides, or none
    return Tokens(t, s, s - t, *made.both_or_none(t, s), made.ids)


def key_table(of: Tokens, window: Window, block_q: int, block_k: int) -> jax.Array | None:
    """For each block of queries, its blocks of keys; [b or 1, blocks, 4] int32."""
    if of.plain:
        return None
    return table.block_table(_sides(of), (block_q, block_k), window)


def query_table(of: Tokens, window: Window, block_q: int, block_k: int) -> jax.Array | None:
    """For each block of keys, its blocks of queries; [b or 1, blocks, 4] int32."""
    if of.plain:
        return None
    left, right = window  # seen from the keys, the window is mirrored
    return table.block_table(_sides(of)[::-1], (block_k, block_q), (right, left))


def _sides(of: Tokens) -> list[tuple[Any, ...]]:
    """Queries and keys, as `block_table` wants them."""
    q_ids, k_ids = ([pair[i] for pair in of.ids] for i in range(2))
    return [(q_ids, of.q_positions, of.num_q, of.offset), (k_ids, of.k_positions, of.num_k, 0)]
