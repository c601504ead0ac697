"""Tiles, slices and warps of mean pooling in Triton."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.callib import next_power_of_2
from ejkernel.kernels._triton import _launch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_launch.LaunchConfig):
    """Tokens and columns in a tile, and tokens that a program reads of a long row."""

    block_t: int
    block_w: int
    slice_t: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("block_t", "block_w", "slice_t"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1 or value & (value - 1):
                raise ValueError(f"`Config`: {name}={value!r} must be a positive power of two.")


_TILE = 8192  # elements: of 16 bits, eight loads of 16 bytes for each thread of four warps
_PROGRAMS = 2048  # enough for every GPU to have several on each of its units
_MOST_T, _LEAST_W, _SLICE_T = 64, 64, (64, 1024)


def width(args: Any) -> int:
    """Columns: heads and features as one axis."""
    return math.prod(args.inputs.shape[2:])


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Tiles of one size, from narrow to wide, and two lengths of slices."""
    batch, t = args.inputs.shape[:2]
    size = t if args.chunk_size is None else min(args.chunk_size, t)
    columns, found = next_power_of_2(width(args)), []
    for tile, warps in ((_TILE, 4), (_TILE // 2, 4), (_TILE, 8)):
        block_t = min(_MOST_T, next_power_of_2(size), max(tile // min(columns, _LEAST_W), 1))
        block_w = min(columns, tile // block_t)
        tokens = batch * t * max(columns // block_w, 1)
        slice_t = min(max(next_power_of_2(tokens // _PROGRAMS), _SLICE_T[0]), _SLICE_T[1])
        slice_t = max(slice_t, block_t)
        sizes = {"block_t": block_t, "block_w": block_w, "slice_t": slice_t}
        found.append(Config(**sizes, num_warps=warps, num_stages=2))
    return tuple(dict.fromkeys(found))


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first candidate; none of them has been measured."""
    return candidates(args, direction, target)[0]


def testing(args: Any, direction: str) -> Config:
    """Small tiles, and slices that cut the rows of tests."""
    return Config(block_t=4, block_w=8, slice_t=8, num_warps=4, num_stages=1)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's own warps and stages, if it has any."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    return _launch.from_params(guess, mine, tile=("block_t", "block_w"))
