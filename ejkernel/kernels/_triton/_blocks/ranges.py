"""Positions and segment ids of an attention call, from its lengths, ids and positions."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.xla_utils import segments


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
    batch, t = args.query.shape[:2]
    s = args.key.shape[1]
    q_pos = k_pos = None
    ids = []
    if args.cum_seqlens_q is not None and batch > 1:
        len_q, len_k = jnp.diff(args.cum_seqlens_q), jnp.diff(args.cum_seqlens_k)
        q_pos = jnp.arange(t, dtype=jnp.int32)[None] + (len_k - len_q)[:, None]
        ids.append(
            (segments.lengths_to_segment_ids(len_q, t), segments.lengths_to_segment_ids(len_k, s))
        )
    elif args.cum_seqlens_q is not None:
        cum_q, cum_k = args.cum_seqlens_q, args.cum_seqlens_k
        q_pos = segments.cu_seqlens_to_query_positions(cum_q, cum_k, t)[None]
        k_pos = segments.cu_seqlens_to_positions(cum_k, s)[None]
        q_ids = segments.cu_seqlens_to_segment_ids(cum_q, t)[None]
        ids.append((q_ids, segments.cu_seqlens_to_segment_ids(cum_k, s)[None]))
    if args.q_segment_ids is not None:
        ids.append((args.q_segment_ids, args.kv_segment_ids))
    if args.q_positions is not None:
        q_pos = args.q_positions
    if args.kv_positions is not None:
        k_pos = args.kv_positions
    if q_pos is not None or k_pos is not None:  # kernels take both or none
        q_pos = jnp.arange(t, dtype=jnp.int32)[None] + s - t if q_pos is None else q_pos
        k_pos = jnp.arange(s, dtype=jnp.int32)[None] if k_pos is None else k_pos
    return Tokens(t, s, s - t, q_pos, k_pos, tuple(ids))
