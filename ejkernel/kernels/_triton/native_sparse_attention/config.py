"""Tiles, warps and stages of native sparse attention in Triton."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel._device import Target
from ejkernel.callib import next_power_of_2
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.flash_attention import config as flash
from ejkernel.ops.core.kernel import FORWARD

_PIECE = 1024  # tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_launch.LaunchConfig):
    """Rows and keys in a tile of the selected branch; a row is one head of a token.

    Compression and the sliding window are flash attention, with tiles of their own.
    """

    block_q: int
    block_k: int
    piece: int = _PIECE  # tokens of a block that a program of backward over keys adds up
    window_q: int = 64
    window_k: int = 64
    window_warps: int = 4
    window_stages: int = 2
    # Of a thread that chooses blocks; 0 leaves it to the compiler. With 128, which spill nothing on
    # sm_90, four programs share a multiprocessor; the compiler takes 183.
    choose_registers: int = 128

    def __post_init__(self) -> None:
        _launch.check_blocks(self, "block_q", "block_k", "piece")
        super().__post_init__()
        window(self)  # checks its members
        choosing(self)


def choosing(cfg: Config) -> _launch.LaunchConfig:
    """Options of the launch that chooses blocks."""
    return _launch.LaunchConfig(num_warps=4, max_registers=cfg.choose_registers)


def window(cfg: Config) -> flash.Config:
    """The tiles of compression and of the sliding window."""
    return flash.Config(
        block_q=cfg.window_q,
        block_k=cfg.window_k,
        num_warps=cfg.window_warps,
        num_stages=cfg.window_stages,
    )


# Rows, keys, warps and stages of the selected branch, then of windows. Not measured: the first ones
# spill at most 32 bytes when compiled for an H200, and two programs share a multiprocessor.
_GUESSES = {
    FORWARD: (
        (64, 64, 4, 3, 64, 64, 4, 3),
        (64, 64, 4, 2, 64, 64, 4, 2),
        (32, 64, 4, 2, 64, 32, 4, 2),
        (16, 64, 2, 2, 64, 32, 4, 2),
        (32, 32, 4, 1, 32, 32, 4, 1),
        (16, 16, 4, 1, 16, 16, 4, 1),
    ),
    "backward": (
        (64, 64, 4, 2, 64, 64, 4, 2),
        (32, 64, 4, 2, 64, 64, 4, 2),
        # eight warps would run the products of a window's dk and dv one after the other
        (64, 64, 8, 2, 64, 64, 4, 2),
        (32, 64, 4, 1, 32, 64, 4, 1),
        (32, 32, 4, 1, 32, 32, 4, 1),
        (16, 16, 4, 1, 16, 16, 4, 1),
    ),
}
# float32 products run on the ordinary units, from registers
_WIDE_GUESSES = ((32, 32, 4, 1, 32, 32, 4, 1), (16, 16, 4, 1, 16, 16, 4, 1))
_NAMES = (
    *("block_q", "block_k", "num_warps", "num_stages"),
    *("window_q", "window_k", "window_warps", "window_stages"),
)


def shared_bytes(args: Any, direction: str, cfg: Config, target: Target) -> int:
    """An estimate of the shared memory of a program: resident and pipelined tiles."""
    size = jnp.dtype(args.query.dtype).itemsize
    d, e = (max(next_power_of_2(x.shape[-1]), 16) for x in (args.query, args.value))
    tile, amd = cfg.block_q * cfg.block_k, _launch.is_amd(target)
    kept = max(cfg.num_stages - 1, 1) if amd else cfg.num_stages
    streamed = kept * max(cfg.block_k, cfg.block_q if direction != FORWARD else 0) * (d + e)
    held = 0 if amd else cfg.block_q * d
    if direction != FORWARD:
        held = 2 * tile + (0 if amd else max(cfg.block_q, cfg.block_k) * (d + e))
    flash_args = _FlashShapes(args.query, args.value)
    others = flash.shared_bytes(flash_args, direction, window(cfg), target)
    return max(size * (streamed + held + tile), others)


@dataclasses.dataclass(frozen=True)
class _FlashShapes:
    """What flash attention's estimate asks of a call without options."""

    query: Any
    value: Any
    bias: None = None
    attention_mask: None = None


def _with_heads(args: Any, cfg: Config) -> Config:
    """A tile holds all query heads of a key head, for at least one token."""
    heads = next_power_of_2(max(args.query.shape[2] // max(args.key.shape[2], 1), 1))
    if heads <= cfg.block_q:
        return cfg
    return dataclasses.replace(cfg, block_q=heads, num_warps=8 if heads > 64 else cfg.num_warps)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Guesses that fit the device and the call; at least the smallest one."""
    wide = jnp.dtype(args.query.dtype).itemsize == 4
    rows = _WIDE_GUESSES if wide else _GUESSES[direction]
    guesses = [_with_heads(args, Config(**dict(zip(_NAMES, row, strict=True)))) for row in rows]
    if _launch.is_amd(target):
        guesses = [dataclasses.replace(c, choose_registers=0) for c in guesses]
    fitting = _launch.fitting(guesses, lambda c: shared_bytes(args, direction, c, target), target)
    most = max(next_power_of_2(min(args.block_size, max(args.key.shape[1], 1))), 16)
    short = [dataclasses.replace(c, block_k=min(c.block_k, most)) for c in fitting]
    return tuple(dict.fromkeys(short))


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def misfit(args: Any, direction: str, cfg: Config, target: Target) -> str | None:
    """Why a config of another call cannot serve this one."""
    if cfg in candidates(args, direction, target):
        return None
    return _launch.misfit(cfg, shared_bytes(args, direction, cfg, target), target)


def testing(args: Any, direction: str) -> Config:
    """Small tiles; few programs, since an interpreter takes its time for each."""
    small = {"window_q": 32, "window_k": 16, "window_warps": 4, "window_stages": 1}
    return Config(block_q=32, block_k=16, num_warps=4, num_stages=1, piece=16, **small)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's own sizes, which hold for the selected branch."""
    return _launch.from_params(guess, settings, tile=("block_q", "block_k"))
