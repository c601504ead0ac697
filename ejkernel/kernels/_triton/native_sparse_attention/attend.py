"""Attention over the selected blocks, forward and dq.

A program has a few tokens with all query heads of a key head, and passes the blocks that some of
the tokens selected: what neighbours share is read once, and tiles are large enough for the wide
products of tensor cores. Pairs of a token and a block that it did not select are hidden.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import softmax
from ejkernel.kernels._triton.native_sparse_attention import rows as common


class Tile(NamedTuple):
    """The tokens of a program; `token` is of each row, [M]."""

    batch: Any
    head: Any  # of keys
    token: Any
    member: Any  # number of the token in its tile
    entries: Any
    steps: Any


@triton.jit
def tile_of(union, sparse, M: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """The tile of this program; the last tokens, which see most blocks, start first."""
    PER: tl.constexpr = (sparse.SIZE + BK - 1) // BK
    num_tiles = tl.cdiv(sparse.num, BT)
    row = tl.program_id(0) // num_tiles
    i_t = num_tiles - 1 - tl.program_id(0) % num_tiles
    tile = row.to(tl.int64) * num_tiles + i_t
    member = tl.arange(0, M) // sparse.PADDED
    return Tile(
        (row // sparse.KEY_HEADS).to(tl.int64),
        row % sparse.KEY_HEADS,
        i_t * BT + member,
        member,
        union.entries + tile * union.width * 4,
        tl.load(union.counts + tile) * PER,
    )


@triton.jit
def entry(tile, step, PER: tl.constexpr):
    """First key, end and members of the block at a step; 0 after the last one."""
    p, inside = tile.entries + step // PER * 4, step < tile.steps
    start = tl.load(p, mask=inside, other=0)
    stop = tl.load(p + 1, mask=inside, other=0)
    return start, stop, tl.load(p + 2, mask=inside, other=0)


@triton.jit
def seen_pairs(tile, o_k, stop, members, EVEN: tl.constexpr):
    """Which pairs [M, BK] are visible."""
    chosen = ((members >> tile.member) & 1) != 0
    seen = chosen[:, None] & (o_k[None, :] <= tile.token[:, None])
    if not EVEN:
        seen &= (o_k < stop)[None, :]
    return seen


@triton.jit
def nsa_attend_fwd_kernel(
    query, key, value, sparse, union, out, lse,
    BT: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """EVEN: all blocks are full, and tiles divide them."""
    M: tl.constexpr = BT * sparse.PADDED
    PER: tl.constexpr = (sparse.SIZE + BK - 1) // BK
    D: tl.constexpr = sparse.key_rows.WIDTH
    E: tl.constexpr = sparse.value_rows.WIDTH
    tile = tile_of(union, sparse, M, BT, BK)
    rows = common.rows_of(sparse, tile.batch, tile.head, tile.token, tile.token >= 0, M)
    b_q = common.load_rows(query, rows, sparse, D, sparse.key_rows.PADDED)  # [M, BD]
    key_row = tile.batch * sparse.num * sparse.KEY_HEADS + tile.head
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, sparse.value_rows.PADDED], tl.float32)
    start, stop, members = entry(tile, 0, PER)
    for i in range(tile.steps):
        first = start + i % PER * BK
        b_k = common.load_keys(key + key_row * D, sparse.key_rows, first, stop, BK, EVEN)
        b_v = common.load_keys(value + key_row * E, sparse.value_rows, first, stop, BK, EVEN)
        seen = seen_pairs(tile, first + tl.arange(0, BK), stop, members, EVEN)
        start, stop, members = entry(tile, i + 1, PER)  # addresses wait for it: one step ahead
        dots = tl.dot(b_q, tl.trans(b_k), input_precision=sparse.PRECISION)  # [M, BK]
        x = tl.where(seen, common.logits(dots, sparse), float("-inf"))
        m, l, p, alpha = softmax.update(m, l, x, sparse.FACTOR)
        acc = tl.dot(p.to(b_v.dtype), b_v, acc * alpha[:, None], input_precision=sparse.PRECISION)
    acc *= (1.0 / tl.where(l == 0.0, 1.0, l))[:, None]
    common.store_rows(out, rows, sparse, acc, E, sparse.value_rows.PADDED)
    i_h = tile.head * sparse.GROUP + rows.head
    p_lse = lse + (tile.batch * sparse.HEADS + i_h) * sparse.num + rows.token
    tl.store(p_lse, softmax.logsumexp(m * sparse.FACTOR, l), mask=rows.real)


@triton.jit
def nsa_attend_bwd_dq_kernel(
    query, key, value, sparse, union, dout, lse, delta, dq,
    BT: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`lse` and `delta` are [b, t, h]."""
    M: tl.constexpr = BT * sparse.PADDED
    PER: tl.constexpr = (sparse.SIZE + BK - 1) // BK
    D: tl.constexpr = sparse.key_rows.WIDTH
    E: tl.constexpr = sparse.value_rows.WIDTH
    tile = tile_of(union, sparse, M, BT, BK)
    rows = common.rows_of(sparse, tile.batch, tile.head, tile.token, tile.token >= 0, M)
    b_q = common.load_rows(query, rows, sparse, D, sparse.key_rows.PADDED)  # [M, BD]
    b_do = common.load_rows(dout, rows, sparse, E, sparse.value_rows.PADDED)  # [M, BE]
    b_lse = common.load_row_sums(lse, rows, sparse)
    b_delta = common.load_row_sums(delta, rows, sparse)
    key_row = tile.batch * sparse.num * sparse.KEY_HEADS + tile.head
    acc = tl.zeros([M, sparse.key_rows.PADDED], tl.float32)
    start, stop, members = entry(tile, 0, PER)
    for i in range(tile.steps):
        first = start + i % PER * BK
        b_k = common.load_keys(key + key_row * D, sparse.key_rows, first, stop, BK, EVEN)
        b_v = common.load_keys(value + key_row * E, sparse.value_rows, first, stop, BK, EVEN)
        seen = seen_pairs(tile, first + tl.arange(0, BK), stop, members, EVEN)
        start, stop, members = entry(tile, i + 1, PER)
        dots = tl.dot(b_q, tl.trans(b_k), input_precision=sparse.PRECISION)  # [M, BK]
        p = common.weights(common.logits(dots, sparse), seen, b_lse[:, None], sparse)
        dp = tl.dot(b_do, tl.trans(b_v), input_precision=sparse.PRECISION)  # [M, BK]
        # queries of no sequence and their cotangents may hold nan
        ds = tl.where(seen, p * (dp - b_delta[:, None]), 0.0)
        acc = tl.dot(ds.to(b_k.dtype), b_k, acc, input_precision=sparse.PRECISION)
    common.store_rows(dq, rows, sparse, acc * sparse.SCALE, D, sparse.key_rows.PADDED)
