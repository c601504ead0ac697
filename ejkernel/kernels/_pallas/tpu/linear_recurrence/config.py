"""Tokens in a step and in a chunk of the linear recurrence on TPUs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel._device import Target
from ejkernel.callib import cdiv, next_power_of_2
from ejkernel.kernels._pallas.tpu._blocks import capacity
from ejkernel.ops.core.kernel import FORWARD

_LANES = 128
_MIB = 1 << 20
_LEAST = 8  # rows of a register


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tokens that a step of the grid fetches, and tokens in a chunk, whose pairs are computed."""

    block_t: int
    chunk: int

    def __post_init__(self) -> None:
        for name in ("block_t", "chunk"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < _LEAST:
                raise ValueError(f"`Config`: {name}={value!r} must be an int of at least 8.")
        if self.chunk & (self.chunk - 1):
            raise ValueError(f"`Config`: chunk={self.chunk} must be a power of two.")
        if self.block_t % self.chunk:
            raise ValueError(
                f"`Config`: block_t={self.block_t} must be a multiple of chunk={self.chunk}."
            )


def fitting(args: Any, cfg: Config) -> Config:
    """Chunks and steps no longer than the tokens need."""
    t = args.query.shape[1]
    chunk = min(cfg.chunk, max(next_power_of_2(t), _LEAST))
    return Config(block_t=min(cfg.block_t, cdiv(t, chunk) * chunk), chunk=chunk)


def by_element(args: Any) -> bool:
    """Whether elements of the state's rows or columns have gates of their own."""
    return args.gk is not None or args.gv is not None


def vmem_bytes(args: Any, cfg: Config, direction: str) -> int:
    """An estimate: two buffers of what is fetched and stored, states, and tiles of all chunks."""
    d, e = (cdiv(x.shape[-1], _LANES) * _LANES for x in (args.query, args.value))
    width = max(d, e)
    arrays, tiles = (5, 2) if direction == FORWARD else (9, 8)
    if by_element(args):  # tiles that libtpu spills for v5e, of 512 bytes a token with 128 lanes
        tiles *= 3 if args.gv is None else 6
    tokens = cfg.block_t * width * (2 * jnp.dtype(args.query.dtype).itemsize * arrays + 4 * tiles)
    return tokens + 4 * d * e * (6 + cfg.block_t // cfg.chunk)


def vmem_limit(args: Any, cfg: Config, direction: str) -> int:
    """What to ask of the compiler."""
    return max(16 * _MIB, 3 * vmem_bytes(args, cfg, direction) // 2)


# Tokens of a step and of a chunk, best first. Thousands of cycles of schedules compiled for v5e,
# 4096 tokens of 8 heads, d = e = 128, bfloat16, forward and backward: with constant decay 58, 193
# for 512, 128; 78, 227 for 256, 128; 91, 301 for 256, 64; 96, 227 for 128, 128; with gates by
# element 124, 390; 138, 415; 144, 434; 168, 421.
_GUESSES = ((512, 128), (256, 128), (256, 64), (128, 128), (128, 64), (64, 64))


def table_numbers(args: Any) -> int:
    """The most numbers in scalar memory: four a step, with the shortest that are guessed."""
    sequences = 1 if args.cu_seqlens is None else args.cu_seqlens.shape[0] - 1
    return 4 * (cdiv(args.query.shape[1], _GUESSES[-1][0]) + sequences) + args.query.shape[2]


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Guesses that fit the device; at least the smallest one.

    A packed sequence fills its last step: steps are not longer than sequences are on average.
    """
    most = args.query.shape[1]
    if args.cu_seqlens is not None:
        most = cdiv(most, max(args.cu_seqlens.shape[0] - 1, 1))
    most = max(next_power_of_2(most), _GUESSES[-1][0])
    made = [fitting(args, Config(block_t=t, chunk=c)) for t, c in _GUESSES if t <= most]
    limit = capacity.vmem(target)
    fits = [cfg for cfg in made if vmem_limit(args, cfg, direction) <= limit]
    return tuple(dict.fromkeys(fits or made[-1:]))


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def memory(args: Any, direction: str, cfg: Config) -> int:
    """Bytes of the states between steps, which a backward computes again."""
    if direction == FORWARD:
        return 0
    batch, t, _, d = args.query.shape
    heads = max(x.shape[2] for x in (args.query, args.key, args.value))
    return 4 * batch * heads * cdiv(t, cfg.block_t) * d * args.value.shape[-1]


def testing(args: Any, direction: str) -> Config:
    """Steps of two chunks that cut the shapes of tests."""
    return Config(block_t=16, chunk=8)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's chunk, `block_q`; the other sizes mean nothing here."""
    if "block_q" not in settings:
        return guess
    chunk = settings["block_q"]
    return Config(block_t=max(guess.block_t // max(chunk, 1), 1) * chunk, chunk=chunk)
