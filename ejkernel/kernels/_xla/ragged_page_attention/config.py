"""Queries, keys and blocks of queries in one step of ragged attention over pages, on XLA."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._shared import config_checks
from ejkernel.kernels._xla.page_attention.config import step_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Queries of a block, keys of a step (whole pages, at least one), blocks side by side."""

    block_q: int
    block_k: int
    block_b: int = 8

    def __post_init__(self) -> None:
        config_checks.positive(self, "block_q", "block_k", "block_b")


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """Blocks of the mean number of queries, so that decoding pads little; keys near the cache."""
    tokens, count = args.queries.shape[0], max(args.block_tables.shape[0], 1)
    reach = max(args.block_tables.shape[1] * args.kv_pages.shape[1], 1)
    cpu = target.kind == "cpu"
    rows = min(8 if cpu else 32, count)
    double, width = args.kv_pages.shape[2:]
    keys = step_keys(rows * double * width * args.queries.dtype.itemsize, target)
    return Config(
        block_q=max(min(tokens // count, 64 if cpu else 128), 1),
        block_k=min(keys, 512, reach),
        block_b=rows,
    )


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """The heuristic's neighbours; a tuner measures them."""
    guess = heuristic(args, direction, target)
    made = [dataclasses.replace(guess, block_q=q) for q in (1, 16, 64, 128)]
    made += [dataclasses.replace(guess, block_k=k) for k in (128, 512)]
    return tuple(dict.fromkeys([guess, *made]))


def memory(args: Any, direction: str, cfg: Config) -> int:
    """Bytes of the pages and logits of one step."""
    _, heads, _ = args.queries.shape
    _, _, double, width = args.kv_pages.shape
    pages = double * width * args.kv_pages.dtype.itemsize
    return cfg.block_b * cfg.block_k * (2 * pages + 2 * 4 * heads * cfg.block_q)


def testing(args: Any, direction: str) -> Config:
    """A config that cuts the small shapes of tests into several steps along every axis."""
    return Config(block_q=4, block_k=8, block_b=2)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's block sizes; the rest means nothing to XLA."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    return dataclasses.replace(guess, **mine)
