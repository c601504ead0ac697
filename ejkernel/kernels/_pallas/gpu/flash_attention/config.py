"""Tiles, stages and registers of attention on Hopper."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel import _device
from ejkernel._device import Target
from ejkernel.errors import UnsupportedError
from ejkernel.kernels._pallas.gpu._blocks import probe, segment_ranges
from ejkernel.kernels._shared import config_checks
from ejkernel.ops.core.kernel import BACKWARD

_ROWS = 64  # of queries, a warpgroup
_WARPGROUP = 128  # threads
_MOST_BARRIERS = 11  # named ones that Mosaic leaves: two a stage and two a warpgroup
_MOST_REGISTERS = 1 << 16  # of a multiprocessor
_MIB = 1 << 20
DQ_STAGES = 2  # of the kernel of dq alone
BACKWARD_WARPGROUPS = 2  # that compute; a third one loads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Queries and keys in a tile, and how a multiprocessor works on them.

    A program has a warpgroup for every 64 queries, and one more that loads. Backward has two
    warpgroups with 64 keys each; it has neither turns nor an output of its own.
    """

    block_q: int
    block_k: int = 128
    num_stages: int = 2  # tiles of keys, and as many of values
    registers: int = 240  # of a thread that computes, with two such warpgroups or more
    load_registers: int = 24  # of a thread that loads
    turns: bool = True  # warpgroups issue their products one after the other
    section: int = 32  # MiB of keys and values that programs work on at a time
    num_programs: int = 132  # one a multiprocessor

    def __post_init__(self) -> None:
        if self.block_q not in (32, 64, 128, 192):
            raise ValueError(f"`Config`: block_q={self.block_q!r} must be 32, 64, 128 or 192.")
        if self.block_k not in (64, 128):
            raise ValueError(f"`Config`: block_k={self.block_k!r} must be 64 or 128.")
        most = (_MOST_BARRIERS - 2 * self.warpgroups) // 2
        if not 2 <= self.num_stages <= most:
            raise ValueError(f"`Config`: num_stages={self.num_stages!r} must be 2 to {most}.")
        for name in ("registers", "load_registers"):
            value = getattr(self, name)
            if not 24 <= value <= 256 or value % 8:
                raise ValueError(f"`Config`: {name}={value!r} must be a multiple of 8, 24 to 256.")
        if reason := self.lacks_registers(self.warpgroups):
            raise ValueError(f"`Config`: {reason}.")
        config_checks.positive(self, "section", "num_programs")

    @property
    def warpgroups(self) -> int:
        """Those that compute."""
        return self.block_q // _ROWS

    def lacks_registers(self, warpgroups: int) -> str | None:
        """Why so many warpgroups that compute, and one that loads, cannot have their registers.

        A program starts with equal shares, of which a thread only gives or takes. What is left over
        of the multiprocessor is nobody's: a warpgroup that asked for it would wait for ever.
        """
        if warpgroups < 2:  # it keeps its share
            return None
        threads = _WARPGROUP * (warpgroups + 1)
        share = _MOST_REGISTERS // threads // 8 * 8
        if not self.load_registers <= share <= self.registers:
            return (
                f"load_registers={self.load_registers} must be at most {share}, and "
                f"registers={self.registers} at least"
            )
        total = _WARPGROUP * (warpgroups * self.registers + self.load_registers)
        if total > share * threads:
            return (
                f"{warpgroups} warpgroups of {self.registers} registers a thread and one of "
                f"{self.load_registers} need {total}; a program has {share * threads}"
            )
        return None


def sums_in_order(args: Any) -> bool:
    """Whether dq has a kernel of its own in backward, and all sums a fixed order.

    With heads of 192, dk and dv leave no registers for a part of dq.
    """
    return args.deterministic or args.query.shape[-1] > 128


def dq_block_k(head_dim: int) -> int:
    """Keys in a block of the kernel of dq alone; registers hold no more beside dq."""
    return 128 if head_dim <= 128 else 64


def shared_bytes(args: Any, direction: str, cfg: Config) -> int:
    """Shared memory of a program: tiles, and some for barriers and reductions."""
    d, e = args.query.shape[-1], args.value.shape[-1]
    if direction == BACKWARD:
        keys = cfg.block_k * (d + e)
        queries = cfg.num_stages * cfg.block_q * (d + e + 4)  # with two vectors of float32
        if sums_in_order(args):  # of two kernels, the one that needs more
            of_dq = 2 * _ROWS * (d + e + 4) + DQ_STAGES * dq_block_k(d) * (d + e)
            return 2 * max(keys + queries, of_dq) + 4096
        ds, dq = 2 * cfg.block_k * cfg.block_q, 2 * cfg.block_q * d
        return 2 * (keys + queries + ds + dq) + 4096
    queries = cfg.block_q * (d + e)  # and results
    keys = cfg.num_stages * cfg.block_k * (d + e)
    return 2 * (queries + keys) + 4 * cfg.block_q + 4096


# Best first, by head size: what a sketch of the kernel ran fastest with on an H200.
_GUESSES: dict[int, tuple[dict[str, Any], ...]] = {
    64: (
        {"block_q": 192, "registers": 160, "load_registers": 32},
        {"block_q": 128},
        {"block_q": 128, "num_stages": 3},
    ),
    128: (
        {"block_q": 128},
        {"block_q": 128, "section": 16},
        {"block_q": 128, "section": 64},
        {"block_q": 128, "turns": False},
        {"block_q": 128, "block_k": 64, "num_stages": 3},
    ),
    # tiles of 128 keys do not fit
    192: (
        {"block_q": 128, "block_k": 64, "num_stages": 3},
        {"block_q": 128, "block_k": 64},
    ),
}
_BACKWARD_GUESSES: tuple[dict[str, Any], ...] = (
    {"section": 40},
    {"section": 16},
    {"section": 80},
)


def _backward_block_q(args: Any) -> int:
    """Its two warpgroups compute 64 x 64 values of dq each.

    With heads of 192, dk and dv take 160 registers: beside tiles of 64 x 64, ptxas makes products
    run one after the other (its note C7512).
    """
    return {64: 128, 128: 64, 192: 32}[args.query.shape[-1]]


def _backward(args: Any, **settings: Any) -> Config:
    block_q = _backward_block_q(args)
    # four short blocks hide as much of a copy's time as two others
    return Config(block_q=block_q, num_stages=4 if block_q == 32 else 2, **settings)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Guesses that fit the device; a call with few queries has small tiles of them."""
    if target.kind == "cpu":  # more warpgroups than that may wait for a thread of the interpreter
        return (testing(args, direction),)
    programs = _device.multiprocessors(target.capability or probe.CAPABILITY) or 132
    d = args.query.shape[-1]
    if direction == BACKWARD:
        return tuple(_backward(args, num_programs=programs, **g) for g in _BACKWARD_GUESSES)
    made = _with_room(args, [Config(num_programs=programs, **g) for g in _GUESSES[d]])
    rows = -(-max(args.query.shape[1], 1) // _ROWS) * _ROWS
    if rows == _ROWS:
        made = [dataclasses.replace(c, block_q=_ROWS, turns=False) for c in made]
    return tuple(dict.fromkeys(c for c in made if misfit(args, direction, c, target) is None))


def _with_room(args: Any, made: Sequence[Config]) -> list[Config]:
    """With the registers that a warpgroup needs to clear padding while it loads.

    Backward has none to give: with fewer than 240, ptxas makes products run one after the other
    (its note C7512), so the warpgroup that loads spills where there is padding.
    """
    if not segment_ranges.apply_to(args):
        return list(made)
    return [
        c if c.load_registers >= 32 else dataclasses.replace(c, registers=232, load_registers=40)
        for c in made
    ]


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def misfit(args: Any, direction: str, cfg: Config, target: Target | None) -> str | None:
    """Why a config of another call cannot serve this one."""
    if direction == BACKWARD:
        block_q = _backward_block_q(args)
        if (cfg.block_q, cfg.block_k) != (block_q, 128):
            return f"needs {block_q} queries and 128 keys in a tile"
        if reason := cfg.lacks_registers(BACKWARD_WARPGROUPS):
            return reason
    elif not cfg.warpgroups:
        return "needs 64 queries or more in a tile"
    limit = _device.shared_memory(probe.CAPABILITY)
    needed = shared_bytes(args, direction, cfg)
    if limit is not None and needed > limit:
        return f"needs {needed} bytes of shared memory; there are {limit}"
    return None


def check(args: Any, direction: str, cfg: Config) -> None:
    """Raises if a config cannot serve a call: programs of another one might wait for ever."""
    if reason := misfit(args, direction, cfg, None):
        raise UnsupportedError(f"`flash_attention`: {cfg} does not serve this call: {reason}.")


def testing(args: Any, direction: str) -> Config:
    """Small tiles for a few programs, which an interpreter runs."""
    if direction == BACKWARD:
        return _backward(args, num_programs=2)
    return Config(block_q=128, block_k=64, num_programs=2)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's sizes."""
    if settings.get("num_warps") not in (None, 4 * (guess.warpgroups + 1)):
        raise ValueError("the number of warps follows from `q_blocksize` here")
    names = {f.name for f in dataclasses.fields(Config)}
    return dataclasses.replace(guess, **{n: v for n, v in settings.items() if n in names})
