"""Packed tokens of sequences, and tiles whose rows are tokens times the heads of one key head."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.callib import next_power_of_2


class Packed(NamedTuple):
    """Which tokens a sequence has."""

    starts: Any  # int32 [sequences + 1], of their first tokens; None: sequence i has token i alone
    num_seqs: Any  # int32 [1]; sequences from it on have no tokens. None where `starts` is
    tokens: Any  # of all sequences


class Tiles(NamedTuple):
    """How tokens and the query heads of one key head are rows: row r is token r // TILE_HEADS.

    The heads of a key head that do not fit into one tile make several.
    """

    HEADS: tl.constexpr
    KEY_HEADS: tl.constexpr
    GROUP: tl.constexpr  # query heads to a key head
    TILE_HEADS: tl.constexpr
    HEAD_TILES: tl.constexpr
    TOKENS: tl.constexpr  # of a tile
    BLOCK: tl.constexpr  # rows of a tile, a power of two; at least TOKENS * TILE_HEADS


def tiles(heads: int, key_heads: int, block: int, most_tokens: int) -> Tiles:
    """Tiles of at least `block` rows, with at most so many tokens."""
    group = heads // key_heads
    tile_heads = min(group, max(block, 64))
    block = max(block, next_power_of_2(tile_heads))
    count = -(-group // tile_heads)
    tokens = max(min(block // tile_heads, most_tokens), 1)
    return Tiles(heads, key_heads, group, tile_heads, count, tokens, block)


class Range(NamedTuple):
    """A sequence's tokens."""

    first: Any
    count: Any


@triton.jit
def tokens_of(packed, i_s):
    """The tokens of sequence i_s; starts are clamped to the tokens that there are."""
    if packed.starts is None:
        return Range(i_s, i_s * 0 + 1)
    else:
        first = tl.load(packed.starts + i_s)
        stop = tl.load(packed.starts + i_s + 1)
        first = tl.minimum(tl.maximum(first, 0), packed.tokens)
        stop = tl.minimum(tl.maximum(stop, 0), packed.tokens)
        count = tl.maximum(stop - first, 0)
        return Range(first, tl.where(i_s < tl.load(packed.num_seqs), count, 0))


@triton.jit
def find_sequence(packed, i_t, sequences, TOKENS: tl.constexpr):
    """The sequence to which tile i_t of its tokens belongs, and which of its tiles this is.

    The tiles of sequence i begin with number starts[i] // TOKENS + i, which leaves enough numbers
    to each; those from tokens // TOKENS + sequences on are not needed. If there is no sequence,
    the first one is found, with a tile that it does not have.
    """
    low = i_t * 0
    high = tl.minimum(tl.maximum(tl.load(packed.num_seqs), 0), sequences)
    # the last sequence in [low, high) whose first tile is at most i_t
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.minimum(tl.maximum(tl.load(packed.starts + middle), 0), packed.tokens)
        before = start // TOKENS + middle <= i_t
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    start = tl.minimum(tl.maximum(tl.load(packed.starts + low), 0), packed.tokens)
    return low, i_t - (start // TOKENS + low)


class TileRows(NamedTuple):
    """The rows of a tile; vectors are [BLOCK] or as long as asked for."""

    token: Any  # counted from the tile's first
    head: Any  # query head
    real: Any  # whether the head exists and the token is one of the sequence


@triton.jit
def tile_rows(tiles, i_g, i_h, o_r, count):
    """Rows o_r of tile i_h of the heads of key head i_g, with `count` tokens from its first on."""
    token = o_r // tiles.TILE_HEADS
    head = i_h * tiles.TILE_HEADS + o_r % tiles.TILE_HEADS
    real = (head < tiles.GROUP) & (token < count) & (token < tiles.TOKENS)
    return TileRows(token, i_g * tiles.GROUP + head, real)
