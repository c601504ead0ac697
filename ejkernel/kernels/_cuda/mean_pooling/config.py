"""Warps, columns and slices of mean pooling in CUDA."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.callib import next_power_of_2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Warps and columns of a block, and tokens that a block reads of a long row, or writes."""

    num_warps: int
    block_w: int
    slice_t: int

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8, 16, 32):
            raise ValueError(
                f"`Config`: num_warps={self.num_warps!r} must be a power of two from 1 to 32."
            )
        for name in ("block_w", "slice_t"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1 or value & (value - 1):
                raise ValueError(f"`Config`: {name}={value!r} must be a positive power of two.")

    def launch(self) -> dict[str, Any]:
        """Attributes of both handlers."""
        return {"threads": 32 * self.num_warps, "block_w": self.block_w}


_BLOCKS = 2048  # enough for every GPU to have several on each of its units
_SLICE_T = (64, 1024)


def width(args: Any) -> int:
    """Columns: heads and features as one axis."""
    return math.prod(args.inputs.shape[2:])


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """A warp or more across the columns, 16 bytes a thread, and the rest along tokens."""
    batch, t = args.inputs.shape[:2]
    columns, of_a_warp = next_power_of_2(width(args)), 32 * 16 // args.inputs.dtype.itemsize
    found = []
    for num_warps, warps_across in ((8, 2), (8, 1), (4, 1), (16, 4)):
        block_w = min(columns, warps_across * of_a_warp)
        tokens = batch * t * max(columns // block_w, 1)
        slice_t = min(max(next_power_of_2(tokens // _BLOCKS), _SLICE_T[0]), _SLICE_T[1])
        found.append(Config(num_warps=num_warps, block_w=block_w, slice_t=slice_t))
    return tuple(dict.fromkeys(found))


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first candidate; none of them has been measured."""
    return candidates(args, direction, target)[0]


def testing(args: Any, direction: str) -> Config:
    """Small blocks, and slices that cut the rows of tests."""
    return Config(num_warps=1, block_w=8, slice_t=8)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's own warps; a block of queries or keys there is not."""
    if unknown := sorted(name for name in settings if name != "num_warps"):
        raise ValueError(f"{', '.join(unknown)} cannot be set; num_warps can")
    return dataclasses.replace(guess, **settings)
