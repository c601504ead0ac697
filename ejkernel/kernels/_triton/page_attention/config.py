"""Keys of a tile, splits, warps and stages of decoding in Triton."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel import _device
from ejkernel._device import Target
from ejkernel.callib import next_power_of_2
from ejkernel.kernels._shared import config_checks
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._blocks import packed

_LEAST_ROWS = 16  # of a tile on tensor cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_launch.LaunchConfig):
    """Keys of a tile, and what the number of splits follows from."""

    block_k: int
    programs: int = 1024  # keys are split until there are about so many
    split_keys: int = 256  # the least keys of a part

    def __post_init__(self) -> None:
        _launch.check_blocks(self, "block_k")
        config_checks.positive(self, "programs", "split_keys")
        super().__post_init__()


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What decoding depends on, of a call of any op over cached keys."""

    heads: int
    key_heads: int
    d: int
    e: int
    reach: int  # the most keys of a sequence
    wide: int  # bytes of an element of a query
    narrow: int  # and of a key


def sizes(args: Any) -> Sizes:
    """The sizes of a call; those of `page_attention`, or of keys that are not paged."""
    _, heads, d = args.query.shape
    if hasattr(args, "key_cache"):
        pages, groups, size, _ = args.key_cache.shape
        cache, e = args.key_cache, args.value_cache.shape[-1]
        reach = args.block_tables.shape[1] * size if pages else 0
    else:
        _, reach, groups, _ = args.key.shape
        cache, e = args.key, args.value.shape[-1]
    wide, narrow = args.query.dtype.itemsize, cache.dtype.itemsize
    return Sizes(heads, groups, d, e, reach, wide, narrow)


def row_tiles(of: Sizes) -> packed.Tiles:
    """The rows of one token, padded to as many as tensor cores take."""
    return packed.tiles(of.heads, of.key_heads, _LEAST_ROWS, 1)


def shared_bytes(of: Sizes, rows: int, cfg: Config, target: Target) -> int:
    """An estimate of the shared memory of a program: queries, weights and pipelined keys."""
    d, e = (max(next_power_of_2(x), 16) for x in (of.d, of.e))
    # products of 64 rows read keys from shared memory, which need a buffer more
    stages = cfg.num_stages - (rows < 64 or _launch.is_amd(target))
    keys = max(stages, 1) * cfg.block_k * (d + e) * of.narrow
    if of.narrow < of.wide:  # the widened tile of a product passes through shared memory too
        keys += cfg.block_k * max(d, e) * of.wide
    return keys + rows * (d + cfg.block_k) * of.wide


# (block_k, warps, stages) by the bytes of a key and its value, best guess first; not measured.
# Three programs of the first guesses share a multiprocessor of an H200 (72 kB of shared memory and
# up to 168 registers), and have up to 192 kB of keys and values under way.
_GUESSES = {
    256: ((128, 4, 3), (64, 4, 4), (128, 4, 2), (64, 4, 2), (32, 4, 1)),
    512: ((64, 4, 3), (64, 4, 4), (32, 2, 4), (128, 4, 2), (64, 4, 2), (128, 8, 3), (32, 4, 1)),
    1024: ((32, 4, 3), (64, 8, 2), (32, 4, 2), (32, 4, 1)),
}
# float32 products run on the ordinary units, from registers
_WIDE_GUESSES = ((32, 4, 2), (64, 4, 2), (32, 8, 2), (16, 4, 1))
_AMD_GUESSES = ((64, 4, 2), (32, 4, 2), (64, 8, 2), (32, 4, 1), (16, 4, 1))


def guesses(of: Sizes, target: Target) -> tuple[tuple[int, int, int], ...]:
    """Keys, warps and stages to try, best first."""
    if of.wide >= 4:
        return _WIDE_GUESSES
    if _launch.is_amd(target):
        return _AMD_GUESSES
    size = of.narrow * (of.d + of.e)
    return _GUESSES[256 if size <= 256 else 512 if size <= 512 else 1024]


def decoding(of: Sizes, rows: int, target: Target) -> Sequence[Config]:
    """Configs of decoding that fit, best guess first."""
    filling = 8 * (_device.multiprocessors(target.capability) or 132)
    made = [
        Config(block_k=k, num_warps=warps, num_stages=stages, programs=filling)
        for k, warps, stages in guesses(of, target)
    ]
    fit = _launch.fitting(made, lambda cfg: shared_bytes(of, rows, cfg, target), target)
    splits = [dataclasses.replace(fit[0], programs=filling * 2 // n) for n in (1, 4, 8)]
    return tuple(dict.fromkeys([*fit, *splits]))


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """What a tuner measures, best guess first."""
    of = sizes(args)
    return decoding(of, row_tiles(of).BLOCK, target)


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def misfit(args: Any, direction: str, cfg: Config, target: Target) -> str | None:
    """Why a config of another call cannot serve this one."""
    of = sizes(args)
    return _launch.misfit(cfg, shared_bytes(of, row_tiles(of).BLOCK, cfg, target), target)


def testing(args: Any, direction: str) -> Config:
    """Small tiles, and as many splits as there are tiles."""
    return Config(block_k=16, programs=2**20, split_keys=16, num_stages=1)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's own sizes; queries are not cut into blocks."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    return _launch.from_params(guess, mine, tile=("block_k",))
