"""Attention of the rows of one tile over cached latent vectors, with online softmax.

A row of a page is a latent vector and a rope part. The latent vector is key and value at once, so
its tile is loaded once for both products.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import cached, logits, mask, paging, softmax


class Latents(NamedTuple):
    """Pages of latent vectors; the fields that `cached` reads have the names of its `Cache`."""

    key: Any
    value_rows: Any  # `paging.Rows` of the latent parts
    rope_rows: Any  # and of the rope parts, which follow them
    table: Any  # `paging.Table`
    first: Any  # None: every key from 0 on counts
    last: Any  # int32 [sequences], one past the last key
    room: Any  # the most keys of a sequence; lengths are clamped to it


@triton.jit
def attend(
    queries, rope_queries, latents, i_s, low, high, first_tile, last_tile, options,
    BK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Maximum and sum [BM], and weighted latent vectors [BM, BL], of rows over some tiles of keys.

    Keys outside of [low, high) do not count. Not CAUSAL: all rows have the position high - 1.
    """
    BM: tl.constexpr = queries.tile.shape[0]
    rope = latents.key + latents.value_rows.WIDTH
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, latents.value_rows.PADDED], tl.float32)
    k_scale = 1.0
    if options.k_scale is not None:
        k_scale = tl.load(options.k_scale)
    # One tile at least, whose keys may all be hidden. If the loop could be left out, the sums of
    # products in flight at its end would meet zeros there, and ptxas (12.8) would let each product
    # of several stages wait for the one before (C7515).
    last_tile = tl.maximum(last_tile, first_tile + 1)
    tl.assume(first_tile < last_tile)
    page = paging.page_ids(latents.table, i_s, first_tile * BK, BK)
    for j in range(first_tile, last_tile):
        row = j * BK
        # an id is read one tile ahead, so that no load of keys waits for the one of its page
        following = paging.page_ids(latents.table, i_s, row + BK, BK)
        o_k = row + tl.arange(0, BK)
        seen = (o_k >= low) & (o_k < high)
        b_c = paging.load_rows(latents.key, latents.value_rows, latents.table, page, row, seen, BK)
        b_c = paging.widen(b_c, queries.tile)  # [BK, BL]
        b_r = paging.load_rows(rope, latents.rope_rows, latents.table, page, row, seen, BK)
        b_r = paging.widen(b_r, queries.tile)  # [BK, BR]
        # Two sums: if one product started from the other, Triton would give them layouts of their
        # own with a conversion between, and it makes such a start of a plain addition.
        x = tl.dot(queries.tile, tl.trans(b_c), input_precision=options.PRECISION)  # [BM, BK]
        b_x = tl.dot(rope_queries.tile, tl.trans(b_r), input_precision=options.PRECISION)
        if latents.key.dtype.element_ty.is_fp8():
            x *= queries.scale
            b_x *= rope_queries.scale
        x = tl.where(seen[None, :], x, float("-inf"))
        x += tl.where(seen[None, :], b_x, 0.0)
        if options.k_scale is not None:
            x *= k_scale
        q_pos = queries.position[:, None]
        tile = mask.Tile(q_pos, o_k[None, :], q_pos, o_k[None, :])
        x, _ = logits.logits(x, tile, 0, queries.slope, options.scores, 0, 0)
        x = cached.hide(x, o_k, row, low, high, queries, options.left, BK, CAUSAL)
        m, l, p, alpha = softmax.update(m, l, x, options.scores.FACTOR)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(b_c.dtype), b_c, acc, input_precision=options.PRECISION)
        page = following
    return m, l, acc
