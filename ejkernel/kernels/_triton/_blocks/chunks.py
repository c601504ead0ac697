"""Token axes cut into chunks, of rows or of packed sequences; no chunk holds two of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.xla_utils import search


class Chunks(NamedTuple):
    """How the tokens of a call are cut. The last three members are None unless packed."""

    num_tokens: Any  # of a row
    num_chunks: Any  # of a row; packed, of all sequences together at most
    REVERSE: tl.constexpr  # the first chunk begins at the last token
    SIZE: tl.constexpr  # tokens in a chunk
    bounds: Any  # int32 [n + 1], the first token of each sequence
    used: Any  # int32 [n + 1], the first chunk of each sequence
    sequence: Any  # int32 [chunks], the sequence of each chunk; unused, the last


class Row(NamedTuple):
    """A row of the batch, or a packed sequence."""

    begin: Any  # its first token in the order of memory, counted over all rows, in 64 bits
    length: Any
    first: Any  # its first chunk
    count: Any  # of its chunks


class Span(NamedTuple):
    """The tokens of a chunk, in the order in which the recurrence takes them."""

    token: Any  # the first, counted over all rows, in 64 bits
    count: Any
    step: Any  # from one token to the next: 1 or -1


class Operand(NamedTuple):
    """An array [b, t, own heads, width], whose heads serve groups of heads."""

    base: Any
    STRIDE: tl.constexpr  # elements between two tokens
    WIDTH: tl.constexpr
    GROUP: tl.constexpr  # heads to one of the array's own


def cut(t: int, size: int, cu_seqlens: jax.Array | None, reverse: bool) -> tuple[Chunks, int]:
    """The bundle of a call, and how many chunks its grid has for each row."""
    if cu_seqlens is None:
        count = -(-t // size)
        return Chunks(t, count, reverse, size, None, None, None), count
    rows = cu_seqlens.shape[0] - 1
    count = t // size + rows
    ends = jnp.clip(cu_seqlens, 0, t).astype(jnp.int32)
    lengths = jnp.maximum(ends[1:] - ends[:-1], 0)
    used = jnp.cumsum((lengths + size - 1) // size).astype(jnp.int32)
    place = jnp.arange(count, dtype=jnp.int32)
    # unrolled: a loop would be as many launches as it has steps
    found = search.count_before(used, place)
    sequence = jnp.minimum(found, rows - 1)
    used = jnp.concatenate([jnp.zeros(1, jnp.int32), used])
    return Chunks(t, count, reverse, size, ends, used, sequence.astype(jnp.int32)), count


@triton.jit
def row_of(chunks, i_n):
    """Tokens and chunks of row i_n. Bad bounds give wrong rows, never an address outside."""
    if chunks.bounds is None:
        begin = i_n.to(tl.int64) * chunks.num_tokens
        return Row(begin, chunks.num_tokens, i_n * chunks.num_chunks, chunks.num_chunks)
    else:
        begin = tl.load(chunks.bounds + i_n)
        length = tl.maximum(tl.load(chunks.bounds + i_n + 1) - begin, 0)
        first = tl.minimum(tl.load(chunks.used + i_n), chunks.num_chunks)
        last = tl.minimum(tl.load(chunks.used + i_n + 1), chunks.num_chunks)
        return Row(begin.to(tl.int64), length, first, last - first)


@triton.jit
def span_of(chunks, row, j):
    """The tokens of a row's chunk j."""
    done = j * chunks.SIZE
    count = tl.minimum(row.length - done, chunks.SIZE)
    if chunks.REVERSE:
        return Span(row.begin + (row.length - 1 - done), count, -1)
    else:
        return Span(row.begin + done, count, 1)


@triton.jit
def chunk_of(chunks, i_c):
    """The tokens of chunk i_c of all; their count is below 1 where the chunk is not used."""
    if chunks.bounds is None:
        row = row_of(chunks, i_c // chunks.num_chunks)
        return span_of(chunks, row, i_c % chunks.num_chunks)
    else:
        row = row_of(chunks, tl.load(chunks.sequence + i_c))
        return span_of(chunks, row, i_c - row.first)


@triton.jit
def pointers(base, STRIDE: tl.constexpr, span, head_offset, o_c, o_x):
    """[C, X]; 64 bits for the first token alone."""
    first = base + span.token * STRIDE + head_offset
    return first + (span.step * o_c)[:, None] * STRIDE + o_x[None, :]


@triton.jit
def load(x, span, i_h, o_c, o_x):
    """Columns o_x of a chunk, [C, X]; zeros beyond its tokens and beyond the columns."""
    p = pointers(x.base, x.STRIDE, span, (i_h // x.GROUP) * x.WIDTH, o_c, o_x)
    return tl.load(p, mask=(o_c < span.count)[:, None] & (o_x < x.WIDTH)[None, :], other=0.0)


@triton.jit
def store(base, tile, span, i_h, o_c, o_x, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Stores columns o_x of a chunk into an array [b, t, heads, width]."""
    p = pointers(base, HEADS * WIDTH, span, i_h * WIDTH, o_c, o_x)
    inside = (o_c < span.count)[:, None] & (o_x < WIDTH)[None, :]
    tl.store(p, tile.to(base.dtype.element_ty), mask=inside)
