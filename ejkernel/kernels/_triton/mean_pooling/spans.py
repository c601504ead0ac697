"""Which tokens a program pools: chunks, sequences, or slices of them.

Tokens are counted over all rows of a batch. A slice is what one program reads: a chunk, or a part
of a chunk or sequence that is long.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Spans(NamedTuple):
    """How the tokens of a call are cut."""

    cuts: Any  # [num_sequences + 1] int32; None: rows are cut into chunks
    num_sequences: Any
    tokens: Any  # of a row
    size: Any  # tokens of a chunk
    chunks: Any  # of a row
    length: Any  # tokens of a slice
    slices: Any  # of a chunk
    SLICED: tl.constexpr  # a row of the output may have several slices
    PADDED: tl.constexpr  # a power of two, at least num_sequences + 2


class Span(NamedTuple):
    """Tokens [start, stop) of one row of the output, which has `count` without a mask."""

    row: Any
    start: Any
    stop: Any
    count: Any
    inside: Any  # false for tokens of no sequence


@triton.jit
def _segments(spans, OUTSIDE: tl.constexpr):
    """First token of each sequence and the one after its last, [PADDED].

    With OUTSIDE, tokens before the first sequence and after the last are segments too.
    """
    index, last = tl.arange(0, spans.PADDED), spans.num_sequences
    if OUTSIDE:
        low = tl.load(
            spans.cuts + index - 1, mask=(index > 0) & (index <= last + 1), other=spans.tokens
        )
        low = tl.where(index == 0, 0, low)
        high = tl.load(spans.cuts + index, mask=index <= last, other=spans.tokens)
    else:
        low = tl.load(spans.cuts + index, mask=index < last, other=spans.tokens)
        high = tl.load(spans.cuts + index + 1, mask=index < last, other=spans.tokens)
    low = tl.minimum(tl.maximum(low, 0), spans.tokens)
    high = tl.maximum(tl.minimum(tl.maximum(high, 0), spans.tokens), low)
    return index, low, high


@triton.jit
def _packed(spans, i, OUTSIDE: tl.constexpr):
    """Slice number i of packed sequences, all of them in order; empty beyond the last."""
    index, low, high = _segments(spans, OUTSIDE)
    end = tl.cumsum(tl.cdiv(high - low, spans.length), 0)
    segment = tl.sum((end <= i).to(tl.int32), 0)
    before = tl.max(tl.where(end <= i, end, 0), 0)
    here = index == segment
    first, after = tl.sum(tl.where(here, low, 0), 0), tl.sum(tl.where(here, high, 0), 0)
    start = first + (i - before) * spans.length
    stop = tl.maximum(tl.minimum(start + spans.length, after), start)
    inside = i < tl.max(end, 0)
    count, row = stop - start, i
    if OUTSIDE:
        inside = inside & (segment > 0) & (segment <= spans.num_sequences)
        if spans.SLICED:
            row, count = segment - 1, after - first
        else:
            row = i - tl.sum(tl.where(index == 0, end, 0), 0)
    return Span(tl.where(inside, row, 0), start, stop, count, inside)


@triton.jit
def find(spans, i, OUTSIDE: tl.constexpr):
    """The tokens of program i."""
    if spans.cuts is None:
        row, part = i // spans.slices, i % spans.slices
        chunk = row % spans.chunks
        base = (row // spans.chunks) * spans.tokens
        low = chunk * spans.size
        high = tl.minimum(low + spans.size, spans.tokens)
        start = low + part * spans.length
        stop = tl.maximum(tl.minimum(start + spans.length, high), start)
        return Span(row, base + start, base + stop, high - low, True)
    else:
        return _packed(spans, i, OUTSIDE)


@triton.jit
def slices_of(spans, row):
    """First slice of a row of the output, the one after its last, and its number of tokens."""
    if spans.cuts is None:
        low = (row % spans.chunks) * spans.size
        high = tl.minimum(low + spans.size, spans.tokens)
        return row * spans.slices, (row + 1) * spans.slices, high - low
    else:
        index, low, high = _segments(spans, False)
        count = tl.cdiv(high - low, spans.length)
        first = tl.sum(tl.where(index < row, count, 0), 0)
        mine = index == row
        after = first + tl.sum(tl.where(mine, count, 0), 0)
        return first, after, tl.sum(tl.where(mine, high - low, 0), 0)
