"""How recurrent cells run on XLA: blocks of steps, and what a step computes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._shared import config_checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Steps in a block, copies of a step in the body of a loop, and two choices.

    `narrow`: the products of a step take factors of the weights' dtype, and sum in float32; else
    weights are widened before the loop. `late_gates`: what a step keeps of its projections is made
    again by one product after the loop, so that a step writes less.
    """

    block_t: int = 64
    unroll: int = 1
    narrow: bool = False
    late_gates: bool = False

    def __post_init__(self) -> None:
        config_checks.positive(self, "block_t", "unroll")


# batch times steps whose projections may be in memory at once, on a device
_MOST_ROWS = 1 << 16


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """On a CPU blocks that stay in the cache; elsewhere few launches.

    CPU: a thousand rows fill a matrix product, and what is made of them stays in the cache; all
    steps at once are a tenth slower (LSTM, 16 x 256 x 256 batch, steps, features; AMD EPYC). It has
    no products of bfloat16. A GPU spends a step on launches and on reading weights: an earlier form
    with float32 products took 17 ms for 512 steps of 64 rows of 1024 features on an H200, a plain
    scan in bfloat16 5.4. What is chosen here for a GPU follows from counts of launches; it is not
    measured.
    """
    batch, t, _ = args.inputs.shape
    rows = 1024 if target.kind == "cpu" else _MOST_ROWS
    size = min(max(rows // max(batch, 1), 16), max(t, 1))
    if target.kind == "cpu":
        return Config(block_t=size)
    return Config(block_t=size, unroll=4, narrow=True, late_gates=True)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """The heuristic's neighbours; a tuner measures them."""
    guess = heuristic(args, direction, target)
    if target.kind == "cpu":
        return (guess,)
    change = lambda **new: dataclasses.replace(guess, **new)
    made = [guess, change(unroll=1), change(unroll=16), change(late_gates=False)]
    return tuple(dict.fromkeys(made))


def testing(args: Any, direction: str) -> Config:
    """Blocks that cut the steps of tests, with a rest, and what a GPU does in half precision."""
    narrow = args.inputs.dtype.itemsize < 4
    return Config(block_t=3, unroll=2 if narrow else 1, narrow=narrow, late_gates=narrow)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's block; `block_q` of the portable spelling is that of steps."""
    if "block_q" in settings:
        return dataclasses.replace(guess, block_t=settings["block_q"])
    return guess


def memory(args: Any, direction: str, cfg: Config) -> int:
    """Bytes of a block's projections, or of their gradients."""
    rows = args.inputs.shape[0] * min(cfg.block_t, args.inputs.shape[1])
    directions, columns, _ = args.w_hh.shape
    return 4 * rows * directions * columns
