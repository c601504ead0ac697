"""Block sizes, warps and stages of attention in Triton."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel._device import Target
from ejkernel.callib import next_power_of_2
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._blocks import parts
from ejkernel.ops.core.kernel import BACKWARD, FORWARD

_OF_DQ = ("dq_block_q", "dq_block_k", "dq_warps", "dq_stages", "dq_registers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_launch.LaunchConfig):
    """Queries and keys in a tile, warps to a program, depth of the pipeline.

    Backward over keys holds `block_k` keys and passes `block_q` queries; backward over queries has
    the two sizes exchanged, unless it has sizes, warps and stages of its own, and with them a limit
    of registers: `max_registers` is not for it.
    """

    block_q: int
    block_k: int
    dq_block_q: int = 0
    dq_block_k: int = 0
    dq_warps: int = 0
    dq_stages: int = 0
    dq_registers: int = 0

    def __post_init__(self) -> None:
        own = any(getattr(self, name) for name in _OF_DQ)
        names = ("block_q", "block_k", *(("dq_block_q", "dq_block_k") if own else ()))
        _launch.check_blocks(self, *names)
        super().__post_init__()
        if own:
            over_queries(self)  # checks them


def shared_bytes(args: Any, direction: str, cfg: Config, target: Target) -> int:
    """An estimate of the shared memory of a program: resident and pipelined tiles."""
    if direction == FORWARD:
        return _shared_bytes(args, direction, cfg.block_q, cfg.block_k, cfg.num_stages, target)
    dq = over_queries(cfg)
    return max(
        _shared_bytes(args, direction, cfg.block_k, cfg.block_q, cfg.num_stages, target),
        _shared_bytes(args, direction, dq.block_q, dq.block_k, dq.num_stages, target),
    )


def _columns(args: Any) -> tuple[int, int]:
    """Columns of a tile of queries or keys, and of values."""
    d, e = (sum(parts.columns(x.shape[-1])) for x in (args.query, args.value))
    return d, e


def _shared_bytes(
    args: Any, direction: str, held: int, streamed: int, stages: int, target: Target
) -> int:
    size = jnp.dtype(args.query.dtype).itemsize
    d, e = _columns(args)
    tile = held * streamed
    if _launch.is_amd(target):  # what is held is in registers, and so is a stage on its way
        tiles = size * tile * (1 if direction == FORWARD else 2)  # between two products
        return tiles + max(stages - 1, 1) * size * streamed * (d + e)
    pairs = (args.bias, args.attention_mask)  # these are streamed too; a mask in bytes
    widths = sum(1 if x.dtype == bool else x.dtype.itemsize for x in pairs if x is not None)
    resident = held * d if direction == FORWARD else held * (d + e) + 2 * tile
    return size * (resident + stages * streamed * (d + e)) + stages * tile * widths


_NAMES = ("block_q", "block_k", "num_warps", "num_stages", "max_registers", *_OF_DQ)
# Most columns of queries or values, and of both together. Best first: measured on an H200 with 16k
# tokens (docs/measured.md); those of 96 and 192 columns by what compilers say. 128 registers let
# four programs of 64 x 64 tiles share a multiprocessor at d = 64, 168 three of 64 x 32 at d = 128,
# and 128 two of the pass over queries with 128 x 32.
_GUESSES = {
    (FORWARD, 64, 128): (
        (64, 64, 4, 3, 128),
        (64, 64, 4, 3, 0),
        (128, 64, 4, 3, 0),
        (64, 128, 4, 3, 0),
        (64, 32, 4, 2, 0),
    ),
    (FORWARD, 96, 192): (
        (64, 64, 4, 3, 0),
        (64, 64, 4, 2, 168),
        (64, 32, 4, 3, 128),
        (128, 64, 8, 3, 0),
        (64, 32, 4, 2, 0),
    ),
    (FORWARD, 128, 256): (
        (64, 64, 4, 3, 168),
        (64, 64, 4, 3, 0),
        (64, 32, 4, 3, 168),
        (128, 64, 8, 3, 0),
        (128, 64, 8, 2, 0),
        (64, 32, 4, 2, 0),
    ),
    # two programs of the first kind share a multiprocessor, and three of the second
    (FORWARD, 192, 320): (
        (64, 64, 4, 2, 0),
        (64, 32, 4, 2, 168),
        (64, 32, 4, 3, 0),
        (128, 64, 8, 3, 0),
        (128, 64, 8, 2, 0),
        (32, 32, 4, 1, 0),
    ),
    (FORWARD, 192, 384): (
        (64, 64, 4, 2, 0),
        (128, 64, 8, 3, 0),
        (128, 64, 8, 2, 0),
        (64, 32, 4, 2, 0),
        (32, 32, 4, 1, 0),
    ),
    (FORWARD, 256, 512): (
        (64, 64, 4, 2, 0),
        (128, 64, 8, 2, 0),
        (64, 32, 4, 2, 0),
        (128, 32, 8, 2, 0),
        (32, 32, 4, 1, 0),
    ),
    (BACKWARD, 64, 128): (
        (128, 64, 4, 2, 0, 64, 64, 4, 3),
        (128, 64, 4, 2, 0, 128, 64, 8, 3),
        (64, 64, 4, 3, 0),
        (64, 64, 4, 2, 0),
        (32, 64, 4, 1, 0),
    ),
    (BACKWARD, 96, 192): (
        (64, 64, 4, 2, 0, 128, 64, 8, 3),
        (64, 64, 4, 2, 0, 128, 32, 8, 3, 128),
        (64, 128, 8, 3, 0),
        (64, 64, 4, 2, 0),
        (32, 64, 4, 3, 0),
        (32, 64, 4, 1, 0),
    ),
    (BACKWARD, 128, 256): (
        (64, 64, 4, 2, 0, 128, 64, 8, 3),
        (64, 64, 4, 2, 0, 128, 32, 8, 3, 128),
        (64, 128, 8, 3, 0),
        (64, 64, 4, 2, 0),
        (32, 64, 4, 3, 0),
        (32, 64, 4, 1, 0),
    ),
    (BACKWARD, 192, 320): (
        (32, 64, 4, 2, 0, 128, 64, 8, 2),
        (32, 64, 4, 2, 0, 64, 32, 4, 2),
        (32, 128, 8, 2, 0, 128, 32, 8, 3),
        (64, 64, 8, 1, 0, 128, 64, 8, 2),
        (32, 64, 8, 1, 0),
        (32, 32, 4, 1, 0),
    ),
    (BACKWARD, 192, 384): (
        (32, 128, 8, 2, 0, 128, 64, 8, 2),
        (32, 128, 8, 2, 0, 64, 32, 4, 2),
        (64, 64, 8, 1, 0, 128, 64, 8, 2),
        (32, 64, 8, 1, 0),
        (32, 32, 4, 1, 0),
    ),
    # (32, 64) with four warps is not here: it spills 1.5 kB, and its products are serialised
    (BACKWARD, 256, 512): (
        (32, 64, 8, 1, 0),
        (64, 64, 8, 1, 0),
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
    sizes = _columns(args)
    keys = ((x, one, both) for x, one, both in _GUESSES if x == direction)
    fits = (key for key in keys if max(sizes) <= key[1] and sum(sizes) <= key[2])
    return _GUESSES[next(fits)]


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Guesses that fit the device and the lengths; at least the smallest one."""
    guesses = [Config(**dict(zip(_NAMES, x, strict=False))) for x in _guesses(args, direction)]
    extras = (args.bias, args.attention_mask, args.alibi_slopes, args.dropout_prob or None)
    if _launch.is_amd(target) or any(x is not None for x in extras):  # these need registers
        guesses = [dataclasses.replace(c, max_registers=0, dq_registers=0) for c in guesses]
    if direction != FORWARD and args.bias is not None:
        # tiles of the bias and of its gradient: larger ones spill up to 1 kB a thread
        guesses = [dataclasses.replace(c, block_q=max(c.block_q // 2, 32)) for c in guesses]
    bits = args.dropout_prob or args.attention_mask is not None
    if _launch.is_amd(target) and direction != FORWARD and bits:
        # Triton 3.9 does not pipeline loops with such tiles of single bits
        one = {"num_stages": 1}
        guesses = [dataclasses.replace(c, **one, dq_stages=min(c.dq_stages, 1)) for c in guesses]
    fitting = _launch.fitting(guesses, lambda c: shared_bytes(args, direction, c, target), target)
    return tuple(dict.fromkeys(_short(args, c) for c in fitting))


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
    if cfg in candidates(args, direction, target):
        return None
    return _launch.misfit(cfg, shared_bytes(args, direction, cfg, target), target)


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
    own = dict.fromkeys(_OF_DQ, 0)
    return _launch.from_params(guess, own | settings, tile=("block_q", "block_k"))


def over_queries(cfg: Config) -> Config:
    """The config of backward over queries."""
    if not cfg.dq_block_q:
        return dataclasses.replace(cfg, block_q=cfg.block_k, block_k=cfg.block_q)
    return Config(
        block_q=cfg.dq_block_q,
        block_k=cfg.dq_block_k,
        num_warps=cfg.dq_warps,
        num_stages=cfg.dq_stages,
        max_registers=cfg.dq_registers,
    )


def careful(cfg: Config) -> Config:
    """For computing flagged blocks of queries again: rare, so small rather than fast."""
    return dataclasses.replace(cfg, block_k=min(cfg.block_k, 32), num_stages=1, max_registers=0)
