"""Patterns of blocks for `blocksparse_attention`: small values that say which blocks attend.

They are combined with `|`, `&` and `~` and know no length; `build` gives the table of one call, a
bool for each pair of blocks.
"""

import abc
import dataclasses
from typing import NamedTuple

import numpy as np


class Grid(NamedTuple):
    """Position of each block of queries among the blocks of keys; bottom-right aligned."""

    first: np.ndarray  # [nq, 1] the block of keys at its first query's position
    last: np.ndarray  # [nq, 1] and at its last query's
    key: np.ndarray  # [1, nk]


class BlockMask(abc.ABC):
    """A pattern: equal patterns are equal and hash alike, so a jitted call is compiled once."""

    @abc.abstractmethod
    def seen(self, grid: Grid) -> np.ndarray:
        """Which pairs [nq, nk] attend."""

    def build(self, t: int, s: int, block_size: int) -> np.ndarray:
        """The table [ceil(t / block_size), ceil(s / block_size)] of t queries and s keys.

        The last query is at the position of the last key, as everywhere in this library. The own
        blocks of a block of queries are the one or two blocks of keys that hold its positions.
        """
        if not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"`BlockMask`: `block_size` must be an int >= 1; got {block_size!r}.")
        start = np.arange(0, t, block_size)[:, None]
        stop = np.minimum(start + block_size, t) - 1
        offset = s - t
        key = np.arange(-(-s // block_size))[None]
        grid = Grid((start + offset) // block_size, (stop + offset) // block_size, key)
        return np.broadcast_to(self.seen(grid), (start.shape[0], key.shape[1]))

    def __or__(self, other: "BlockMask") -> "BlockMask":
        return Either(self, other) if isinstance(other, BlockMask) else NotImplemented

    def __and__(self, other: "BlockMask") -> "BlockMask":
        return Both(self, other) if isinstance(other, BlockMask) else NotImplemented

    def __invert__(self) -> "BlockMask":
        return Not(self)


@dataclasses.dataclass(frozen=True)
class Either(BlockMask):
    """Pairs of one pattern or the other."""

    a: BlockMask
    b: BlockMask

    def seen(self, grid: Grid) -> np.ndarray:
        return self.a.seen(grid) | self.b.seen(grid)


@dataclasses.dataclass(frozen=True)
class Both(BlockMask):
    """Pairs of both patterns."""

    a: BlockMask
    b: BlockMask

    def seen(self, grid: Grid) -> np.ndarray:
        return self.a.seen(grid) & self.b.seen(grid)


@dataclasses.dataclass(frozen=True)
class Not(BlockMask):
    """Pairs that are not in a pattern."""

    a: BlockMask

    def seen(self, grid: Grid) -> np.ndarray:
        return ~self.a.seen(grid)


@dataclasses.dataclass(frozen=True)
class Local(BlockMask):
    """See `local`."""

    left: int
    right: int

    def __post_init__(self) -> None:
        _check("local", "left", self.left, 0)
        _check("local", "right", self.right, 0)

    def seen(self, grid: Grid) -> np.ndarray:
        return (grid.key >= grid.first - self.left) & (grid.key <= grid.last + self.right)


@dataclasses.dataclass(frozen=True)
class Causal(BlockMask):
    """See `causal`."""

    def seen(self, grid: Grid) -> np.ndarray:
        return grid.key <= grid.last


@dataclasses.dataclass(frozen=True)
class Strided(BlockMask):
    """See `strided`."""

    stride: int

    def __post_init__(self) -> None:
        _check("strided", "stride", self.stride, 1)

    def seen(self, grid: Grid) -> np.ndarray:
        first, last = ((grid.key - own) % self.stride == 0 for own in (grid.first, grid.last))
        return first | last


@dataclasses.dataclass(frozen=True)
class Global(BlockMask):
    """See `global_`."""

    blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        for block in self.blocks:
            _check("global_", "blocks", block, 0)

    def seen(self, grid: Grid) -> np.ndarray:
        chosen = [np.isin(x, self.blocks) for x in (grid.key, grid.first, grid.last)]
        return chosen[0] | chosen[1] | chosen[2]


@dataclasses.dataclass(frozen=True)
class Random(BlockMask):
    """See `random`."""

    count: int
    seed: int

    def __post_init__(self) -> None:
        _check("random", "count", self.count, 0)
        _check("random", "seed", self.seed, 0)

    def seen(self, grid: Grid) -> np.ndarray:
        rank = _ranks(_hash(self.seed % 2**64, grid.last, grid.key))
        return rank < self.count


def local(left: int, right: int | None = None) -> BlockMask:
    """Blocks at most `left` before and `right` after the queries' own; `right` is `left` if None.

    The pattern is of whole blocks. For an exact window of tokens, add `sliding_window=`.
    """
    return Local(left, left if right is None else right)


def causal() -> BlockMask:
    """Blocks that hold a key at or before one of the queries; add `causal=True` for the tokens."""
    return Causal()


def strided(stride: int) -> BlockMask:
    """Every `stride`-th block, counted from the queries' own, before and after it."""
    return Strided(stride)


def global_(blocks: int | tuple[int, ...] = 1) -> BlockMask:
    """Blocks that every query sees, and that see every key: the first `blocks`, or those listed."""
    if isinstance(blocks, int) and not isinstance(blocks, bool):
        _check("global_", "blocks", blocks, 0)
        return Global(tuple(range(blocks)))
    if not isinstance(blocks, tuple):
        raise ValueError(f"`global_`: `blocks` must be an int or a tuple of ints; got {blocks!r}.")
    return Global(blocks)


def random(count: int, seed: int = 0) -> BlockMask:
    """`count` blocks of keys for each block of queries, or all if there are fewer.

    They depend on the seed and on the places of the blocks alone, on no library's generator.
    """
    return Random(count, seed)


def bigbird(window: int = 1, num_global: int = 1, num_random: int = 3, seed: int = 0) -> BlockMask:
    """The pattern of BigBird (Zaheer et al., 2020): `local | global_ | random`, in blocks."""
    return local(window) | global_(num_global) | random(num_random, seed)


def _check(builder: str, name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{builder}`: `{name}` must be an int >= {least}; got {value!r}.")


def _hash(seed: int, row: np.ndarray, col: np.ndarray) -> np.ndarray:
    """64 well mixed bits for each pair of indices."""
    golden = np.uint64(0x9E3779B97F4A7C15)

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    row, col = row.astype(np.uint64), col.astype(np.uint64)
    state = mix(np.full((1, 1), seed, np.uint64) + golden)
    return mix(mix(state + row * golden) + col * golden)


def _ranks(x: np.ndarray) -> np.ndarray:
    """The rank of each element in its row."""
    order = np.argsort(x, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(x.shape[1])[None], axis=1)
    return ranks
