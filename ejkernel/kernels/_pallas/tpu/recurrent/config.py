"""Batch rows, steps and columns in a block of recurrent cells on TPUs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel._device import Target
from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.tpu._blocks import capacity, tiles
from ejkernel.kernels._shared import cells as shared
from ejkernel.kernels._specs import recurrent as spec
from ejkernel.ops.core.kernel import BACKWARD, FORWARD

_ROWS = 16  # of a register of bfloat16
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Batch rows of a program, steps that are fetched at once, columns of a product."""

    block_b: int
    block_t: int
    block_d: int = 256

    def __post_init__(self) -> None:
        for name, unit in (("block_b", 1), ("block_t", 1), ("block_d", tiles.LANES)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % unit:
                raise ValueError(
                    f"`Config`: {name}={value!r} must be a positive multiple of {unit}."
                )


def width(args: Any) -> int:
    """Columns of a unit: the features of the state in whole registers."""
    return cdiv(args.w_hh.shape[2], tiles.LANES) * tiles.LANES


def fitting(args: Any, cfg: Config) -> Config:
    """Blocks no larger than the call: all rows, or whole registers; columns that divide a unit."""
    batch, t, _ = args.inputs.shape
    rows = min(cdiv(cfg.block_b, _ROWS) * _ROWS, batch)
    most = min(cfg.block_d, width(args))
    sizes = range(most, 0, -tiles.LANES)
    columns = next(size for size in sizes if width(args) % size == 0)
    return Config(block_b=rows, block_t=min(cfg.block_t, t), block_d=columns)


def vmem_bytes(args: Any, cfg: Config, direction: str) -> int:
    """An estimate: weights once, two buffers of what is fetched and stored, states and tiles."""
    cfg, unit = fitting(args, cfg), width(args)
    size, wide = jnp.dtype(shared.product_dtype(args)).itemsize, args.inputs.dtype.itemsize
    gates, kept = spec.GATES[args.cell_type], spec.KEPT[args.cell_type]
    states = 2 if args.cell_type == "lstm" else 1
    if direction == FORWARD:
        step = 4 * (gates + kept + states) + wide
        state = 4 * 4 * states + 2 * size
    else:
        step = 4 * (kept + 1) + wide + kept * size
        state = 4 * 4 * states + 2 * 4
    rows = cdiv(cfg.block_b, _ROWS) * _ROWS
    tile = 4 * 4 * rows * (kept + 2) * cfg.block_d
    return gates * unit * unit * size + rows * unit * (2 * cfg.block_t * step + state) + tile


def vmem_limit(args: Any, cfg: Config, direction: str) -> int:
    """What to ask of the compiler, which needs some for itself."""
    return max(16 * _MIB, vmem_bytes(args, cfg, direction) + 4 * _MIB)


def refusal(args: Any, target: Target) -> str | None:
    """Why a TPU has no room for the weights and the least blocks of either direction."""
    if target.kind != "tpu":
        return None
    most, least = capacity.vmem(target), Config(block_b=_ROWS, block_t=1, block_d=tiles.LANES)
    needed = max(vmem_bytes(args, least, direction) for direction in (FORWARD, BACKWARD))
    if needed <= most:
        return None
    return (
        f"holds `w_hh` in VMEM, of which it may use {most // _MIB} MiB; with {args.w_hh.shape[2]} "
        f"features in {args.inputs.dtype} it needs {cdiv(needed, _MIB)} MiB"
    )


# Rows and steps, best first. Every block of rows sends the weights through the matrix unit again: a
# step of an LSTM of 512 features in bfloat16 has 694 cycles in the schedule for v5e with 8 rows,
# 752 with 16, 879 with 32 and 2174 with 128.
_ROW_GUESSES, _STEP_GUESSES = (256, 128, 64, 32, 16), (64, 32, 16, 8, 4, 2, 1)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Guesses that take at most half of the memory; else those that fit, at least the smallest."""
    made = [
        fitting(args, Config(block_b=b, block_t=t)) for b in _ROW_GUESSES for t in _STEP_GUESSES
    ]
    needed = {cfg: vmem_bytes(args, cfg, direction) for cfg in made}
    most = capacity.vmem(target)
    for limit in (most // 2, most):
        if fits := [cfg for cfg, size in needed.items() if size <= limit]:
            return tuple(fits[:4])
    return tuple(made[-1:])


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def testing(args: Any, direction: str) -> Config:
    """Blocks that cut the steps of tests, with a rest."""
    return Config(block_b=16, block_t=4, block_d=128)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with other blocks; `block_q` of the portable spelling is that of batch rows."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    if "block_q" in settings:
        mine["block_b"] = settings["block_q"]
    return dataclasses.replace(guess, **mine)
