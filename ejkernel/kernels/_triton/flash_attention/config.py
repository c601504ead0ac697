"""Block sizes, warps and stages of attention in Triton."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel import _settings
from ejkernel._device import Target
from ejkernel.callib import next_power_of_2
from ejkernel.ops.core.kernel import BACKWARD, FORWARD

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
    max_registers: int = 0  # of a thread; 0 leaves it to the compiler

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 16 or value & (value - 1):
                raise ValueError(f"`Config`: {name}={value!r} must be a power of two, at least 16.")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"`Config`: num_warps={self.num_warps!r} must be 1, 2, 4, 8 or 16.")
        if not isinstance(self.num_stages, int) or not 1 <= self.num_stages <= 8:
            raise ValueError(f"`Config`: num_stages={self.num_stages!r} must be in [1, 8].")
        if self.max_registers not in range(256):
            raise ValueError(f"`Config`: max_registers={self.max_registers!r} must be in [0, 255].")

    def launch(self) -> dict[str, Any]:
        """What `triton_call` wants to know."""
        options = {"maxnreg": self.max_registers} if self.max_registers else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "options": options}


def _is_amd(target: Target) -> bool:
    return target.capability is not None and target.capability.startswith("gfx")


def shared_limit(target: Target) -> int:
    """Bytes of shared memory that a program may use on a device."""
    asked = _settings.current().triton_smem_limit
    if asked is not None:
        return asked
    if _is_amd(target):
        return _SHARED_AMD
    return _SHARED.get(target.capability or "", _SHARED_LEAST)


def shared_bytes(args: Any, direction: str, cfg: Config, target: Target) -> int:
    """An estimate of the shared memory of a program: resident and pipelined tiles."""
    size = jnp.dtype(args.query.dtype).itemsize
    d, e = (max(next_power_of_2(x.shape[-1]), 16) for x in (args.query, args.value))
    stages, tile = cfg.num_stages, cfg.block_q * cfg.block_k
    held, streamed = cfg.block_q, cfg.block_k
    tiles = size * tile  # of weights, on their way between two products
    if direction != FORWARD:
        held, streamed, tiles = cfg.block_k, cfg.block_q, 2 * size * tile
    if _is_amd(target):  # what is held is in registers, and so is a stage on its way
        return tiles + max(stages - 1, 1) * size * streamed * (d + e)
    pairs = (args.bias, args.attention_mask)  # these are streamed too; a mask in bytes
    widths = sum(1 if x.dtype == bool else x.dtype.itemsize for x in pairs if x is not None)
    resident = held * d if direction == FORWARD else held * (d + e) + 2 * tile
    return size * (resident + stages * streamed * (d + e)) + stages * tile * widths


# (block_q, block_k, warps, stages, registers), best first: measured on an H200 with 16k tokens
# (docs/measured.md). 128 registers let four programs of a 64 x 64 tile share a multiprocessor.
_GUESSES = {
    (FORWARD, 64): (
        (64, 64, 4, 3, 128),
        (64, 64, 4, 3, 0),
        (128, 64, 4, 3, 0),
        (64, 128, 4, 3, 0),
        (128, 128, 8, 3, 0),
        (64, 32, 4, 2, 0),
    ),
    (FORWARD, 128): (
        (64, 64, 4, 3, 0),
        (128, 128, 8, 3, 0),
        (128, 64, 8, 3, 0),
        (64, 32, 4, 4, 0),
        (128, 64, 8, 2, 0),
        (64, 32, 4, 2, 0),
    ),
    (FORWARD, 256): (
        (64, 64, 4, 2, 0),
        (128, 64, 8, 2, 0),
        (64, 32, 4, 2, 0),
        (128, 32, 8, 2, 0),
        (32, 32, 4, 1, 0),
    ),
    (BACKWARD, 64): (
        (64, 64, 4, 3, 0),
        (64, 128, 8, 3, 0),
        (64, 64, 4, 2, 0),
        (32, 64, 4, 3, 0),
        (32, 64, 4, 1, 0),
    ),
    (BACKWARD, 128): (
        (64, 128, 8, 3, 0),
        (32, 64, 4, 3, 0),
        (64, 64, 4, 3, 0),
        (64, 128, 8, 2, 0),
        (32, 64, 4, 1, 0),
    ),
    (BACKWARD, 256): (
        (32, 64, 8, 1, 0),
        (64, 64, 8, 1, 0),
        (32, 64, 4, 1, 0),
        (32, 32, 4, 1, 0),
    ),
}
# float32 products run on the ordinary units, from registers
_WIDE_GUESSES = (
    (32, 32, 4, 2, 0),
    (64, 32, 4, 2, 0),
    (32, 64, 4, 1, 0),
    (16, 32, 4, 2, 0),
    (16, 16, 4, 1, 0),
)


def _guesses(args: Any, direction: str) -> tuple[tuple[int, ...], ...]:
    if jnp.dtype(args.query.dtype).itemsize == 4:
        return _WIDE_GUESSES
    width = max(args.query.shape[-1], args.value.shape[-1])
    return _GUESSES[direction, next(most for most in (64, 128, 256) if width <= most)]


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Guesses that fit the device and the lengths; at least the smallest one."""
    names = ("block_q", "block_k", "num_warps", "num_stages", "max_registers")
    made = [Config(**dict(zip(names, values, strict=True))) for values in _guesses(args, direction)]
    if _is_amd(target):
        made = [dataclasses.replace(c, max_registers=0) for c in made]
        if direction != FORWARD and (args.dropout_prob or args.attention_mask is not None):
            # Triton 3.9 does not pipeline loops with such tiles of single bits
            made = [dataclasses.replace(c, num_stages=1) for c in made]
    limit = shared_limit(target)
    fitting = [c for c in made if shared_bytes(args, direction, c, target) <= limit]
    return tuple(dict.fromkeys(_short(args, c) for c in fitting or made[-1:]))


def _short(args: Any, cfg: Config) -> Config:
    """Blocks no longer than the call."""
    least = _least(args)
    t, s = max(args.query.shape[1], least), max(args.key.shape[1], least)
    cfg = dataclasses.replace(cfg, block_q=max(cfg.block_q, least), block_k=max(cfg.block_k, least))
    return dataclasses.replace(
        cfg,
        block_q=min(cfg.block_q, next_power_of_2(t)),
        block_k=min(cfg.block_k, next_power_of_2(s)),
    )


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def _least(args: Any) -> int:
    # with dropout and a dense mask, Triton 3.6 gives wrong numbers for tiles of 16 in half
    # precision (H200); tiles of 32 and more agree with the oracle
    return 32 if args.dropout_prob else 16


def testing(args: Any, direction: str) -> Config:
    """Small blocks that cut the shapes of tests along both axes."""
    least = _least(args)
    return Config(block_q=least, block_k=least, num_warps=4, num_stages=1)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's own sizes."""
    return dataclasses.replace(guess, **settings)


def exchanged(cfg: Config) -> Config:
    """The config of backward over queries from that over keys."""
    return dataclasses.replace(cfg, block_q=cfg.block_k, block_k=cfg.block_q)
