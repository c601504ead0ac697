"""Keys in one step of attention over a cache, on XLA."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of a row in one step, rounded down to whole pages, at least one."""

    block_k: int

    def __post_init__(self) -> None:
        value = self.block_k
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`Config`: block_k={value!r} must be a positive int.")


def reach(args: Any) -> int:
    """The most keys that a row can have."""
    if hasattr(args, "block_tables"):
        return args.block_tables.shape[1] * _page_size(args)
    return args.key.shape[1]


def _page_size(args: Any) -> int:
    return args.kv_pages.shape[1] if hasattr(args, "kv_pages") else args.key_cache.shape[2]


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """Not measured yet: enough keys to fill a device, few enough to stay near its cache."""
    return Config(block_k=max(min(256 if target.kind == "cpu" else 1024, reach(args)), 1))


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """The heuristic's neighbours; a tuner measures them."""
    made = [Config(block_k=max(min(k, reach(args)), 1)) for k in (128, 256, 512, 1024, 2048)]
    return tuple(dict.fromkeys([heuristic(args, direction, target), *made]))


def memory(args: Any, direction: str, cfg: Config) -> int:
    """Bytes of the keys, values and logits of one step."""
    cache = args.key_cache if hasattr(args, "key_cache") else args.key
    values = args.value_cache if hasattr(args, "value_cache") else args.value
    groups = cache.shape[1] if hasattr(args, "key_cache") else cache.shape[2]
    rows, heads, head_dim = args.query.shape
    keys = groups * (head_dim + values.shape[-1]) * cache.dtype.itemsize
    return rows * cfg.block_k * (keys + 2 * 4 * heads)


def testing(args: Any, direction: str) -> Config:
    """A config that cuts the small shapes of tests into several steps."""
    return Config(block_k=8)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's block size; the rest means nothing to XLA."""
    return dataclasses.replace(guess, block_k=settings.get("block_k", guess.block_k))
