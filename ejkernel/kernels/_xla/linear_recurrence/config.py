"""Chunk sizes of the linear recurrence on XLA."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.ops.core.kernel import FORWARD


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tokens in a chunk, tokens in a part whose pairs are written out, chunks at once."""

    block_t: int = 64
    block_part: int = 4
    block_n: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`Config`: {field.name}={value!r} must be a positive int.")


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """On a CPU one chunk at a time stays in its cache; elsewhere many chunks fill the device."""
    if target.kind == "cpu":
        # parts of 1, 2, 4, 8 tokens: 0.18, 0.25, 0.29, 0.64 s (gla, T=4096, H=4, D=64; one sweep
        # on 2 busy cores)
        return Config(block_part=1, block_n=1)
    return Config(block_part=4, block_n=64)  # not measured


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """The heuristic's neighbours; a tuner measures them."""
    guess = heuristic(args, direction, target)
    sizes = ((32, 4), (64, 1), (64, 2), (64, 4), (128, 4))
    made = [dataclasses.replace(guess, block_t=t, block_part=p) for t, p in sizes]
    return tuple(dict.fromkeys([guess, *made]))


def memory(args: Any, direction: str, cfg: Config) -> int:
    """Bytes of the states between chunks and of the pairs of the chunks at once."""
    batch, t, heads, d = args.query.shape
    e = args.value.shape[-1]
    size, part = sizes(args, cfg)
    states = -(-t // size) * d * e
    pairs = cfg.block_n * size * (size + (part + 8) * max(d, e))
    return 4 * batch * heads * (states + pairs) * (1 if direction == FORWARD else 3)


def testing(args: Any, direction: str) -> Config:
    """A config that cuts the small shapes of tests into several chunks of several parts."""
    return Config(block_t=8, block_part=4, block_n=2)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's sizes; `block_q` of the portable spelling is the chunk."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    if "block_q" in settings:
        mine["block_t"] = settings["block_q"]
    return dataclasses.replace(guess, **mine)


def sizes(args: Any, cfg: Config) -> tuple[int, int]:
    """Tokens in a chunk and in a part that a call can use; a chunk is 2 ** i parts."""
    t = max(args.query.shape[1], 1)
    size = part = min(cfg.block_part, cfg.block_t, t)
    while 2 * size <= cfg.block_t and size < t:
        size *= 2
    return size, part
