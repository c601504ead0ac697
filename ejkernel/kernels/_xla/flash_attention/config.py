"""Block sizes of blockwise attention on XLA."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._shared import config_checks
from ejkernel.kernels._xla._blocks.logits import Blocks
from ejkernel.ops.core.kernel import BACKWARD, FORWARD

# A CPU wants the tile of logits in its cache: 512 x 256 of 8 heads in float32 forward (4 MiB), and
# half of that backward, which holds two tiles (2 cores of an AMD EPYC, docs/measured.md).
CPU_TILE = {FORWARD: 1 << 20, BACKWARD: 1 << 19}
# Elsewhere a tile only has to fill the device and leave memory for the rest.
WIDE_TILE = 1 << 26


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Queries, keys, batch rows and key heads in one tile of logits."""

    block_q: int
    block_k: int
    block_b: int = 1
    block_h: int = 1

    def __post_init__(self) -> None:
        config_checks.positive(self, "block_q", "block_k", "block_b", "block_h")


def even(length: int, most: int) -> int:
    """A block of at most `most` that cuts a length with the least padding."""
    if length <= most:
        return max(length, 1)
    count = -(-length // most)
    return min(most, -(-length // count // 8) * 8)


def divisor(total: int, most: int) -> int:
    """The greatest divisor of `total` that is at most `most`."""
    return next((n for n in range(min(total, max(most, 1)), 0, -1) if total % n == 0), 1)


def with_rows(args: Any, block_q: int, block_k: int, tile: int) -> Config:
    """Adds as many heads, then batch rows, as a tile holds."""
    batch, _, num_q_heads, _ = args.query.shape
    num_kv_heads = args.key.shape[2]
    one = max(block_q * block_k * (num_q_heads // num_kv_heads), 1)
    block_h = divisor(num_kv_heads, tile // one)
    full = block_h == num_kv_heads
    block_b = divisor(batch, tile // (one * block_h)) if full else 1
    return Config(block_q=block_q, block_k=block_k, block_b=block_b, block_h=block_h)


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """Measured on 2 cores of an AMD EPYC and on an H200 (docs/measured.md)."""
    t, s = args.query.shape[1], args.key.shape[1]
    if target.kind == "cpu":
        most_q, most_k = (512, 256) if direction == FORWARD else (256, 512)
    else:
        most_q, most_k = 1024, 1024
    tile = CPU_TILE[direction] if target.kind == "cpu" else WIDE_TILE
    return with_rows(args, even(t, most_q), even(s, most_k), tile)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """The heuristic's neighbours; a tuner measures them."""
    t, s = args.query.shape[1], args.key.shape[1]
    tile = CPU_TILE[direction] if target.kind == "cpu" else WIDE_TILE
    sizes = ((512, 256), (256, 512), (512, 512), (256, 256), (128, 128), (1024, 1024), (2048, 2048))
    made = [with_rows(args, even(t, q), even(s, k), tile) for q, k in sizes]
    return tuple(dict.fromkeys([heuristic(args, direction, target), *made]))


def memory(args: Any, direction: str, cfg: Config) -> int:
    """Bytes of the tiles alive at once: logits and weights, and backward their gradients."""
    size = blocks(args, cfg)
    repeat = args.query.shape[2] // max(args.key.shape[2], 1)
    tiles = 2 if direction == FORWARD else 4
    return tiles * 4 * size.b * size.g * repeat * size.q * size.k


def testing(args: Any, direction: str) -> Config:
    """A config that cuts the small shapes of tests into several blocks along every axis."""
    return Config(block_q=16, block_k=12, block_b=1, block_h=1)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's block sizes; warps and stages mean nothing to XLA."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    return dataclasses.replace(guess, **mine)


def blocks(args: Any, cfg: Config) -> Blocks:
    """The block sizes that a call can use: within its lengths, dividing its rows and heads."""
    batch, t, _, _ = args.query.shape
    _, s, num_kv_heads, _ = args.key.shape
    size_q, size_k = min(cfg.block_q, max(t, 1)), min(cfg.block_k, max(s, 1))
    if args.dropout_prob:
        size_k = -(-size_k // 4) * 4  # one random counter serves four keys
    return Blocks(
        b=divisor(batch, cfg.block_b), g=divisor(num_kv_heads, cfg.block_h), q=size_q, k=size_k
    )
