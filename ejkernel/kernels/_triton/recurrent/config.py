"""Tiles, warps and stages of recurrent cells in Triton, and how steps are launched."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel._device import Target
from ejkernel.callib import cdiv, next_power_of_2
from ejkernel.kernels._shared import cells as shared
from ejkernel.kernels._shared import config_checks
from ejkernel.kernels._specs import recurrent as spec
from ejkernel.kernels._triton import _launch
from ejkernel.ops.core.kernel import FORWARD


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_launch.LaunchConfig):
    """Features of the state and batch rows of a program.

    One launch a step: `block_k` features are multiplied at once, and `unroll` launches are in the
    body of the loop. `one_program`: a program holds all weights and runs all steps of its rows;
    `block_d` is then at least all features.
    """

    block_d: int = 16
    block_b: int = 32
    block_k: int = 128
    unroll: int = 16
    one_program: bool = False

    def __post_init__(self) -> None:
        _launch.check_blocks(self, "block_d", "block_b", "block_k")
        super().__post_init__()
        config_checks.positive(self, "unroll")


_NAMES = ("block_d", "block_b", "block_k", "num_warps", "num_stages")
# Tiles that compile without spills for sm_90; which is best follows from `_bytes`.
_STEP_GUESSES = (
    (16, 16, 128, 4, 4),
    (16, 32, 128, 4, 4),
    (16, 64, 128, 4, 4),
    (32, 32, 64, 4, 4),
    (32, 64, 64, 8, 4),
    (64, 64, 64, 8, 3),
)
# float32 products run on the ordinary units, from registers
_WIDE_GUESSES = (
    (16, 16, 32, 4, 2),
    (16, 32, 32, 4, 2),
    (32, 32, 32, 4, 2),
    (32, 64, 32, 8, 2),
)
_MOST_FEATURES = 128  # of a state whose weights one program holds
_PROGRAMS = 132  # that run at once: the multiprocessors of an H200


def _padded(args: Any) -> int:
    return max(next_power_of_2(args.w_hh.shape[2]), 16)


def _size(args: Any) -> int:
    return jnp.dtype(shared.product_dtype(args)).itemsize


def shared_bytes(args: Any, direction: str, cfg: Config, target: Target) -> int:
    """An estimate of the shared memory of a program."""
    gates, size = spec.GATES[args.cell_type], _size(args)
    more = 4 * cfg.block_d * cfg.block_b  # a float32 tile on its way to another layout
    if cfg.one_program:
        weights = gates * cfg.block_d * cfg.block_d
        factors = cfg.block_d * cfg.block_b * (1 if direction == FORWARD else gates)
        return size * (weights + factors) + more
    stages = max(cfg.num_stages - 1, 1) if _launch.is_amd(target) else cfg.num_stages
    factors = cfg.block_b * (1 if direction == FORWARD else gates)
    return size * stages * cfg.block_k * (gates * cfg.block_d + factors) + more


def _bytes(args: Any, direction: str, cfg: Config) -> tuple[int, int]:
    """What the busiest multiprocessor reads for a step's product; then, the number of programs.

    Weights and states come from the L2 cache, which is what a step waits for.
    """
    (directions, rows, d), batch = args.w_hh.shape, args.inputs.shape[0]
    gates = rows // max(d, 1)
    programs = directions * cdiv(d, cfg.block_d) * cdiv(max(batch, 1), cfg.block_b)
    weights, factors = gates * cfg.block_d, cfg.block_b * (1 if direction == FORWARD else gates)
    return cdiv(programs, _PROGRAMS) * (weights + factors), programs


def _one_program(args: Any, direction: str, target: Target) -> list[Config]:
    """Configs with all steps in one program, if its weights fit."""
    if _padded(args) > _MOST_FEATURES or _size(args) > 2:
        return []
    tiles = ((16, 8),) if _padded(args) > 64 else ((16, 4), (16, 8), (32, 8))
    guesses = [
        Config(
            block_d=_padded(args),
            block_b=rows,
            num_warps=warps,
            num_stages=1,
            one_program=True,
        )
        for rows, warps in tiles
    ]
    limit = _launch.shared_limit(target)
    return [cfg for cfg in guesses if shared_bytes(args, direction, cfg, target) <= limit]


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Guesses that fit the device and the call, best first; at least the smallest one."""
    rows = _WIDE_GUESSES if _size(args) == 4 else _STEP_GUESSES
    guesses = [_short(args, Config(**dict(zip(_NAMES, row, strict=True)))) for row in rows]
    if _launch.is_amd(target):  # two stages; and tiles of 32 x 64 take more registers than it has
        guesses = [c for c in guesses if (c.block_d, c.block_b) != (32, 64)]
        guesses = [dataclasses.replace(c, num_stages=min(c.num_stages, 2)) for c in guesses]
    guesses = sorted(dict.fromkeys(guesses), key=lambda c: _bytes(args, direction, c), reverse=True)
    fits = _launch.fitting(guesses, lambda c: shared_bytes(args, direction, c, target), target)
    return (*_one_program(args, direction, target), *reversed(fits))


def _short(args: Any, cfg: Config) -> Config:
    """Tiles no larger than the call."""
    rows = max(next_power_of_2(max(args.inputs.shape[0], 1)), 16)
    return dataclasses.replace(
        cfg,
        block_d=min(cfg.block_d, _padded(args)),
        block_b=min(cfg.block_b, rows),
        block_k=min(cfg.block_k, _padded(args)),
    )


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """All steps in one program where that is possible; else the tile that reads least."""
    return candidates(args, direction, target)[0]


def misfit(args: Any, direction: str, cfg: Config, target: Target) -> str | None:
    """Why a config of another call cannot serve this one."""
    if cfg.one_program and cfg.block_d < args.w_hh.shape[2]:
        return f"{cfg} holds {cfg.block_d} features in a program, of {args.w_hh.shape[2]}"
    if cfg in candidates(args, direction, target):
        return None
    return _launch.misfit(cfg, shared_bytes(args, direction, cfg, target), target)


def testing(args: Any, direction: str) -> Config:
    """Small tiles: two directions by steps, one direction in one program."""
    one = not args.bidirectional
    size = _padded(args) if one else 16
    return Config(block_d=size, block_b=16, block_k=16, unroll=2, num_stages=1, one_program=one)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with other settings; `block_q` of the portable spelling is that of batch rows."""
    mine = {n: v for n, v in settings.items() if n in ("num_warps", "num_stages")}
    if "block_q" in settings:
        mine["block_b"] = settings["block_q"]
    if "block_k" in settings and not guess.one_program:
        mine["block_k"] = settings["block_k"]
    return _launch.from_params(guess, mine, tile=("block_d", "block_b", "block_k"))
