"""Which tiles each program of a persistent kernel computes, and in which order.

NumPy makes the list where the work of tiles is known; XLA makes it where ids or lengths decide.
"""

import functools
import heapq
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv

# What a tile costs besides its blocks: loading queries, storing results.
_OVERHEAD = 1.0
_MANY = 1 << 13  # tiles: with more, a section is short beside the whole
_TRIES = 16  # numbers of sections


def section(pairs: int, tiles: int, bytes_a_pair: int, group: int, limit: int, ctas: int) -> int:
    """How many (batch, head) pairs run at a time, so that their keys and values stay in L2.

    All heads that share keys count once; a section has a tile for every program at least. Sections
    are about equal: a short last one would end with its long tiles.
    """
    fitting = max(1, limit // max(bytes_a_pair, 1)) * group
    most = min(pairs, max(fitting, -(-ctas // tiles)))
    even = -(-pairs // -(-pairs // most))
    return min(pairs, -(-even // group) * group)


@functools.lru_cache(maxsize=64)
def balanced(work: tuple[int, ...], pairs: int, most: int, ctas: int) -> int:
    """How many pairs make a section, so that programs end at about the same time.

    `most`, or as many as give each program a tile, or fewer. Each program takes the next tile when
    it is free, as in `deal`. If few pairs are left for the last section, its long tiles start while
    other programs have nothing left to do: that takes up to 15 % of a call's time. So sections are
    about equal, and some numbers of them are tried.
    """
    most = min(pairs, max(most, -(-ctas // len(work))))
    fewest = -(-pairs // most)
    widest, *others = (-(-pairs // count) for count in range(fewest, fewest + _TRIES))
    if min(work) == max(work) or pairs * len(work) > _MANY:
        return widest
    least = ctas // len(work)  # with nearly enough tiles for all programs
    widths = {widest, *(width for width in others if width >= least)}
    total = pairs * sum(x + _OVERHEAD for x in work)

    def slowest(width: int) -> tuple[float, int]:
        free = [0.0] * ctas
        for _, tile in _longest_first(work, pairs, width):
            heapq.heapreplace(free, free[0] + work[tile] + _OVERHEAD)
        return round(max(free) * ctas / total, 3), -width

    return min(widths, key=slowest)


def _longest_first(work: tuple[int, ...], pairs: int, width: int) -> Iterator[tuple[int, int]]:
    """Pairs and tiles in their order, in sections of `width` pairs."""
    tiles = np.argsort(-np.asarray(work), kind="stable").tolist()
    for start in range(0, pairs, width):
        for tile in tiles:
            for pair in range(start, min(start + width, pairs)):
                yield pair, tile


@functools.lru_cache(maxsize=64)
def deal(work: tuple[int, ...], pairs: int, width: int, ctas: int, pad: int) -> np.ndarray:
    """Tiles of each program in order, [ctas, rounds], -1 behind the last.

    Tile i of pair p is number p * len(work) + i. Sections of `width` pairs follow each other; in
    a section the longest tiles come first, and each goes to the program that is free first.

    Args:
      work: Blocks of keys that each tile of a pair visits.
      pairs: How many (batch, head) pairs there are.
      width: How many pairs make a section.
      ctas: How many programs there are.
      pad: The second axis is a multiple of this, and ends in -1.
    """
    tiles = len(work)
    free = [(0.0, cta) for cta in range(ctas)]
    taken: list[list[int]] = [[] for _ in range(ctas)]
    for pair, tile in _longest_first(work, pairs, width):
        at, cta = free[0]
        taken[cta].append(pair * tiles + tile)
        heapq.heapreplace(free, (at + work[tile] + _OVERHEAD, cta))
    rounds = max(map(len, taken)) + 1
    table = np.full((ctas, -(-rounds // pad) * pad), -1, np.int32)
    for cta, items in enumerate(taken):
        table[cta, : len(items)] = items
    return table


def deal_on_device(
    work: jax.Array, heads: int, width: int, ctas: int, pad: int
) -> tuple[jax.Array, int]:
    """The same for tiles whose work [b, tiles] is traced, and equal for all heads of a row.

    Sections are rows of the batch, or some heads of one row. In a section the longest tiles come
    first. Programs take them in turn, each time in the other direction, since a heap would take one
    step after the other; the programs that end a section late begin the next one early. Between
    sections a program may have -1 in its list. Also returns how long the longest list is.
    """
    batch, tiles = work.shape
    many, few = max(width // heads, 1), min(width, heads)  # rows, and heads, in a section
    row, head = np.arange(batch, dtype=np.int32)[:, None], np.arange(heads, dtype=np.int32)[None]
    section = row // many * cdiv(heads, few) + head // few  # [b, heads]
    counts = -(-np.bincount(section.ravel()) * tiles // ctas)  # turns that a section takes
    first_turn = (np.cumsum(counts) - counts).astype(np.int32)[section]
    wide = np.minimum(few, heads - head // few * few)  # heads in the section of a head
    rank = _ranks(work, many)[:, :, None]
    place = rank * wide[:, None] + (head % few)[:, None]  # in the section; [b, tiles, heads]
    turn, step = place // ctas, place % ctas
    is_turned = (turn + section[:, None]) % 2 == 1
    cta = jnp.where(is_turned, ctas - 1 - step, step)
    number = jnp.arange(batch * heads * tiles, dtype=jnp.int32).reshape(batch, heads, tiles)
    rounds = int(counts.sum())
    table = jnp.full((ctas, cdiv(rounds + 1, pad) * pad), -1, jnp.int32)
    at = (cta, turn + first_turn[:, None])
    return table.at[at].set(number.transpose(0, 2, 1), unique_indices=True), rounds


def _ranks(work: jax.Array, many: int) -> jax.Array:
    """How many tiles come before each, the longest first, among those of `many` rows."""
    batch, tiles = work.shape
    sections = cdiv(batch, many)
    behind = ((0, sections * many - batch), (0, 0))
    work = jnp.pad(work, behind, constant_values=-1).reshape(sections, many * tiles)
    mine, other = work[:, :, None], work[:, None]
    index = jnp.arange(many * tiles, dtype=jnp.int32)  # of NumPy, pairs would be a large constant
    is_before = (index[:, None] > index[None])[None]
    rank = jnp.sum((other > mine) | ((other == mine) & is_before), axis=-1, dtype=jnp.int32)
    return rank.reshape(-1, tiles)[:batch]


def rounds(table: np.ndarray) -> int:
    """How many tiles the program with the most of them has."""
    return int((table >= 0).sum(axis=1).max(initial=0))


def imbalance(table: np.ndarray, work: tuple[int, ...]) -> float:
    """The time of the program that ends last over the mean of all."""
    cost = np.where(table >= 0, np.asarray(work)[table % len(work)] + _OVERHEAD, 0.0).sum(axis=1)
    return float(cost.max() / cost.mean())
