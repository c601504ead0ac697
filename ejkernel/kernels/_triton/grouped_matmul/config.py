"""Tiles, warps, stages and number of programs of grouped products in Triton."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel._device import Target
from ejkernel.callib import has_scratch, next_power_of_2
from ejkernel.kernels._shared import config_checks
from ejkernel.kernels._triton import _launch
from ejkernel.ops.core.kernel import FORWARD


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_launch.LaunchConfig):
    """A tile of the result is `block_m` by `block_n`; a step of its sum is `block_k` long.

    The gradient of `rhs` has tiles of the same sizes, over its rows and columns, and sums over
    `block_k` rows of `lhs` a step. `band` is how many tiles above each other follow one another.
    """

    block_m: int
    block_n: int
    block_k: int
    band: int = 8
    num_programs: int = 132
    descriptors: bool = False  # tiles are loaded by TMA

    def __post_init__(self) -> None:
        _launch.check_blocks(self, "block_m", "block_n", "block_k")
        super().__post_init__()
        config_checks.positive(self, "band", "num_programs")


def shared_bytes(args: Any, direction: str, cfg: Config, target: Target) -> int:
    """An estimate of the shared memory of a program: tiles of both operands in each stage."""
    stages = max(cfg.num_stages - 1, 1) if _launch.is_amd(target) else cfg.num_stages
    tile = cfg if direction == FORWARD else over_rows(cfg)
    sizes = max(cfg.block_m + cfg.block_n, tile.block_m + tile.block_n)
    barriers = 256 if cfg.descriptors else 0
    return stages * _itemsize(args, direction) * sizes * cfg.block_k + barriers


def _itemsize(args: Any, direction: str) -> int:
    """Of the wider operand; backward multiplies cotangents too."""
    arrays = [args.lhs.dtype, args.rhs.dtype]
    if direction != FORWARD and args.preferred_element_type is not None:
        arrays.append(jnp.dtype(args.preferred_element_type))
    return max(jnp.dtype(x).itemsize for x in arrays)


# compute units, by compute capability or architecture; a wrong number costs a part of a wave
_UNITS = {"8.0": 108, "9.0": 132, "10.0": 148, "gfx942": 304, "gfx950": 256}
_NAMES = (
    *("block_m", "block_n", "block_k", "num_warps", "num_stages"),
    *("programs", "max_registers"),  # programs for each unit, which share it if they fit
)
# Best first. On an H200 (32768 rows, 8 groups, 4096 x 4096) descriptors take 1.58 ms and pointers
# 1.74 ms forward, 3.18 and 3.82 ms for both gradients; three stages are as good as four.
# 128 x 256 tiles need half of a multiprocessor's registers for sums, and give wgmma its widest form
# (m64n256k16); 128 x 128 ones let two programs share it, so that one stores while one multiplies.
_GUESSES = {
    "hopper": (
        (128, 256, 64, 8, 3, 1),
        (128, 256, 64, 8, 4, 1),
        (128, 128, 64, 8, 3, 2, 128),
        (128, 128, 64, 4, 3, 2),
        (256, 128, 64, 8, 3, 1),
        (64, 128, 64, 4, 4, 2),
        (64, 64, 64, 4, 2, 2),
    ),
    "other": (
        (128, 128, 64, 8, 3, 1),
        (128, 128, 32, 4, 4, 2),
        (128, 64, 64, 4, 3, 2),
        (64, 64, 64, 4, 2, 2),
        (64, 64, 32, 4, 2, 2),
    ),
    "amd": (
        (128, 128, 64, 8, 2, 1),
        (256, 128, 32, 8, 2, 1),
        (128, 128, 32, 4, 2, 2),
        (64, 64, 64, 4, 2, 2),
    ),
    # few rows a group: the matrices are read once, as many bytes at a time as there is room for
    "few rows": ((16, 128, 128, 4, 4, 2), (16, 64, 128, 4, 4, 4), (16, 64, 64, 4, 2, 4)),
    "some rows": ((64, 128, 64, 4, 4, 2), (64, 256, 64, 8, 3, 1), (64, 64, 64, 4, 2, 2)),
    # rows that do not begin at 16 bytes are loaded number by number, through registers
    "odd": ((64, 64, 32, 4, 2, 2), (64, 128, 32, 8, 2, 1), (64, 64, 64, 8, 2, 1)),
    # float32 products run on the ordinary units, from registers
    "wide": (
        (64, 64, 32, 4, 3, 2),
        (128, 64, 16, 8, 3, 1),
        (64, 32, 32, 4, 2, 4),
        (32, 32, 16, 4, 2, 4),
    ),
}


# with descriptors a thread needs 159 to 177 registers in place of 218 to 250
_DESCRIBED = ((128, 256, 64, 8, 3, 1), (128, 256, 64, 8, 4, 1), (128, 128, 64, 8, 3, 2))


def _kind(args: Any, direction: str, target: Target) -> str:
    if _itemsize(args, direction) == 4:
        return "wide"
    if any(size % 8 for size in (args.lhs.shape[-1], *args.rhs.shape[-2:])):
        return "odd"
    rows = _rows(args)
    if rows <= 64:
        return "few rows" if rows <= 16 else "some rows"
    if _launch.is_amd(target):
        return "amd"
    return "hopper" if (target.capability or "").partition(".")[0] in ("9", "10") else "other"


def _rows(args: Any) -> int:
    """Rows of an average group."""
    if args.lhs.ndim == 4:
        return args.lhs.shape[-2]
    return args.lhs.shape[0] // max(args.group_sizes.shape[0], 1)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Guesses that fit the device and the sizes; at least the smallest one."""
    units = _UNITS.get(target.capability or "", 132)

    def made(guess: tuple[int, ...], described: bool) -> Config:
        named = dict(zip(_NAMES, guess, strict=False))
        programs = units * named.pop("programs")
        if direction != FORWARD:  # the gradient of rhs would spill
            named["max_registers"] = 0
        return _short(args, Config(num_programs=programs, descriptors=described, **named))

    kind = _kind(args, direction, target)
    guesses = [made(guess, False) for guess in _GUESSES[kind]]
    if kind == "hopper":
        others = [made(guess, True) for guess in _DESCRIBED]
        guesses[:0] = [cfg for cfg in others if undescribed(args, cfg, target) is None]
    fitting = _launch.fitting(guesses, lambda c: shared_bytes(args, direction, c, target), target)
    return tuple(dict.fromkeys(fitting))


def undescribed(args: Any, cfg: Config, target: Target) -> str | None:
    """Why a call's tiles cannot be loaded by descriptors."""
    if _launch.is_amd(target) or int((target.capability or "0").partition(".")[0]) < 9:
        return "descriptors need a GPU of compute capability 9.0 or more"
    if not has_scratch():
        return "descriptors need jaxlib 0.11, which gives kernels memory for them"
    return _not_whole(args, cfg)


def _not_whole(args: Any, cfg: Config) -> str | None:
    k, n = args.lhs.shape[-1], args.rhs.shape[-2 if args.transpose_rhs else -1]
    if k % cfg.block_k or n % cfg.block_k:
        # a tile beyond the end of a matrix would hold the next one
        return f"descriptors need k={k} and n={n} to be multiples of block_k={cfg.block_k}"
    return None


def check(args: Any, cfg: Config) -> None:
    """Refuses descriptors that would read another matrix."""
    if cfg.descriptors and (reason := _not_whole(args, cfg)) is not None:
        raise ValueError(f"`grouped_matmul`: {reason}.")


def _short(args: Any, cfg: Config) -> Config:
    """Tiles no larger than the arrays."""
    m, k = args.lhs.shape[-2:]
    n = args.rhs.shape[-2 if args.transpose_rhs else -1]
    least = lambda size, most: min(size, max(next_power_of_2(most), 16))
    return dataclasses.replace(
        cfg,
        block_m=least(cfg.block_m, m),
        block_n=least(cfg.block_n, max(k, n)),  # the gradient of lhs has k columns
        block_k=least(cfg.block_k, max(k, n)),
    )


def over_rows(cfg: Config) -> Config:
    """The config of the gradient of `rhs`, whose tiles do not depend on the rows of groups."""
    return dataclasses.replace(cfg, block_m=max(cfg.block_m, min(cfg.block_n, 64)))


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def misfit(args: Any, direction: str, cfg: Config, target: Target) -> str | None:
    """Why a config of another call cannot serve this one."""
    if cfg in candidates(args, direction, target):
        return None
    if cfg.descriptors and (reason := undescribed(args, cfg, target)) is not None:
        return reason
    return _launch.misfit(cfg, shared_bytes(args, direction, cfg, target), target)


def testing(args: Any, direction: str) -> Config:
    """Small tiles that cut the shapes of tests, and fewer programs than tiles."""
    tiles = {"block_m": 16, "block_n": 16, "block_k": 16}
    return Config(**tiles, num_warps=4, num_stages=1, band=2, num_programs=3)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's own sizes, if it has any."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    return _launch.from_params(guess, mine, tile=("block_m", "block_n", "block_k"))
