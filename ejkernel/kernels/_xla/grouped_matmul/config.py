"""Block sizes of grouped matmul on XLA."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._shared import config_checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Rows of one group in one product."""

    block_m: int

    def __post_init__(self) -> None:
        config_checks.positive(self, "block_m")


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """At most an average group: a longer block multiplies more rows of other groups.

    For 64 groups of 64 rows (k=n=256, float32, 2 cores of an AMD EPYC): 13 ms with 64 rows, 17 ms
    with 128, 27 ms with 256. Elsewhere than on a CPU a step is dear; not measured there.
    """
    if args.group_sizes is None:  # the batched form has no blocks
        return Config(block_m=1)
    average = args.lhs.shape[0] // max(args.group_sizes.shape[0], 1)
    least, most = (16, 256) if target.kind == "cpu" else (128, 1024)
    size = least
    while size < most and size * 2 <= average:
        size *= 2
    return Config(block_m=size)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """The heuristic's neighbours; a tuner measures them."""
    guess = heuristic(args, direction, target)
    if args.group_sizes is None:
        return (guess,)
    sizes = (guess.block_m, 2 * guess.block_m, guess.block_m // 2, 4 * guess.block_m)
    return tuple(Config(block_m=size) for size in sizes)


def memory(args: Any, direction: str, cfg: Config) -> int:
    """Bytes of one block of rows, its product and its matrix, in float32."""
    k, n = args.lhs.shape[-1], args.rhs.shape[-2 if args.transpose_rhs else -1]
    return 4 * (cfg.block_m * (k + n) + k * n)


def testing(args: Any, direction: str) -> Config:
    """A config that cuts the groups of tests into several blocks."""
    return Config(block_m=4)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's block size, if it has one."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    return dataclasses.replace(guess, **mine)
