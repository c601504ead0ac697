"""Which tokens make which row: tables that the kernels read.

Tokens are counted over all rows of a batch.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv
from ejkernel.kernels._shared import pooled_rows
from ejkernel.xla_utils import search


class Rows(NamedTuple):
    """The rows of the output, each a run of tokens."""

    starts: Any  # [rows]
    stops: Any  # [rows], token after the last
    counts: Any  # [rows], tokens that the mask keeps
    longest: int  # tokens of a row, at most


def rows(args: Any) -> Rows:
    """From chunks or sequences; without either, a batch's rows."""
    batch, t = args.inputs.shape[:2]
    # a chunk beyond the last token would hold nothing
    size = t if args.chunk_size is None else min(args.chunk_size, t)
    if args.cu_seqlens is not None:
        made = pooled_rows.make(args)
        return Rows(made.stop - made.count, made.stop, made.count, size)
    chunks = cdiv(t, size)
    low = np.arange(chunks) * size
    first = (np.arange(batch)[:, None] * t).astype(np.int32)
    starts, stops = (
        (first + x).astype(np.int32).reshape(-1) for x in (low, np.minimum(low + size, t))
    )
    if args.mask is None:
        return Rows(starts, stops, stops - starts, size)
    mask = jnp.pad(args.mask, ((0, 0), (0, chunks * size - t)))
    return Rows(starts, stops, mask.reshape(-1, size).sum(axis=1, dtype=jnp.int32), size)


class Slices(NamedTuple):
    """Rows cut into runs of at most `slice_t` tokens, those of a row one after the other."""

    starts: jax.Array  # [slices]
    stops: jax.Array  # [slices]; those beyond the last row's are empty
    first: jax.Array  # [rows], slice
    after: jax.Array  # [rows], slice after the last


def slices(found: Rows, slice_t: int, tokens: int) -> Slices:
    """Of all `tokens`; only the last slice of a row may be shorter."""
    starts, stops = (jnp.asarray(x) for x in (found.starts, found.stops))
    count = -((starts - stops) // slice_t)
    after = jnp.cumsum(count, dtype=jnp.int32)
    num_rows = starts.shape[0]
    most = min(num_rows * cdiv(found.longest, slice_t), tokens // slice_t + num_rows)
    index = jnp.arange(most, dtype=jnp.int32)
    row = search.count_before(after, index)
    row = jnp.minimum(row, num_rows - 1)
    begin = jnp.minimum(starts[row] + (index - (after - count)[row]) * slice_t, stops[row])
    return Slices(begin, jnp.minimum(begin + slice_t, stops[row]), after - count, after)


def row_of_token(args: Any) -> jax.Array:
    """[tokens]; -1 for a token that counts nowhere."""
    batch, t = args.inputs.shape[:2]
    if args.cu_seqlens is not None:
        made = pooled_rows.make(args)
        return jnp.where(made.inside, made.of_token, -1)
    size = t if args.chunk_size is None else min(args.chunk_size, t)
    row = np.arange(batch)[:, None] * cdiv(t, size) + np.arange(t) // size
    row = row.astype(np.int32).reshape(-1)
    return jnp.asarray(row) if args.mask is None else jnp.where(args.mask.reshape(-1), row, -1)
