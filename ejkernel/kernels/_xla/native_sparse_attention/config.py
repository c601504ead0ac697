"""Block sizes of native sparse attention on XLA."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._shared import config_checks
from ejkernel.kernels._xla.flash_attention import config as flash
from ejkernel.ops.core.kernel import FORWARD

# Logits of one tile: 4 MiB of float32 stay in a CPU's cache; elsewhere a tile fills the device.
_CPU_TILE, _WIDE_TILE = 1 << 20, 1 << 25
# Pairs of tokens and blocks sorted at once, a few int32 each.
_PAIRS = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tokens of a tile, by what is done with it."""

    block_q: int  # that selected one block, multiplied with its keys
    block_k: int  # queries and keys of the sliding window
    block_t: int  # scored against the means of all blocks
    block_c: int  # whose selected blocks are sorted

    def __post_init__(self) -> None:
        config_checks.positive(self, "block_q", "block_k", "block_t", "block_c")


def _power(most: int) -> int:
    """The greatest power of two up to `most`, at least 1."""
    return 1 << max(int(most).bit_length() - 1, 0)


def num_blocks(args: Any) -> int:
    t = args.key.shape[1]
    if args.cu_seqlens is None:
        return -(-t // max(args.block_size, 1))
    return t // args.block_size + args.cu_seqlens.shape[0] - 1


def most_blocks(args: Any) -> int:
    """A bound on the blocks that a token selects."""
    if args.block_indices is not None:
        return args.block_indices.shape[-1]
    return args.max_blocks if args.block_counts is None else num_blocks(args)


def _sized(args: Any, tile: int, block_q: int, block_k: int) -> Config:
    t, heads = args.query.shape[1:3]
    repeat = max(heads // max(args.key.shape[2], 1), 1)
    blocks, t = max(num_blocks(args), 1), max(t, 1)
    block_t = min(_power(tile // (repeat * blocks)), t)
    block_c = min(_power(_PAIRS // blocks), t)
    # a tile holds the tokens of one block: not more than a block has on average
    average = block_c * min(most_blocks(args), blocks) // blocks
    block_q = max(min(block_q // repeat, _power(average)), 8)
    return Config(block_q=block_q, block_k=min(block_k, t), block_t=block_t, block_c=block_c)


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """Sizes for 2 cores of a CPU; those for other devices are not measured."""
    if target.kind != "cpu":
        return _sized(args, _WIDE_TILE, 8192, 1024)
    # 8192 tokens, 16 heads of 64, 16 blocks of 64, the selected branch forward on 2 cores of an AMD
    # EPYC: 1.14 s with 32 tokens a tile, 0.90 s with 64, 0.80 s with 256
    return _sized(args, _CPU_TILE, 4096 if direction == FORWARD else 2048, 256)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """The heuristic's neighbours; a tuner measures them."""
    tile = _CPU_TILE if target.kind == "cpu" else _WIDE_TILE
    sizes = ((1024, 256), (2048, 256), (4096, 512), (8192, 512))
    made = [_sized(args, tile, q, k) for q, k in sizes]
    return tuple(dict.fromkeys([heuristic(args, direction, target), *made]))


def memory(args: Any, direction: str, cfg: Config) -> int:
    """Bytes of the tiles alive at once, and of the sorted pairs."""
    repeat = args.query.shape[2] // max(args.key.shape[2], 1)
    blocks = num_blocks(args)
    tiles = 2 if direction == FORWARD else 4
    logits = repeat * max(cfg.block_t * blocks, cfg.block_q * args.block_size, cfg.block_k**2)
    return 4 * (tiles * logits + 4 * cfg.block_c * blocks)


def testing(args: Any, direction: str) -> Config:
    """A config that cuts the small shapes of tests into several tiles."""
    return Config(block_q=3, block_k=6, block_t=8, block_c=12)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's block sizes; warps and stages mean nothing to XLA."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    return dataclasses.replace(guess, **mine)


def window(cfg: Config) -> flash.Config:
    """The tiles of the sliding window."""
    return flash.Config(block_q=cfg.block_k, block_k=cfg.block_k)
