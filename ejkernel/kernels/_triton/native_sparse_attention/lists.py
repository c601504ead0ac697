"""From a selection's bits: the blocks that a tile of tokens visits, and the tokens of a block."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import cdiv, next_power_of_2, triton_call
from ejkernel.kernels._specs import native_sparse_attention as spec
from ejkernel.kernels._triton.native_sparse_attention import rows as common
from ejkernel.kernels._triton.native_sparse_attention import table as tables

_WORD = tl.constexpr(spec.WORD)
_AT_ONCE = 1024  # bits of a program


class Union(NamedTuple):
    """The blocks that some token of a tile selected, in order; tiles are [b, g, tiles]."""

    entries: Any  # int32 [tiles, width, 4]: first key, key after the last, bits of the tokens
    counts: Any  # int32 [tiles]
    width: Any


class Inverse(NamedTuple):
    """The tokens that selected a block, cut into pieces of work; blocks are [b, g, n]."""

    tokens: Any  # int32, in order of blocks, then of tokens
    work: Any  # int32 [pieces, 4]: block, first of its tokens, how many; 0 where there is no work
    pieces: Any  # int32 [blocks + 1]: the first piece of a block


@triton.jit
def nsa_union_kernel(
    words, start, stop, sparse, num_words, width, entries, counts, BT: tl.constexpr,
    BW: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(sparse.num, BT)
    tile = tl.program_id(0)
    row = (tile // num_tiles).to(tl.int64)
    o_t = (tile % num_tiles) * BT + tl.arange(0, BT)
    p_words = words + (row * sparse.num + o_t)[:, None] * num_words
    entries += tile.to(tl.int64) * width * 4
    count = tile * 0
    for c in range(0, num_words, BW):
        o_w = (c + tl.arange(0, BW))[None, :]
        inside = (o_t < sparse.num)[:, None] & (o_w < num_words)
        b_w = tl.load(p_words + o_w, mask=inside, other=0.0).to(tl.int32)
        bits = (b_w[:, :, None] >> tl.arange(0, _WORD)[None, None, :]) & 1  # [BT, BW, 16]
        members = tl.sum(bits << tl.arange(0, BT)[:, None, None], 0)
        members = tl.reshape(members, [BW * _WORD])
        used = members != 0
        place = count + tl.cumsum(used.to(tl.int32), 0) - 1
        used &= place < width
        block = c * _WORD + tl.arange(0, BW * _WORD)
        p = entries + place * 4
        tl.store(p, tl.load(start + block, mask=used, other=0), mask=used)
        tl.store(p + 1, tl.load(stop + block, mask=used, other=0), mask=used)
        tl.store(p + 2, members, mask=used)
        count += tl.sum(used.to(tl.int32), 0)
    tl.store(counts + tile, count)


@triton.jit
def nsa_inverse_kernel(
    words, start, offsets, pieces, sparse, num_blocks, tokens, work,
    TOKENS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One block of a batch and key head; `words` are [b, g, words, t]."""
    row = tl.program_id(0)
    block = row % num_blocks
    num_words = tl.cdiv(num_blocks, _WORD)
    words += ((row // num_blocks).to(tl.int64) * num_words + block // _WORD) * sparse.num
    first = tl.load(offsets + row)
    place = first
    # no token before the block's first one sees it
    for c in range(tl.load(start + block) // TOKENS * TOKENS, sparse.num, TOKENS):
        o_t = c + tl.arange(0, TOKENS)
        b_w = tl.load(words + o_t, mask=o_t < sparse.num, other=0.0).to(tl.int32)
        used = (b_w >> (block % _WORD)) & 1
        tl.store(tokens + place + tl.cumsum(used, 0) - 1, o_t, mask=used != 0)
        place += tl.sum(used, 0)
    piece = tl.load(pieces + row)
    for c in range(first, place, PIECE):
        p = work + piece.to(tl.int64) * 4
        tl.store(p, row)
        tl.store(p + 1, c)
        tl.store(p + 2, tl.minimum(place - c, PIECE))
        piece += 1


def most_blocks(args: Any) -> int:
    """A bound on the blocks that a token selects."""
    count = spec.num_blocks(args)
    if args.block_indices is not None:
        return min(args.block_indices.shape[-1], count)
    return min(args.max_blocks, count) if args.block_counts is None else count


def union(args: Any, table: tables.Table, sparse: common.Sparse, words: Any, tokens: int) -> Union:
    """The lists of tiles of so many tokens."""
    batch, groups, t, num_words = words.shape
    tiles = cdiv(t, tokens) * groups * batch
    width = min(spec.num_blocks(args), tokens * most_blocks(args))
    wide = max(_AT_ONCE // (spec.WORD * tokens), 1)
    found = triton_call(
        nsa_union_kernel,
        inputs={
            "words": words,
            "start": jnp.asarray(table.start),
            "stop": jnp.asarray(table.stop),
            "sparse": sparse,
            "num_words": num_words,
            "width": width,
        },
        outputs={
            "entries": jax.ShapeDtypeStruct((tiles, width, 4), jnp.int32),
            "counts": jax.ShapeDtypeStruct((tiles,), jnp.int32),
        },
        grid=(tiles,),
        num_warps=1,
        num_stages=1,
        BT=tokens,
        BW=min(next_power_of_2(num_words), wide),
    )
    return Union(found["entries"], found["counts"], width)


def inverse(
    args: Any, table: tables.Table, sparse: common.Sparse, words: jax.Array, piece: int
) -> Inverse:
    """The tokens of each block, in pieces of so many."""
    batch, groups, t, _ = words.shape
    num_blocks = spec.num_blocks(args)
    across = words.swapaxes(2, 3)  # neighbouring tokens lie together
    shift = jnp.arange(spec.WORD, dtype=jnp.int32)[None, None, None, :, None]
    bits = (across.astype(jnp.int32)[:, :, :, None] >> shift) & 1
    counts = bits.sum(axis=-1).reshape(batch, groups, -1)[..., :num_blocks].reshape(-1)
    total, rows = batch * groups * t * most_blocks(args), counts.shape[0]
    # at most about five sums for a block, where a token may select any number of blocks
    piece = max(piece, next_power_of_2(cdiv(total, 4 * max(rows, 1))))
    most = cdiv(total, piece) + rows  # each block may leave a piece that is not full
    ends = jnp.cumsum(jnp.stack([counts, -(-counts // piece)]), axis=1, dtype=jnp.int32)
    offsets, pieces = jnp.pad(ends, ((0, 0), (1, 0)))
    found = triton_call(
        nsa_inverse_kernel,
        inputs={
            "words": across,
            "start": jnp.asarray(table.start),
            "offsets": offsets,
            "pieces": pieces,
            "sparse": sparse,
            "num_blocks": num_blocks,
        },
        outputs={
            "tokens": jax.ShapeDtypeStruct((total,), jnp.int32),
            "work": jax.ShapeDtypeStruct((most, 4), jnp.int32),
        },
        zeroed=("work",),
        grid=(rows,),
        num_warps=4,
        num_stages=1,
        TOKENS=min(max(next_power_of_2(t), 16), _AT_ONCE),
        PIECE=piece,
    )
    return Inverse(found["tokens"], found["work"], pieces)
