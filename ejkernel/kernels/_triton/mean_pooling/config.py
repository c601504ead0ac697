"""Tiles, slices and warps of mean pooling in Triton."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.callib import next_power_of_2
from ejkernel.kernels._triton import _launch
from ejkernel.ops.core.kernel import FORWARD


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


# Columns, tokens and warps of a tile, best first, as measured on an H200. A warp has 256 columns of
# 16 bits, 16 bytes a thread: where no two warps have tokens of a column, no sum crosses them.
_CHUNKS = ((1024, 8, 4), (256, 8, 1), (512, 8, 2), (128, 64, 4))
_LONG = ((256, 32, 2), (512, 16, 4), (256, 8, 1), (128, 64, 4))
_BACKWARD = ((512, 16, 4), (1024, 8, 4), (256, 32, 8), (128, 64, 4))
_PROGRAMS = 1024  # enough for every GPU to have several on each of its units
_MOST_T, _SLICE_T = 64, (64, 512)


def width(args: Any) -> int:
    """Columns: heads and features as one axis."""
    return math.prod(args.inputs.shape[2:])


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Tiles of about one size, and slices of long rows that fill a device."""
    batch, t = args.inputs.shape[:2]
    size = t if args.chunk_size is None else min(args.chunk_size, t)
    columns, found = next_power_of_2(width(args)), []
    is_long = next_power_of_2(size) > _SLICE_T[1]
    for wide, tall, warps in _BACKWARD if direction != FORWARD else _LONG if is_long else _CHUNKS:
        block_w = min(columns, wide)
        block_t = min(_MOST_T, next_power_of_2(size), tall * (wide // block_w))
        tokens = batch * t * max(columns // block_w, 1)
        slice_t = min(max(next_power_of_2(tokens // _PROGRAMS), _SLICE_T[0]), _SLICE_T[1])
        sizes = {"block_t": block_t, "block_w": block_w, "slice_t": max(slice_t, block_t)}
        found.append(Config(**sizes, num_warps=warps, num_stages=2))
    return tuple(dict.fromkeys(found))


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first candidate."""
    return candidates(args, direction, target)[0]


def testing(args: Any, direction: str) -> Config:
    """Small tiles, and slices that cut the rows of tests."""
    return Config(block_t=4, block_w=8, slice_t=8, num_warps=4, num_stages=1)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's own warps and stages, if it has any."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    return _launch.from_params(guess, mine, tile=("block_t", "block_w"))
