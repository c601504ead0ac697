"""Positions and ids of the queries and keys of an attention call: the one rule for all of them.

Query i is at position S - T + i and key j at j. With lengths, or with packed sequences, positions
are per sequence: query i at len_k - len_q + i. Positions that a caller gives replace these, each
for its side. A query and a key may attend if every pair of ids has equal ids that are not negative.
Lengths and packed sequences become a pair of ids, and segment ids are another one; segment ids
never move positions.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.xla_utils import segments


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """Positions and ids of queries and keys; positions are None where the index tells them."""

    q_positions: Any = None  # [b or 1, t]
    k_positions: Any = None  # [b or 1, s]
    ids: tuple[tuple[Any, Any], ...] = ()  # pairs of [b or 1, t] and [b or 1, s]

    def replaced(self, q_positions: Any, k_positions: Any) -> "Tokens":
        """With the positions that a caller gives; None keeps those of the rule."""
        q = self.q_positions if q_positions is None else q_positions
        k = self.k_positions if k_positions is None else k_positions
        return dataclasses.replace(self, q_positions=q, k_positions=k)

    def both(self, t: int, s: int, module: Any = jnp) -> tuple[Any, Any]:
        """Positions of both sides as arrays; those of the index are made with `module`."""
        index = lambda n: module.arange(n, dtype=np.int32)[None]
        q = index(t) + np.int32(s - t) if self.q_positions is None else self.q_positions
        return q, index(s) if self.k_positions is None else self.k_positions

    def both_or_none(self, t: int, s: int) -> tuple[Any, Any]:
        """Positions of both sides, or None for both where the index tells all."""
        if self.q_positions is None and self.k_positions is None:
            return None, None
        return self.both(t, s)


def of_rows(q_lengths: Any, k_lengths: Any, t: int, s: int) -> Tokens:
    """Rows that are padded at their end, from the real lengths of each, [b] or [1]."""
    first = (k_lengths - q_lengths)[:, None]
    ids = segments.lengths_to_segment_ids
    q_positions = jnp.arange(t, dtype=jnp.int32)[None] + first
    return Tokens(q_positions, None, ((ids(q_lengths, t), ids(k_lengths, s)),))


def of_packed(cum_seqlens_q: Any, cum_seqlens_k: Any, t: int, s: int) -> Tokens:
    """Sequences that are packed into one row, from their offsets."""
    ids = segments.cu_seqlens_to_segment_ids
    return Tokens(
        segments.cu_seqlens_to_query_positions(cum_seqlens_q, cum_seqlens_k, t)[None],
        segments.cu_seqlens_to_positions(cum_seqlens_k, s)[None],
        ((ids(cum_seqlens_q, t)[None], ids(cum_seqlens_k, s)[None]),),
    )


def of_attention(args: Any) -> Tokens:
    """The tokens of a call with the arrays of `flash_attention`.

    With more than one row, the differences of the cumulative lengths are the rows' lengths.
    """
    (batch, t), s = args.query.shape[:2], args.key.shape[1]
    cum_q, cum_k = args.cum_seqlens_q, args.cum_seqlens_k
    if cum_q is None:
        made = Tokens()
    elif batch > 1:
        made = of_rows(jnp.diff(cum_q), jnp.diff(cum_k), t, s)
    else:
        made = of_packed(cum_q, cum_k, t, s)
    if args.q_segment_ids is not None:
        ids = (*made.ids, (args.q_segment_ids, args.kv_segment_ids))
        made = dataclasses.replace(made, ids=ids)
    return made.replaced(args.q_positions, args.kv_positions)
