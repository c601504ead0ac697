"""Block sizes, warps and stages of attention in Triton."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel import _device, _settings
from ejkernel._device import Target
from ejkernel.callib import next_power_of_2
from ejkernel.ops.core.kernel import BACKWARD, FORWARD

_UNKNOWN_SHARED = 99 << 10  # bytes to a program that any NVIDIA GPU since 2020 has


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Queries and keys in a tile, warps to a program, depth of the pipeline.

    Backward over keys holds `block_k` keys and passes `block_q` queries; backward over queries has
    the two sizes exchanged, unless it has sizes, warps and stages of its own.
    """

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int = 0  # of a thread; 0 leaves it to the compiler
    dq_block_q: int = 0
    dq_block_k: int = 0
    dq_warps: int = 0
    dq_stages: int = 0

    def __post_init__(self) -> None:
        own = any((self.dq_block_q, self.dq_block_k, self.dq_warps, self.dq_stages))
        for name in ("block_q", "block_k", *(("dq_block_q", "dq_block_k") if own else ())):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 16 or value & (value - 1):
                raise ValueError(f"`Config`: {name}={value!r} must be a power of two, at least 16.")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"`Config`: num_warps={self.num_warps!r} must be 1, 2, 4, 8 or 16.")
        if not isinstance(self.num_stages, int) or not 1 <= self.num_stages <= 8:
            raise ValueError(f"`Config`: num_stages={self.num_stages!r} must be in [1, 8].")
        if self.max_registers not in range(256):
            raise ValueError(f"`Config`: max_registers={self.max_registers!r} must be in [0, 255].")
        if own:
            over_queries(self)  # checks them

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
    return _device.shared_memory(target.capability) or _UNKNOWN_SHARED


def shared_bytes(args: Any, direction: str, cfg: Config, target: Target) -> int:
    """An estimate of the shared memory of a program: resident and pipelined tiles."""
    if direction == FORWARD:
        return _shared_bytes(args, direction, cfg.block_q, cfg.block_k, cfg.num_stages, target)
    dq = over_queries(cfg)
    return max(
        _shared_bytes(args, direction, cfg.block_k, cfg.block_q, cfg.num_stages, target),
        _shared_bytes(args, direction, dq.block_q, dq.block_k, dq.num_stages, target),
    )


def _shared_bytes(
    args: Any, direction: str, held: int, streamed: int, stages: int, target: Target
) -> int:
    size = jnp.dtype(args.query.dtype).itemsize
    d, e = (max(next_power_of_2(x.shape[-1]), 16) for x in (args.query, args.value))
    tile = held * streamed
    if _is_amd(target):  # what is held is in registers, and so is a stage on its way
        tiles = size * tile * (1 if direction == FORWARD else 2)  # between two products
        return tiles + max(stages - 1, 1) * size * streamed * (d + e)
    pairs = (args.bias, args.attention_mask)  # these are streamed too; a mask in bytes
    widths = sum(1 if x.dtype == bool else x.dtype.itemsize for x in pairs if x is not None)
    resident = held * d if direction == FORWARD else held * (d + e) + 2 * tile
    return size * (resident + stages * streamed * (d + e)) + stages * tile * widths


# (block_q, block_k, warps, stages, registers), best first, and what backward over queries has of
# its own: measured on an H200 with 16k tokens (docs/measured.md). 128 registers let four programs
# of 64 x 64 tiles share a multiprocessor at d = 64, 168 three of 64 x 32 at d = 128.
_GUESSES = {
    (FORWARD, 64): (
        (64, 64, 4, 3, 128),
        (64, 64, 4, 3, 0),
        (128, 64, 4, 3, 0),
        (64, 128, 4, 3, 0),
        (64, 32, 4, 2, 0),
    ),
    (FORWARD, 128): (
        (64, 64, 4, 3, 168),
        (64, 64, 4, 3, 0),
        (64, 32, 4, 3, 168),
        (128, 64, 8, 3, 0),
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
        (128, 64, 4, 2, 0, 64, 64, 4, 3),
        (128, 64, 4, 2, 0, 128, 64, 8, 3),
        (64, 64, 4, 3, 0),
        (64, 64, 4, 2, 0),
        (32, 64, 4, 1, 0),
    ),
    (BACKWARD, 128): (
        (64, 64, 4, 2, 0, 128, 64, 8, 3),
        (64, 64, 4, 2, 0, 128, 32, 8, 3),
        (64, 128, 8, 3, 0),
        (64, 64, 4, 2, 0),
        (32, 64, 4, 3, 0),
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
    names = [field.name for field in dataclasses.fields(Config)]
    made = [
        Config(**dict(zip(names, values, strict=False))) for values in _guesses(args, direction)
    ]
    extras = (args.bias, args.attention_mask, args.alibi_slopes, args.dropout_prob or None)
    if _is_amd(target) or any(x is not None for x in extras):  # these need registers
        made = [dataclasses.replace(c, max_registers=0) for c in made]
    bits = args.dropout_prob or args.attention_mask is not None
    if _is_amd(target) and direction != FORWARD and bits:
        # Triton 3.9 does not pipeline loops with such tiles of single bits
        made = [dataclasses.replace(c, num_stages=1, dq_stages=min(c.dq_stages, 1)) for c in made]
    limit = shared_limit(target)
    fitting = [c for c in made if shared_bytes(args, direction, c, target) <= limit]
    return tuple(dict.fromkeys(_short(args, c) for c in fitting or made[-1:]))


def _short(args: Any, cfg: Config) -> Config:
    """Blocks no longer than the call."""
    least = _least(args)
    most_q, most_k = (next_power_of_2(max(x.shape[1], least)) for x in (args.query, args.key))
    sizes = {
        "block_q": min(max(cfg.block_q, least), most_q),
        "block_k": min(max(cfg.block_k, least), most_k),
    }
    if cfg.dq_block_q:
        sizes["dq_block_q"] = min(max(cfg.dq_block_q, least), most_q)
        sizes["dq_block_k"] = min(max(cfg.dq_block_k, least), most_k)
    return dataclasses.replace(cfg, **sizes)


def misfit(args: Any, direction: str, cfg: Config, target: Target) -> str | None:
    """Why a config of another call cannot serve this one."""
    needed, limit = shared_bytes(args, direction, cfg, target), shared_limit(target)
    if needed > limit and cfg not in candidates(args, direction, target):
        return f"{cfg} takes about {needed} bytes of shared memory, of {limit}"
    return None


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def _least(args: Any) -> int:
    # with dropout and a dense mask, Triton 3.6 gives wrong numbers for tiles of 16 in half
    # precision (H200); tiles of 32 and more agree with the oracle, and so do all of float32
    return 32 if args.dropout_prob and args.query.dtype.itemsize < 4 else 16


def check(args: Any, cfg: Config) -> None:
    """Refuses sizes that give wrong numbers."""
    if min(cfg.block_q, cfg.block_k) < (least := _least(args)):
        raise ValueError(
            f"`flash_attention`: with dropout in half precision, `q_blocksize` and `kv_blocksize` "
            f"must be at least {least} in Triton; got {cfg.block_q} and {cfg.block_k}."
        )


def testing(args: Any, direction: str) -> Config:
    """Small blocks that cut the shapes of tests, of two sizes unless 32 divides the queries."""
    least = _least(args)
    held = 32 if args.query.shape[1] % 32 else least
    block_q, block_k = (held, least) if direction == FORWARD else (least, held)
    return Config(block_q=block_q, block_k=block_k, num_warps=4, num_stages=1)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's own sizes, which hold for both passes of backward."""
    own = dict.fromkeys(("dq_block_q", "dq_block_k", "dq_warps", "dq_stages"), 0)
    made = dataclasses.replace(guess, **own | settings)
    tile = lambda c: (c.block_q, c.block_k, c.num_warps)
    # a limit of registers is for the tile that it was measured with
    return made if tile(made) == tile(guess) else dataclasses.replace(made, max_registers=0)


def exchanged(cfg: Config) -> Config:
    """The config of a pass over queries from one over keys."""
    return dataclasses.replace(cfg, block_q=cfg.block_k, block_k=cfg.block_q)


def over_queries(cfg: Config) -> Config:
    """The config of backward over queries."""
    if not cfg.dq_block_q:
        return exchanged(cfg)
    return Config(
        block_q=cfg.dq_block_q,
        block_k=cfg.dq_block_k,
        num_warps=cfg.dq_warps,
        num_stages=cfg.dq_stages,
    )


def wary(args: Any, block: int) -> Config:
    """For doing flagged blocks of a size again, over keys: rare, so small rather than fast."""
    width = max(args.query.shape[-1], args.value.shape[-1])
    held = 64 if width <= 128 and args.query.dtype.itemsize < 4 else 32
    return Config(block_q=32, block_k=min(held, block), num_warps=4, num_stages=1)
