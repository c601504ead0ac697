"""Which tokens make which row of pooled packed sequences."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.xla_utils import search


class Rows(NamedTuple):
    """Output rows of packed sequences: consecutive runs of tokens."""

    of_token: jax.Array  # [t], in order and within the rows; any row for a token outside
    inside: jax.Array  # [t], whether a token belongs to a row
    stop: jax.Array  # [rows], token after the last
    count: jax.Array  # [rows], tokens


def why_no_kernel(args: Any) -> str | None:
    """What no kernel of a GPU pools: other dtypes, and nothing."""
    if args.inputs.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"needs bfloat16, float16 or float32; got {args.inputs.dtype}"
    if 0 in args.inputs.shape or (args.cu_seqlens is not None and args.cu_seqlens.shape[0] < 2):
        return f"needs at least one row, token and feature, and a sequence; got {args.inputs.shape}"
    return None


def make(args: Any) -> Rows:
    """Sequences, or their chunks in order, then empty rows."""
    t, num_sequences = args.inputs.shape[1], args.cu_seqlens.shape[0] - 1
    # the whole row is one chunk at most
    size = max(t, 1) if args.chunk_size is None else min(args.chunk_size, max(t, 1))
    cuts = jnp.clip(args.cu_seqlens, 0, t)
    lengths = jnp.maximum(cuts[1:] - cuts[:-1], 0)
    token = jnp.arange(t, dtype=jnp.int32)
    owner = search.count_before(cuts, token) - 1
    inside = (owner >= 0) & (owner < num_sequences)
    owner = jnp.clip(owner, 0, num_sequences - 1)
    if args.chunk_size is None:
        return Rows(owner, inside, cuts[1:], lengths)
    num_rows = t // args.chunk_size + num_sequences
    after = jnp.cumsum(-(-lengths // size), dtype=jnp.int32)  # rows up to a sequence's last
    before = after + lengths // -size
    of_token = jnp.clip(before[owner] + (token - cuts[owner]) // size, 0, num_rows - 1)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    sequence = jnp.minimum(search.count_before(after, row), num_sequences - 1)
    start = cuts[sequence] + (row - before[sequence]) * size
    stop = jnp.minimum(start + size, cuts[sequence + 1])
    count = jnp.where(row < after[-1], jnp.maximum(stop - start, 0), 0)
    return Rows(of_token, inside, stop, count)
