"""Block sizes, warps and stages of attention in Triton."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel import _settings
from ejkernel._device import Target
from ejkernel.callib import next_power_of_2
from ejkernel.ops.core.kernel import FORWARD

# Shared memory in bytes that one program may use, by compute capability; AMD's CDNA has 64 KiB.
_SHARED = {"8.0": 163 << 10, "8.6": 99 << 10, "8.9": 99 << 10, "9.0": 227 << 10, "10.0": 227 << 10}
_SHARED_AMD = 64 << 10
_SHARED_LEAST = 99 << 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Queries and keys in a tile, warps to a program, depth of the pipeline.

    Backward over keys holds `block_k` keys and passes `block_q` queries; backward over queries has
    the two sizes exchanged.
    """

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 16 or value & (value - 1):
                raise ValueError(f"`Config`: {name}={value!r} must be a power of two, at least 16.")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"`Config`: num_warps={self.num_warps!r} must be 1, 2, 4, 8 or 16.")
        if not isinstance(self.num_stages, int) or not 1 <= self.num_stages <= 8:
            raise ValueError(f"`Config`: num_stages={self.num_stages!r} must be in [1, 8].")


def shared_limit(target: Target) -> int:
    """Bytes of shared memory that a program may use on a device."""
    asked = _settings.current().triton_smem_limit
    if asked is not None:
        return asked
    if target.capability is not None and target.capability.startswith("gfx"):
        return _SHARED_AMD
    return _SHARED.get(target.capability or "", _SHARED_LEAST)


def shared_bytes(args: Any, direction: str, cfg: Config) -> int:
    """An estimate of the shared memory of a program: resident and pipelined tiles."""
    size = jnp.dtype(args.query.dtype).itemsize
    d, e = (max(next_power_of_2(x.shape[-1]), 16) for x in (args.query, args.value))
    stages = max(cfg.num_stages, 1)
    if direction == FORWARD:
        return size * (cfg.block_q * d + stages * cfg.block_k * (d + e))
    resident = cfg.block_k * (d + e)
    streamed = cfg.block_q * (d + e)
    return size * (resident + stages * streamed + 2 * cfg.block_q * cfg.block_k)


def _width(args: Any) -> int:
    return max(args.query.shape[-1], args.value.shape[-1])


def _guesses(args: Any, direction: str) -> tuple[tuple[int, int, int, int], ...]:
    """(block_q, block_k, warps, stages), best first."""
    if jnp.dtype(args.query.dtype).itemsize == 4:
        # float32 products run on the ordinary units, from registers
        return ((32, 32, 4, 2), (64, 32, 4, 2), (32, 64, 4, 1), (16, 32, 4, 2), (16, 16, 4, 1))
    width = _width(args)
    if direction == FORWARD:
        if width <= 64:
            return (
                (128, 64, 4, 3),
                (64, 64, 4, 3),
                (128, 128, 8, 3),
                (128, 128, 4, 3),
                (128, 32, 4, 3),
                (64, 128, 4, 3),
                (64, 32, 4, 2),
            )
        if width <= 128:
            return (
                (128, 64, 8, 3),
                (64, 64, 4, 3),
                (128, 128, 8, 3),
                (128, 128, 8, 2),
                (128, 64, 4, 3),
                (128, 64, 8, 2),
                (64, 128, 4, 2),
                (64, 32, 4, 2),
            )
        return ((64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2), (128, 32, 8, 2), (32, 32, 4, 1))
    if width <= 64:
        return (
            (64, 128, 8, 2),
            (64, 128, 4, 2),
            (64, 64, 4, 2),
            (128, 128, 8, 2),
            (32, 128, 4, 2),
            (32, 64, 4, 1),
        )
    if width <= 128:
        return (
            (64, 128, 8, 2),
            (32, 128, 8, 2),
            (32, 128, 4, 2),
            (64, 64, 4, 2),
            (64, 128, 8, 1),
            (32, 64, 4, 2),
            (32, 64, 4, 1),
        )
    return ((32, 64, 8, 1), (64, 64, 8, 1), (32, 64, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1))


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Guesses that fit the device and the lengths; at least the smallest one."""
    made = [
        Config(block_q=q, block_k=k, num_warps=warps, num_stages=stages)
        for q, k, warps, stages in _guesses(args, direction)
    ]
    limit = shared_limit(target)
    fitting = [c for c in made if shared_bytes(args, direction, c) <= limit]
    return tuple(dict.fromkeys(_short(args, c) for c in fitting or made[-1:]))


def _short(args: Any, cfg: Config) -> Config:
    """Blocks no longer than the call."""
    t, s = max(args.query.shape[1], 16), max(args.key.shape[1], 16)
    return dataclasses.replace(
        cfg,
        block_q=min(cfg.block_q, next_power_of_2(t)),
        block_k=min(cfg.block_k, next_power_of_2(s)),
    )


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def testing(args: Any, direction: str) -> Config:
    """Small blocks that cut the shapes of tests along both axes."""
    return Config(block_q=16, block_k=16, num_warps=4, num_stages=1)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's own sizes."""
    return dataclasses.replace(guess, **settings)


def exchanged(cfg: Config) -> Config:
    """The config of backward over queries from that over keys."""
    return dataclasses.replace(cfg, block_q=cfg.block_k, block_k=cfg.block_q)
