"""How many rows and heads share a tile of block-sparse attention on XLA."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._shared import config_checks
from ejkernel.kernels._xla._blocks.logits import Blocks
from ejkernel.kernels._xla.flash_attention import config as dense

# A CPU gains by a second core from 8 heads of 64 x 64 (82 ms forward against 92 ms with one head a
# tile), and loses cache with 8 of 128 x 128 (92 ms of processor time against 69); 4096 tokens, 1/8
# of the blocks, 2 cores of an AMD EPYC. Elsewhere a tile only has to fill the device.
_CPU_TILE = 1 << 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Batch rows and key heads in one tile; its queries and keys are a block of the mask."""

    block_q: int
    block_k: int
    block_b: int = 1
    block_h: int = 1

    def __post_init__(self) -> None:
        config_checks.positive(self, "block_q", "block_k", "block_b", "block_h")


def _with_rows(args: Any, tile: int) -> Config:
    made = dense.with_rows(args, args.block_size, args.block_size, tile)
    return Config(**dataclasses.asdict(made))


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """As many heads and rows as a tile holds, where they share the mask."""
    return _with_rows(args, _CPU_TILE if target.kind == "cpu" else dense.WIDE_TILE)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Tiles from one head to all of them."""
    made = [_with_rows(args, tile) for tile in (1, 1 << 13, 1 << 18, 1 << 20, 1 << 24)]
    return tuple(dict.fromkeys([heuristic(args, direction, target), *made]))


def memory(args: Any, direction: str, cfg: Config) -> int:
    """Bytes of the tiles alive at once."""
    size = blocks(args, cfg)
    tiles = 2 if direction == "forward" else 4
    return tiles * 4 * size.b * size.g * args.query.shape[2] * size.q * size.k


def testing(args: Any, direction: str) -> Config:
    """One row and one head at a time."""
    return Config(block_q=args.block_size, block_k=args.block_size)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess; the mask decides the blocks, and warps and stages mean nothing to XLA."""
    for name in ("block_q", "block_k"):
        if settings.get(name, getattr(guess, name)) != getattr(guess, name):
            raise ValueError(
                f"`blocksparse_attention`: `{name}` of XLA is the `block_size` of the mask, "
                f"{getattr(guess, name)}; got {settings[name]}. Leave it None."
            )
    return guess


def blocks(args: Any, cfg: Config) -> Blocks:
    """The sizes that a call can use: rows and heads share a tile only if they share the mask."""
    mask_batch, mask_heads, _, _ = args.sparsity_mask.shape
    batch, num_kv_heads = args.key.shape[0], args.key.shape[2]
    return Blocks(
        b=dense.divisor(batch, cfg.block_b) if mask_batch == 1 else 1,
        g=dense.divisor(num_kv_heads, cfg.block_h) if mask_heads == 1 else 1,
        q=args.block_size,
        k=args.block_size,
    )
