"""Tiles, warps and stages of block-sparse attention: those of flash attention, made smaller."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.flash_attention import config as flash
from ejkernel.kernels._triton.flash_attention.config import Config as Config
from ejkernel.kernels._triton.flash_attention.config import from_params as from_params
from ejkernel.ops.core.kernel import FORWARD

LEAST = 16  # tokens of a tile
_SIZES = ("block_q", "block_k", "dq_block_q", "dq_block_k")


def _most(args: Any) -> int:
    """The largest tile that divides a block of the mask."""
    return min(args.block_size & -args.block_size, 128)


def _cut(args: Any, cfg: Config) -> Config:
    """Tiles inside the mask's blocks; each warp has at least 16 rows of what a program holds."""
    most = _most(args)
    sizes = {n: min(getattr(cfg, n), most) for n in _SIZES}
    warps = {"num_warps": min(cfg.num_warps, max(most // 16, 1))}
    if cfg.dq_warps:
        warps["dq_warps"] = min(cfg.dq_warps, max(most // 16, 1))
    changed = any(getattr(cfg, n) != value for n, value in sizes.items())
    registers = {"max_registers": 0} if changed else {}
    return dataclasses.replace(cfg, **sizes, **warps, **registers)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Flash attention's guesses with tiles that divide the mask's blocks."""
    made = [_cut(args, cfg) for cfg in flash.candidates(args, direction, target)]
    return tuple(dict.fromkeys(made))


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def misfit(args: Any, direction: str, cfg: Config, target: Target) -> str | None:
    """Why a config of another call cannot serve this one."""
    if (reason := _not_divided(args, cfg)) is not None:
        return reason
    if cfg in candidates(args, direction, target):
        return None
    return _launch.misfit(cfg, flash.shared_bytes(args, direction, cfg, target), target)


def _not_divided(args: Any, cfg: Config) -> str | None:
    """Why the tiles of a config do not divide the mask's blocks."""
    bad = [n for n in _SIZES if getattr(cfg, n) and args.block_size % getattr(cfg, n)]
    if not bad:
        return None
    return f"{bad[0]}={getattr(cfg, bad[0])} must divide the `block_size` of the mask"


def check(args: Any, cfg: Config) -> None:
    """Refuses tiles that reach into two blocks of the mask."""
    if (reason := _not_divided(args, cfg)) is not None:
        raise ValueError(f"`blocksparse_attention`: {reason}, {args.block_size}; got {cfg}.")


def testing(args: Any, direction: str) -> Config:
    """Tiles of two sizes where blocks of the mask are large enough."""
    held = min(_most(args), 32)
    block_q, block_k = (held, LEAST) if direction == FORWARD else (LEAST, held)
    return Config(block_q=block_q, block_k=block_k, num_warps=1, num_stages=1)
