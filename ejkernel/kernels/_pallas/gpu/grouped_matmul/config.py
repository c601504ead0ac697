"""Tiles, stages and warpgroups of grouped products on Hopper."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel import _device
from ejkernel._device import Target
from ejkernel.kernels._pallas.gpu._blocks import probe
from ejkernel.kernels._shared import config_checks
from ejkernel.kernels._specs.grouped_matmul import num_columns
from ejkernel.ops.core.kernel import BACKWARD

UNIT = 64  # columns of a tile that TMA copies with a swizzle of 128 bytes
_MOST_SUMS = 128  # registers of a thread for sums: more leave none for addresses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A tile of the result is `block_m` by `block_n`; a step of its sum is `block_k` long.

    `warpgroups` multiply, each for its share of `block_m` rows; one more loads. The gradient of
    `rhs` has tiles of the same sizes, over its rows and columns, and sums over `block_k` rows of
    `lhs` a step.
    """

    block_m: int
    block_n: int
    block_k: int = 64
    num_stages: int = 4  # tiles of both factors in shared memory
    warpgroups: int = 2
    num_buffers: int = 1  # parts of a result that are written at a time, of each warpgroup
    band: int = 8  # tiles above each other that follow one another
    num_programs: int = 132  # one a multiprocessor

    def __post_init__(self) -> None:
        for name, known in (
            ("warpgroups", (1, 2)),
            ("block_n", (64, 128, 256)),
            ("block_k", (64, 128)),
            ("num_buffers", (1, 2, 4)),
        ):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"`Config`: {name}={value!r} must be one of {known}.")
        sizes = tuple(self.warpgroups * rows for rows in (64, 128))
        if self.block_m not in sizes:
            raise ValueError(
                f"`Config`: block_m={self.block_m!r} must be one of {sizes} with "
                f"{self.warpgroups} warpgroups."
            )
        if (sums := self.rows * self.block_n // 128) > _MOST_SUMS:
            raise ValueError(
                f"`Config`: tiles of {self.block_m} x {self.block_n} need {sums} registers a "
                f"thread for sums; {_MOST_SUMS} are the most."
            )
        config_checks.positive(self, "num_stages", "band", "num_programs")
        if self.num_stages < 2:  # a step's memory is given back when the next one runs
            raise ValueError(f"`Config`: num_stages={self.num_stages!r} must be 2 or more.")

    @property
    def rows(self) -> int:
        """Of a tile, for each warpgroup."""
        return self.block_m // self.warpgroups


def fitted(cfg: Config, columns: int, num_rows: int = 128) -> Config:
    """Tiles no larger than a result's columns, and than its rows where these are columns too."""
    block_n = max(n for n in (64, 128, 256) if n <= min(cfg.block_n, columns))
    rows = cfg.rows if cfg.rows <= num_rows else UNIT
    return dataclasses.replace(cfg, block_n=block_n, block_m=rows * cfg.warpgroups)


def shared_bytes(args: Any, direction: str, cfg: Config) -> int:
    """Shared memory of a program: tiles of both factors, of results, and some for barriers.

    The gradient of `rhs` needs less than that of `lhs`, which has parts of two kinds.
    """
    del args, direction
    factors = 2 * cfg.num_stages * cfg.block_k * (cfg.block_m + cfg.block_n)
    return factors + 128 * cfg.block_m * (cfg.num_buffers + 1) + 2048


# Best first; none of it has been measured. Tiles of 128 x 256 read the fewest bytes of shared
# memory for a product, with the widest instruction; four buffers hold all of them in bfloat16, so
# that no warpgroup waits for a copy while it writes.
_GUESSES: tuple[dict[str, int], ...] = (
    {"block_m": 128, "block_n": 256, "num_stages": 3, "num_buffers": 4},
    {"block_m": 128, "block_n": 256, "num_stages": 4},
    {"block_m": 256, "block_n": 128, "num_stages": 3},
    {"block_m": 128, "block_n": 128, "num_stages": 5, "num_buffers": 2},
    {"block_m": 128, "block_n": 128, "block_k": 128, "num_stages": 2, "num_buffers": 2},
)
# few rows a group: the matrices are read once, as many bytes at a time as there is room for
_FEW_ROWS: tuple[dict[str, int], ...] = (
    {"block_m": 64, "block_n": 256, "num_stages": 5, "warpgroups": 1},
    {"block_m": 64, "block_n": 128, "num_stages": 8, "warpgroups": 1},
    {"block_m": 64, "block_n": 128, "block_k": 128, "num_stages": 4, "warpgroups": 1},
)


def _average_rows(args: Any) -> int:
    if args.lhs.ndim == 4:
        return args.lhs.shape[-2]
    return args.lhs.shape[0] // max(args.group_sizes.shape[0], 1)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Guesses that fit the call and the device."""
    if target.kind == "cpu":
        return (testing(args, direction),)
    programs = _device.multiprocessors(target.capability or probe.CAPABILITY) or 132
    few = direction != BACKWARD and _average_rows(args) <= 64
    narrow = min(args.lhs.shape[-1], num_columns(args))
    made = []
    for guess in _FEW_ROWS if few else _GUESSES:
        cfg = Config(num_programs=programs, **guess)
        short = dataclasses.replace(cfg, block_n=fitted(cfg, max(narrow, UNIT)).block_n)
        if misfit(args, direction, short, target) is None:
            made.append(short)
    return tuple(dict.fromkeys(made))


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def misfit(args: Any, direction: str, cfg: Config, target: Target) -> str | None:
    """Why a config of another call cannot serve this one."""
    k, n = args.lhs.shape[-1], num_columns(args)
    if k % cfg.block_k or (direction == BACKWARD and n % cfg.block_k):
        return f"needs k={k} and n={n} to be multiples of block_k={cfg.block_k}"
    limit = _device.shared_memory(probe.CAPABILITY)
    needed = shared_bytes(args, direction, cfg)
    if limit is not None and needed > limit:
        return f"needs {needed} bytes of shared memory; there are {limit}"
    return None


def testing(args: Any, direction: str) -> Config:
    """Small tiles for a few programs, which an interpreter runs."""
    return Config(block_m=128, block_n=64, num_stages=2, band=2, num_programs=2)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's own sizes, if it has any."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    return dataclasses.replace(guess, **mine)
