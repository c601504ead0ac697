"""Positions and segment ids of an attention call, from its lengths, ids and positions."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ejkernel.xla_utils import positions


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
