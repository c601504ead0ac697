"""Which tiles each program of a persistent kernel computes, and in which order; NumPy alone."""

import functools
import heapq

import numpy as np

# What a tile costs besides its blocks: loading queries, storing results.
_OVERHEAD = 1.0


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
    longest_first = np.argsort(-np.asarray(work), kind="stable")
    free = [(0.0, cta) for cta in range(ctas)]
    taken: list[list[int]] = [[] for _ in range(ctas)]
    for start in range(0, pairs, width):
        for tile in longest_first.tolist():
            for pair in range(start, min(start + width, pairs)):
                at, cta = heapq.heappop(free)
                taken[cta].append(pair * tiles + tile)
                heapq.heappush(free, (at + work[tile] + _OVERHEAD, cta))
    rounds = max(map(len, taken)) + 1
    table = np.full((ctas, -(-rounds // pad) * pad), -1, np.int32)
    for cta, items in enumerate(taken):
        table[cta, : len(items)] = items
    return table


def rounds(table: np.ndarray) -> int:
    """How many tiles the program with the most of them has."""
    return int((table >= 0).sum(axis=1).max(initial=0))


def imbalance(table: np.ndarray, work: tuple[int, ...]) -> float:
    """The time of the program that ends last over the mean of all."""
    cost = np.where(table >= 0, np.asarray(work)[table % len(work)] + _OVERHEAD, 0.0).sum(axis=1)
    return float(cost.max() / cost.mean())
