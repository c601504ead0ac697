"""Attention of the rows of one tile over cached keys and values, with online softmax."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import logits, mask, paging, softmax


class Cache(NamedTuple):
    """Keys and values, and where those of a sequence are."""

    key: Any
    value: Any  # None if they are INTERLEAVED
    key_rows: Any  # `paging.Rows`
    value_rows: Any
    table: Any  # `paging.Table`
    first: Any  # int32 [sequences], the first key that counts; None: 0
    last: Any  # int32 [sequences], one past the last key
    room: Any  # the most keys of a sequence; lengths are clamped to it
    INTERLEAVED: tl.constexpr  # a value is HEAD / 2 elements behind its key, in the same array


class Options(NamedTuple):
    """How scores are made of products, and which keys a query sees."""

    scores: Any  # `logits.Scores`, without bias
    k_scale: Any  # float32 [key heads], or None
    left: Any  # how far before its query a key may be; None is no limit
    PRECISION: tl.constexpr  # of products


class Queries(NamedTuple):
    """The rows of a tile; vectors are [BM]."""

    tile: Any  # [BM, PADDED]
    scale: Any  # [BM, 1], what products with keys of float8 are multiplied by
    position: Any
    slope: Any  # [BM, 1], or 0
    low: Any  # the first position
    high: Any  # one past the last


@triton.jit
def key_range(cache, i_s):
    """First and one past the last key of a sequence, inside what its pages can hold."""
    first = i_s * 0
    if cache.first is not None:
        first = tl.maximum(tl.load(cache.first + i_s), 0)
    return first, tl.minimum(tl.maximum(tl.load(cache.last + i_s), 0), cache.room)


@triton.jit
def _in_float16(x):
    """Rows of bfloat16 in float16, divided by powers of two; and these powers, [BM, 1].

    The largest element of a row becomes one between 1 and 2. What is lost of the others is below
    2^-25, far below the rounding errors of bfloat16.
    """
    top = tl.max(tl.abs(x.to(tl.float32)), 1)
    exponent = top.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)[:, None]  # both powers are normal numbers
    power = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (x.to(tl.float32) * inverse).to(tl.float16), power


@triton.jit
def load_queries(query, token, rows, position, stop, cache, options, tiles, width):
    """The rows of a tile, from `token` on in query [tokens, h, d]; zeros in rows that are none.

    Positions of the tile's tokens are in [position, stop); `width` is an `addresses.Rows`.
    """
    row = (token + rows.token).to(tl.int64) * tiles.HEADS + rows.head
    o_d = tl.arange(0, width.PADDED)
    inside = rows.real[:, None] & (o_d < width.WIDTH)[None, :]
    tile = tl.load(query + row[:, None] * width.WIDTH + o_d[None, :], mask=inside, other=0.0)
    scale = tl.full([1, 1], 1.0, tl.float32)
    if (tile.dtype == tl.bfloat16) and cache.key.dtype.element_ty.is_fp8():
        # two elements of float8 take one instruction to float16, and four to bfloat16
        tile, scale = _in_float16(tile)
    slope = tl.full([1, 1], 0.0, tl.float32)
    if options.scores.slopes is not None:
        slope = tl.load(options.scores.slopes + rows.head, mask=rows.real, other=0.0)
        slope = slope.to(tl.float32)[:, None]
    return Queries(tile, scale, position + rows.token, slope, position, stop)


@triton.jit
def visible_keys(queries, first, last, left):
    """Keys [low, high) of [first, last) that some row sees."""
    low = first
    if left is not None:
        low = tl.maximum(first, queries.low - left)
    return low, tl.minimum(last, queries.high)


@triton.jit
def hide(x, o_k, row, low, high, queries, left, BK: tl.constexpr, CAUSAL: tl.constexpr):
    """Scores [BM, BK] with -inf for hidden pairs. Not CAUSAL: all rows have one position."""
    inside = (row >= low) & (row + BK <= high)
    if CAUSAL:
        inside = inside & (row + BK - 1 <= queries.low)
        if left is not None:
            inside = inside & (row >= queries.high - 1 - left)
    if inside == 0:
        seen = ((o_k >= low) & (o_k < high))[None, :]
        if CAUSAL:
            seen = seen & (o_k[None, :] <= queries.position[:, None])
            if left is not None:
                seen = seen & (o_k[None, :] >= (queries.position - left)[:, None])
        x = tl.where(seen, x, float("-inf"))
    return x


@triton.jit
def attend(
    queries, cache, i_s, i_g, low, high, first_tile, last_tile, options, BK: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Maximum and sum [BM], and weighted values [BM, BE], of rows over some tiles of keys.

    Keys outside of [low, high) do not count. Not CAUSAL: all rows have the position high - 1.
    """
    BM: tl.constexpr = queries.tile.shape[0]
    key = cache.key + i_g * cache.key_rows.HEAD
    if cache.INTERLEAVED:
        value = key + cache.value_rows.HEAD // 2
    else:
        value = cache.value + i_g * cache.value_rows.HEAD
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, cache.value_rows.PADDED], tl.float32)
    scale = queries.scale
    SCALED: tl.constexpr = key.dtype.element_ty.is_fp8() or (options.k_scale is not None)
    if options.k_scale is not None:
        scale *= tl.load(options.k_scale + i_g)
    # Pages are looked up one tile ahead. A look-up in the same iteration would be a level of the
    # compiler's pipeline of its own, and leave keys and values half of the stages.
    next_page = paging.page_ids(cache.table, i_s, first_tile * BK, BK)
    for j in range(first_tile, last_tile):
        row = j * BK
        o_k = row + tl.arange(0, BK)
        seen = (o_k >= low) & (o_k < high)
        page = next_page
        next_page = paging.page_ids(cache.table, i_s, row + BK, BK)
        b_k = paging.load_rows(key, cache.key_rows, cache.table, page, row, seen, BK)
        b_k = paging.widen(b_k, queries.tile)  # [BK, BD]
        x = tl.dot(queries.tile, tl.trans(b_k), input_precision=options.PRECISION)  # [BM, BK]
        if SCALED:
            x *= scale
        q_pos = queries.position[:, None]
        tile = mask.Tile(q_pos, o_k[None, :], q_pos, o_k[None, :])
        x, _ = logits.logits(x, tile, 0, queries.slope, options.scores, 0, 0)
        x = hide(x, o_k, row, low, high, queries, options.left, BK, CAUSAL)
        m, l, p, alpha = softmax.update(m, l, x, options.scores.FACTOR)
        b_v = paging.load_rows(value, cache.value_rows, cache.table, page, row, seen, BK)
        b_v = paging.widen(b_v, queries.tile)  # [BK, BE]
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(b_v.dtype), b_v, acc, input_precision=options.PRECISION)
    return m, l, acc
