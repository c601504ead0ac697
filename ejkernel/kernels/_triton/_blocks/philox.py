"""Philox-4x32-10 and the keep mask of dropout; the same bits as on every other backend."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Dropout(NamedTuple):
    """Dropout of weights; None in its place is none."""

    seed: Any  # uint32 [2]
    THRESHOLD: tl.constexpr  # words below it are dropped
    FACTOR: tl.constexpr  # of what is kept


@triton.jit
def _round(c0, c1, c2, c3, k0, k1):
    hi0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32))
    hi1 = tl.umulhi(c2, tl.full(c2.shape, 0xCD9E8D57, tl.uint32))
    lo0 = c0 * tl.full(c0.shape, 0xD2511F53, tl.uint32)
    lo1 = c2 * tl.full(c2.shape, 0xCD9E8D57, tl.uint32)
    return hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0


@triton.jit
def words(seed, c0, c1, c2, c3):
    """Four words of each counter; `seed` points to (low, high), counters are uint32 alike."""
    k0 = tl.load(seed)
    k1 = tl.load(seed + 1)
    for _ in tl.static_range(10):
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        k0 += tl.full([], 0x9E3779B9, tl.uint32)
        k1 += tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def indices(offset, i_b, i_h):
    """Batch and head of a tile in the call as the user wrote it; `offset` is of the first tile."""
    if offset is not None:
        i_b += tl.load(offset).to(tl.int32)
        i_h += tl.load(offset + 1).to(tl.int32)
    return i_b, i_h


@triton.jit
def keep(dropout, i_b, i_h, o_q, first_key, BQ: tl.constexpr, BK: tl.constexpr):
    """Which pairs are kept, [BQ, BK]; one counter serves four neighbouring keys."""
    quads = (first_key // 4 + tl.arange(0, BK // 4)).to(tl.uint32)
    zero = tl.zeros([BQ, BK // 4], tl.uint32)
    c0 = zero + quads[None, :]
    c1 = zero + o_q.to(tl.uint32)[:, None]
    c2 = zero + i_h.to(tl.uint32)
    c3 = zero + i_b.to(tl.uint32)
    w0, w1, w2, w3 = words(dropout.seed, c0, c1, c2, c3)
    bits = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [BQ, BK / 4, 2, 2], in order of the words
    bits = tl.reshape(bits, [BQ, BK])
    return bits >= tl.full([BQ, BK], dropout.THRESHOLD, tl.uint32)
