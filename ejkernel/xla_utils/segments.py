"""Conversions between cumulative lengths, lengths, segment ids and dense masks.

Everything works on traced arrays and never waits for the device, `mask_to_segment_ids`'s check of
a concrete mask excepted. A negative id is padding: it attends to nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Int32, Shaped

from ejkernel.xla_utils import search


def as_integer_array(op: str, name: str, value: ArrayLike, axes: str) -> Array:
    """`value` as an array with one dimension per letter of `axes`, or an error naming both."""
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`{op}`: `{name}` must hold integers; got {array.dtype}. Cast it first.")
    if array.ndim != len(axes.split()):
        raise ValueError(
            f"`{op}`: `{name}` must be [{axes}], rank {len(axes.split())}; got {array.shape}."
        )
    return array


def as_bool_mask(op: str, name: str, mask: ArrayLike) -> Bool[Array, "..."]:
    """True where a mask of bools or integers is nonzero, or an error naming both.

    A floating mask is refused: elsewhere it is added to the scores, where 0 means "attend".
    """
    mask = jnp.asarray(mask)
    if mask.dtype == bool:
        return mask
    if not jnp.issubdtype(mask.dtype, jnp.integer):
        raise TypeError(
            f"`{op}`: `{name}` must be bool or integer, with True or nonzero where a query may see "
            f"a key; got {mask.dtype}. An additive mask (0 and -inf): pass it as `bias=`. One of 0 "
            f"and 1: pass `{name} != 0`."
        )
    return mask != jnp.zeros((), mask.dtype)


def _as_cu_seqlens(op: str, name: str, value: ArrayLike) -> Int32[Array, " bounds"]:
    cu_seqlens = as_integer_array(op, name, value, "n+1").astype(jnp.int32)
    if not cu_seqlens.size:
        raise ValueError(f"`{op}`: `{name}` must have n+1 entries; got none. No sequences: [0].")
    return cu_seqlens


def cu_seqlens_to_segment_ids(
    cu_seqlens: Int[ArrayLike, " bounds"], length: int
) -> Int32[Array, " {length}"]:
    """The index of the sequence that owns each packed token; -1 for a token outside all of them.

    Args:
      cu_seqlens: Non-decreasing token offsets; equal neighbours are empty sequences, and tokens
        before the first or from the last one on are outside.
      length: Size of the packed token axis.
    """
    cu_seqlens = _as_cu_seqlens("cu_seqlens_to_segment_ids", "cu_seqlens", cu_seqlens)
    tokens = jnp.arange(length, dtype=jnp.int32)
    # side="right" skips empty sequences: their end is their start, so a later one owns the token
    ids = search.count_before(cu_seqlens, tokens) - 1
    return jnp.where(ids < cu_seqlens.size - 1, ids, -1)


def cu_seqlens_to_positions(
    cu_seqlens: Int[ArrayLike, " bounds"], length: int
) -> Int32[Array, " {length}"]:
    """The index of each packed token inside its own sequence; 0 for a token outside all of them."""
    cu_seqlens = _as_cu_seqlens("cu_seqlens_to_positions", "cu_seqlens", cu_seqlens)
    ids = cu_seqlens_to_segment_ids(cu_seqlens, length)
    # an id of -1 reads the last entry, in bounds, and is replaced
    return jnp.where(ids >= 0, jnp.arange(length, dtype=jnp.int32) - cu_seqlens[ids], 0)


def cu_seqlens_to_query_positions(
    cu_seqlens_q: Int[ArrayLike, " bounds"], cu_seqlens_k: Int[ArrayLike, " bounds"], length: int
) -> Int32[Array, " {length}"]:
    """The position of each packed query among its sequence's keys, aligned bottom-right.

    Query i of a sequence is at `len_k - len_q + i`, negative where it precedes every key; 0 for a
    token outside all sequences.
    """
    op = "cu_seqlens_to_query_positions"
    cu_q = _as_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q)
    cu_k = _as_cu_seqlens(op, "cu_seqlens_k", cu_seqlens_k)
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"`{op}`: `cu_seqlens_q` and `cu_seqlens_k` must describe the same sequences; got "
            f"{cu_q.shape} and {cu_k.shape}. Repeat the last entry of the shorter one."
        )
    ids = cu_seqlens_to_segment_ids(cu_q, length)
    from_end = jnp.arange(length, dtype=jnp.int32) - cu_q[ids + 1]
    return jnp.where(ids >= 0, from_end + cu_k[ids + 1] - cu_k[ids], 0)


def cu_seqlens_to_lengths(cu_seqlens: Int[ArrayLike, " bounds"]) -> Int32[Array, " n"]:
    """The length of each sequence: the differences of `cu_seqlens`."""
    return jnp.diff(_as_cu_seqlens("cu_seqlens_to_lengths", "cu_seqlens", cu_seqlens))


def lengths_to_cu_seqlens(lengths: Int[ArrayLike, " n"]) -> Int32[Array, " n+1"]:
    """Token offsets of sequences packed without gaps: 0, then the running sum of `lengths`."""
    lengths = as_integer_array("lengths_to_cu_seqlens", "lengths", lengths, "n")
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])


def lengths_to_segment_ids(
    lengths: Int[ArrayLike, " b"], length: int
) -> Int32[Array, "b {length}"]:
    """Segment ids of right-padded rows: 0 inside the row's length, -1 beyond it."""
    lengths = as_integer_array("lengths_to_segment_ids", "lengths", lengths, "b")
    inside = jnp.arange(length, dtype=jnp.int32)[None, :] < lengths.astype(jnp.int32)[:, None]
    return jnp.where(inside, 0, -1).astype(jnp.int32)


def segment_ids_to_mask(
    q_ids: Int[ArrayLike, "#b t"], kv_ids: Int[ArrayLike, "#b s"] | None = None
) -> Bool[Array, "b 1 t s"]:
    """The dense mask of segment ids: attend iff both are equal and not negative.

    Args:
      q_ids: Ids of the queries.
      kv_ids: Ids of the keys. Default: `q_ids`.
    """
    op = "segment_ids_to_mask"
    q_ids = as_integer_array(op, "q_ids", q_ids, "b t")
    kv_ids = q_ids if kv_ids is None else as_integer_array(op, "kv_ids", kv_ids, "b s")
    q_ids, kv_ids = q_ids[:, None, :, None], kv_ids[:, None, None, :]
    # ids of two widths are still ids; a cast to the narrower one could make different ids equal
    with jax.numpy_dtype_promotion("standard"):
        return (q_ids == kv_ids) & (q_ids >= 0) & (kv_ids >= 0)


def segment_ids_to_cu_seqlens(
    ids: Int[ArrayLike, " length"], num_segments: int
) -> Int32[Array, " {num_segments}+1"]:
    """Token offsets of packed segments: segment k is the run of tokens whose id is k.

    The inverse of `cu_seqlens_to_segment_ids`.

    Args:
      ids: Non-decreasing ids, contiguous in the token axis (a precondition: it is not checked).
        Padding (negative) may stand before the first and after the last segment. Ids that do not
        occur are empty segments.
      num_segments: Number of segments; tokens with an id from there on belong to none.
    """
    ids = as_integer_array("segment_ids_to_cu_seqlens", "ids", ids, "length")
    leading = jnp.sum(jnp.cumsum(ids >= 0) == 0, keepdims=True, dtype=jnp.int32)
    # negative indices would count from the end; one past the end is dropped
    slots = jnp.where((ids >= 0) & (ids < num_segments), ids, num_segments).astype(jnp.int32)
    counts = jnp.zeros(num_segments, jnp.int32).at[slots].add(1, mode="drop")
    return jnp.concatenate([leading, leading + jnp.cumsum(counts, dtype=jnp.int32)])


def mask_to_segment_ids(
    mask: Shaped[ArrayLike, "*bh t s"],
) -> tuple[Int32[Array, "b t"], Int32[Array, "b s"]]:
    """The smallest segment ids that reproduce a block-diagonal mask exactly.

    Any two queries must see the same keys or have none in common; blocks need not be contiguous.
    They are numbered by their first key. Queries and keys without a partner get -1.

    Args:
      mask: `[t, s]`, `[b, t, s]` or `[b, h, t, s]` with equal heads; True or nonzero = attend. An
        axis of size 1 is an axis of length 1, not one to broadcast.

    Raises:
      ValueError: if the mask is concrete and no ids reproduce it. Under tracing it cannot be
        looked at: a block-diagonal mask is then a precondition.
    """
    if isinstance(mask, jax.core.Tracer):
        return _block_ids(_with_batch_and_heads(mask)[:, 0])
    with jax.ensure_compile_time_eval():  # else a constant inside a jit could not be looked at
        dense = _with_batch_and_heads(mask)
        q_ids, kv_ids = _block_ids(dense[:, 0])
        wrong = segment_ids_to_mask(q_ids, kv_ids) != dense
        if wrong.any():
            batch, head, query, key = (int(i) for i in np.argwhere(np.asarray(wrong))[0])
            raise ValueError(
                "`mask_to_segment_ids`: `mask` must be block-diagonal with equal heads (two queries"
                f" see the same keys or none in common); {batch=}, {head=}, {query=}, {key=} breaks"
                " this. Keep it a dense `attention_mask`."
            )
    return q_ids, kv_ids


def _with_batch_and_heads(mask: ArrayLike) -> Bool[Array, "b h t s"]:
    mask = as_bool_mask("mask_to_segment_ids", "mask", mask)
    if mask.ndim not in (2, 3, 4):
        raise ValueError(
            "`mask_to_segment_ids`: `mask` must be [t, s], [b, t, s] or [b, h, t, s]; got "
            f"{mask.shape}."
        )
    mask = mask[:, None] if mask.ndim == 3 else mask
    return mask[None, None] if mask.ndim == 2 else mask


@jax.jit
def _block_ids(
    mask: Bool[Array, "b t s"],
) -> tuple[Int32[Array, "b t"], Int32[Array, "b s"]]:
    """Ids by each block's first key, the one thing that all its rows can name alone."""
    b, t, s = mask.shape
    if t == 0 or s == 0:
        return jnp.full((b, t), -1, jnp.int32), jnp.full((b, s), -1, jnp.int32)
    first_key = jnp.where(mask.any(axis=2), lax.argmax(mask, 2, jnp.int32), -1)  # [b, t]
    first_query = lax.argmax(mask, 1, jnp.int32)  # [b, s]
    leader = jnp.where(mask.any(axis=1), jnp.take_along_axis(first_key, first_query, 1), -1)
    leads = leader == jnp.arange(s, dtype=jnp.int32)[None, :]
    rank = jnp.cumsum(leads, axis=1, dtype=jnp.int32) - 1
    q_ids, kv_ids = (
        jnp.where(first >= 0, jnp.take_along_axis(rank, jnp.maximum(first, 0), 1), -1)
        for first in (first_key, leader)
    )
    return q_ids, kv_ids
