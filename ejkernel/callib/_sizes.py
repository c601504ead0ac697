"""Sizes of grids, blocks and strides."""

import math
from collections.abc import Sequence


def cdiv(a: int, b: int) -> int:
    """The least integer that is at least a / b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n; 1 for n <= 1."""
    return 1 << max(n - 1, 0).bit_length()


def strides_from_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous row-major array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
