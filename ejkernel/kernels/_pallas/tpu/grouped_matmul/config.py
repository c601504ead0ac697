"""Block sizes of grouped products on TPUs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel._device import Target
from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.tpu._blocks import capacity

_LANES, _ROWS = 128, 16  # rows of a register of bfloat16
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Rows, summed columns and result columns in a block of a product.

    The gradient of `rhs` sums over blocks of `block_m` rows, for blocks of `block_k` by `block_n`.
    """

    block_m: int
    block_k: int
    block_n: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 8 or value % 8:
                raise ValueError(f"`Config`: {name}={value!r} must be a positive multiple of 8.")


def fitting(cfg: Config, m: int, k: int, n: int) -> tuple[int, int, int]:
    """Blocks no larger than the arrays; columns in sizes that divide them, if there is one.

    A matrix that blocks do not divide is padded, which copies it.
    """
    rows = min(cfg.block_m, cdiv(m, _ROWS) * _ROWS)
    return rows, _divisor(k, cfg.block_k), _divisor(n, cfg.block_n)


def _divisor(length: int, most: int) -> int:
    if length <= most:
        return cdiv(length, 8) * 8 if length < _LANES else cdiv(length, _LANES) * _LANES
    sizes = range(most - most % _LANES, 0, -_LANES)
    return next((size for size in sizes if length % size == 0), most)


def vmem_limit(blocks: tuple[int, int, int], dtypes: tuple[Any, Any, Any]) -> int:
    """What to ask of the compiler: two buffers of each block, and the sum in float32."""
    m, k, n = blocks
    lhs, rhs, out = (jnp.dtype(dtype).itemsize for dtype in dtypes)
    needed = 2 * (m * k * lhs + k * n * rhs + 2 * m * n * out) + 3 * 4 * m * n
    return max(16 * _MIB, 2 * needed)


# (block_m, block_k, block_n), best first by the cycles of the compiled schedule on v5e for 8 groups
# of 1024 rows, k = n = 4096, in bfloat16
_GUESSES = ((512, 1024, 1024), (512, 512, 1024), (256, 1024, 1024), (512, 512, 512))


def table_numbers(args: Any) -> int:
    """The most numbers in scalar memory: six a step, with the fewest rows that are guessed."""
    rows = min(block_m for block_m, _, _ in _GUESSES)
    return 6 * (cdiv(args.lhs.shape[0], rows) + args.rhs.shape[0])


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Guesses that fit the device; at least the smallest one."""
    names = ("block_m", "block_k", "block_n")
    made = [Config(**dict(zip(names, guess, strict=True))) for guess in _GUESSES]
    wide = (jnp.float32,) * 3 if args.lhs.dtype == jnp.float32 else (args.lhs.dtype,) * 3
    limit = capacity.vmem(target)
    fits = [c for c in made if vmem_limit(dataclasses.astuple(c), wide) <= limit]
    return tuple(fits or made[-1:])


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def testing(args: Any, direction: str) -> Config:
    """Small blocks that cut the shapes of tests."""
    return Config(block_m=16, block_k=8, block_n=16)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's block sizes, if it has any."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    return dataclasses.replace(guess, **mine)
