"""Block sizes of mean pooling on TPUs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.callib import cdiv

_LANES = 128
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tokens, features and pooled rows of a block, at most."""

    block_t: int
    block_d: int
    rows: int

    def __post_init__(self) -> None:
        for name, least in (("block_t", 8), ("block_d", 8), ("rows", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % least:
                raise ValueError(
                    f"`Config`: {name}={value!r} must be a positive multiple of {least}."
                )


def cut(length: int, most: int, least: int = _LANES) -> int:
    """A block of an axis: all of it, or a multiple of `least` that divides it, or the most."""
    if length <= most:
        return length
    sizes = range(most - most % least, 0, -least)
    return next((size for size in sizes if length % size == 0), most)


def whole(length: int, size: int) -> int:
    """The length of an axis in whole blocks; one that blocks do not divide is padded."""
    return cdiv(length, size) * size


def rows_of(cfg: Config, num_rows: int, block: int) -> int:
    """Pooled rows of a block: a divisor of all, as many as a block of full size has elements."""
    most = max(min(cfg.rows, cfg.block_t * cfg.block_d // block), 1)
    return next(n for n in range(most, 0, -1) if num_rows % n == 0)


def vmem_limit(elements: int) -> int:
    """What to ask of the compiler for blocks of so many elements: two buffers and float32 tiles."""
    return max(16 * _MIB, 6 * 4 * elements)


# tokens, features, rows; 512 KiB of bfloat16 a block, of which two are under way
_GUESSES = ((256, 1024, 8), (512, 1024, 16), (512, 512, 8), (128, 2048, 8))


def guesses() -> Sequence[Config]:
    names = ("block_t", "block_d", "rows")
    return tuple(Config(**dict(zip(names, guess, strict=True))) for guess in _GUESSES)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """All guesses: every device has room for them."""
    return guesses()


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess."""
    return guesses()[0]


def testing(args: Any, direction: str) -> Config:
    """Small blocks that cut the shapes of tests."""
    return Config(block_t=8, block_d=128, rows=2)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's block sizes, if it has any."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    return dataclasses.replace(guess, **mine)
