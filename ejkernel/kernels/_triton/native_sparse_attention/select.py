"""Which blocks a token attends to, as bits: the best by importance, or those of a given list.

The importance of a block is its softmax weight among the means of complete blocks, summed over the
heads of a key head. Programs keep the importance of one tile of tokens at a time, in memory of
their own, and find the last rank that is taken bit by bit: there is neither a sort nor a bound on
the number of blocks.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import cdiv, next_power_of_2, triton_call
from ejkernel.kernels._specs import native_sparse_attention as spec
from ejkernel.kernels._triton._blocks import softmax
from ejkernel.kernels._triton.native_sparse_attention import config
from ejkernel.kernels._triton.native_sparse_attention import rows as common
from ejkernel.kernels._triton.native_sparse_attention import table as tables

_WORD = tl.constexpr(spec.WORD)
_INFINITY = tl.constexpr(0x7F800000)  # the bits of a float
_PROGRAMS, _LEAST_PROGRAMS = 1056, 132  # eight and one for each multiprocessor of an H200
_SCRATCH_BYTES = 256 << 20
_CHUNK = 1024  # blocks whose ranks are in registers at once
_LISTED_TOKENS, _LISTED_WORDS = 32, 32


@triton.jit
def _mean_scores(b_q, high, low, sparse, col, num_blocks, BN: tl.constexpr):
    """Logits [M, BN] of a tile of queries and the means of blocks, which may be in two parts."""
    b_k = common.load_keys(high, sparse.key_rows, col, num_blocks, BN, False)
    dots = tl.dot(b_q, tl.trans(b_k), input_precision=sparse.PRECISION)
    if low is not None:
        b_k = common.load_keys(low, sparse.key_rows, col, num_blocks, BN, False)
        dots = tl.dot(b_q, tl.trans(b_k), dots, input_precision=sparse.PRECISION)
    return common.logits(dots, sparse)


@triton.jit
def _ranks(p, col, first, own):
    """Ranks of importances: the bits of floats that are not negative are ordered as they are."""
    earlier = (col >= first[:, None]) & (col < own[:, None])
    bits = tl.load(p + col, mask=earlier, other=0.0).to(tl.int32, bitcast=True)
    bits = tl.where((bits >= 0) & (bits <= _INFINITY), bits, 0)  # nan counts as 0
    return tl.where(earlier, bits + 1, 0)


@triton.jit
def _words(chosen, BT: tl.constexpr, CHUNK: tl.constexpr):
    """Bits [BT, CHUNK] as numbers [BT, CHUNK / 16]."""
    bits = tl.reshape(chosen.to(tl.int32), [BT, CHUNK // _WORD, _WORD])
    return tl.sum(bits << tl.arange(0, _WORD)[None, None, :], 2)


@triton.jit
def _choose(
    scratch, p_words, first, own, need, num_blocks,
    BT: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The own block and the `need` most important earlier ones; vectors are [BT]."""
    p = scratch + tl.arange(0, BT)[:, None] * N
    last = tl.max(own, 0) + 1
    if N <= CHUNK:  # all ranks stay in registers
        rank = _ranks(p, tl.arange(0, CHUNK)[None, :], first, own)
    least = tl.zeros([BT], tl.int32)
    for step in range(31):
        trial = least | (1 << (30 - step))
        enough = tl.zeros([BT], tl.int32)
        for c in range(0, last, CHUNK):
            if N > CHUNK:
                rank = _ranks(p, (c + tl.arange(0, CHUNK))[None, :], first, own)
            enough += tl.sum((rank >= trial[:, None]).to(tl.int32), 1)
        least = tl.where(enough >= need, trial, least)
    above = tl.zeros([BT], tl.int32)
    for c in range(0, last, CHUNK):
        if N > CHUNK:
            rank = _ranks(p, (c + tl.arange(0, CHUNK))[None, :], first, own)
        above += tl.sum((rank > least[:, None]).to(tl.int32), 1)
    room = need - above  # for blocks of the last rank: the first ones
    for c in range(0, num_blocks, CHUNK):
        col = (c + tl.arange(0, CHUNK))[None, :]
        if N > CHUNK:
            rank = _ranks(p, col, first, own)
        level = (rank == least[:, None]).to(tl.int32)
        taken = (level != 0) & (tl.cumsum(level, 1) <= room[:, None])
        room -= tl.sum(level, 1)
        chosen = (rank > least[:, None]) | taken | (col == own[:, None])
        o_w = c // _WORD + tl.arange(0, CHUNK // _WORD)[None, :]
        inside = (o_w < tl.cdiv(num_blocks, _WORD)) & (own >= -1)[:, None]
        tl.store(p_words[:, None] + o_w, _words(chosen, BT, CHUNK).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=("most", "num_batches"))
def nsa_choose_kernel(
    query, high, low, first, own, done, counts, sparse, num_blocks, num_batches, most, words,
    scratch,
    BT: tl.constexpr, BN: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program p takes tiles p, p + programs, .. of BT tokens of a batch and key head."""
    M: tl.constexpr = BT * sparse.PADDED
    D: tl.constexpr = sparse.key_rows.WIDTH
    UNITS: tl.constexpr = sparse.FACTOR * softmax.LOG2_E
    num_tiles = tl.cdiv(sparse.num, BT)
    total = num_tiles * (num_batches * sparse.KEY_HEADS)
    scratch += tl.program_id(0).to(tl.int64) * BT * N
    zero = tl.program_id(0) * 0  # makes tensors of loop indices, which an interpreter has as ints
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        tile = zero + index
        row = tile // num_tiles
        i_g, batch = row % sparse.KEY_HEADS, (row // sparse.KEY_HEADS).to(tl.int64)
        token = (tile % num_tiles) * BT + tl.arange(0, M) // sparse.PADDED
        rows = common.rows_of(sparse, batch, i_g, token, token >= 0, M)
        b_q = common.load_rows(query, rows, sparse, D, sparse.key_rows.PADDED)
        r_first = tl.load(first + token, mask=rows.real, other=0)
        r_done = tl.load(done + token, mask=rows.real, other=0)
        k_high = high + (batch * num_blocks * sparse.KEY_HEADS + i_g) * D
        k_low = None
        if low is not None:
            k_low = low + (batch * num_blocks * sparse.KEY_HEADS + i_g) * D
        start = tl.min(tl.where(r_done > r_first, r_first, num_blocks), 0) // BN * BN
        m = tl.full([M], float("-inf"), tl.float32)
        l = tl.zeros([M], tl.float32)
        for c in range(start, tl.max(r_done, 0), BN):
            col = (c + tl.arange(0, BN))[None, :]
            x = _mean_scores(b_q, k_high, k_low, sparse, zero + c, num_blocks, BN)
            seen = (col >= r_first[:, None]) & (col < r_done[:, None])
            m, l, _, _ = softmax.update(m, l, tl.where(seen, x, float("-inf")), sparse.FACTOR)
        l = tl.where(l == 0.0, 1.0, l)
        for c in range(start, tl.max(r_done, 0), BN):
            o_n = c + tl.arange(0, BN)
            x = _mean_scores(b_q, k_high, k_low, sparse, zero + c, num_blocks, BN)
            seen = (o_n[None, :] >= r_first[:, None]) & (o_n[None, :] < r_done[:, None])
            p = tl.math.exp2((x - softmax.finite(m)[:, None]) * UNITS) / l[:, None]
            p = tl.where(seen, p, 0.0)  # [M, BN]
            p = tl.sum(tl.reshape(p, [BT, sparse.PADDED, BN]), 1)
            tl.store(scratch + tl.arange(0, BT)[:, None] * N + o_n[None, :], p)
        tl.debug_barrier()  # a row's importance was written by several threads
        o_t = (tile % num_tiles) * BT + tl.arange(0, BT)
        t_first = tl.load(first + o_t, mask=o_t < sparse.num, other=0)
        t_own = tl.load(own + o_t, mask=o_t < sparse.num, other=-2)
        count = most + o_t * 0
        if counts is not None:
            p_count = counts + (batch * sparse.num + o_t) * sparse.KEY_HEADS + i_g
            count = tl.load(p_count, mask=o_t < sparse.num, other=1)
        need = tl.minimum(tl.maximum(count - 1, 0), tl.maximum(t_own - t_first, 0))
        p_words = words + (row.to(tl.int64) * sparse.num + o_t) * tl.cdiv(num_blocks, _WORD)
        _choose(scratch, p_words, t_first, t_own, need, num_blocks, BT, N, CHUNK)
        tl.debug_barrier()  # before the next tile overwrites it


@triton.jit(do_not_specialize=("num_blocks",))
def nsa_listed_kernel(
    indices, counts, first, own, sparse, num_blocks, words,
    K: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """The first `counts` blocks of lists [b, t, g, K], numbered in their sequence; -1 is none."""
    num_tiles = tl.cdiv(sparse.num, BT)
    num_words = tl.cdiv(num_blocks, _WORD)
    row = tl.program_id(0) // num_tiles
    i_g, batch = row % sparse.KEY_HEADS, (row // sparse.KEY_HEADS).to(tl.int64)
    o_t = (tl.program_id(0) % num_tiles) * BT + tl.arange(0, BT)
    inside = o_t < sparse.num
    t_first = tl.load(first + o_t, mask=inside, other=0)
    t_own = tl.load(own + o_t, mask=inside, other=-1)
    place = (batch * sparse.num + o_t) * sparse.KEY_HEADS + i_g
    count = tl.full([BT], K, tl.int32)
    if counts is not None:
        count = tl.load(counts + place, mask=inside, other=0)
    for c in range(0, num_words, BW):
        o_w = c + tl.arange(0, BW)
        found = tl.zeros([BT, BW], tl.int32)
        for k in range(K):
            index = tl.load(indices + place * K + k, mask=inside & (k < count), other=-1)
            used = (index >= 0) & (index <= t_own - t_first)
            block = tl.where(used, t_first + index, -1)
            here = used[:, None] & ((block // _WORD)[:, None] == o_w[None, :])
            found |= tl.where(here, (1 << (block % _WORD))[:, None], 0)
        p = words + (row.to(tl.int64) * sparse.num + o_t)[:, None] * num_words + o_w[None, :]
        tl.store(p, found.to(tl.float32), mask=inside[:, None] & (o_w < num_words)[None, :])


def _most_programs(tokens: int, columns: int) -> int:
    """Fewer where memory for the importance of a tile each takes too much; results are the same."""
    fitting = _SCRATCH_BYTES // (4 * tokens * columns)
    return min(max(fitting, _LEAST_PROGRAMS), _PROGRAMS)


def words(args: Any, table: tables.Table, sparse: common.Sparse, cfg: config.Config) -> jax.Array:
    """The selection's bits [b, g, t, words]; `block_q` rows are scored at once."""
    batch, t, groups, _ = args.key.shape
    num_blocks = spec.num_blocks(args)
    shape = jax.ShapeDtypeStruct((batch, groups, t, cdiv(num_blocks, spec.WORD)), jnp.float32)
    shared = {
        "first": jnp.asarray(table.first),
        "own": jnp.asarray(table.own),
        "counts": args.block_counts,
        "sparse": sparse,
        "num_blocks": num_blocks,
    }
    if args.block_indices is not None:
        return triton_call(
            nsa_listed_kernel,
            inputs=shared | {"indices": args.block_indices},
            outputs={"words": shape},
            grid=(cdiv(t, _LISTED_TOKENS) * groups * batch,),
            num_warps=4,
            num_stages=1,
            K=args.block_indices.shape[-1],
            BT=_LISTED_TOKENS,
            BW=min(next_power_of_2(shape.shape[-1]), _LISTED_WORDS),
        )["words"]
    high, low = _parts(args, tables.means(args, table, args.key))
    tokens = max(cfg.block_q // sparse.PADDED, 1)
    columns = max(next_power_of_2(num_blocks), 16)
    programs = min(cdiv(t, tokens) * groups * batch, _most_programs(tokens, columns))
    return triton_call(
        nsa_choose_kernel,
        inputs=shared
        | {
            "query": args.query,
            "high": high,
            "low": low,
            "done": jnp.asarray(table.done),
            "num_batches": batch,
            "most": min(args.max_blocks, num_blocks),
        },
        outputs={
            "words": shape,
            "scratch": jax.ShapeDtypeStruct((programs, tokens, columns), jnp.float32),
        },
        grid=(programs,),
        **config.choosing(cfg).launch(),
        BT=tokens,
        BN=min(columns, 64),
        N=columns,
        CHUNK=min(columns, max(_CHUNK * 4 // tokens, 16)),
    )["words"]


def _parts(args: Any, means: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Means in the dtype of the queries, and what that rounds away: near ties must not flip."""
    dtype = args.query.dtype
    if dtype == jnp.float32:
        return means, None
    high = means.astype(dtype)
    return high, (means - high.astype(jnp.float32)).astype(dtype)
