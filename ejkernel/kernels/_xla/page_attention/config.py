"""Keys in one step of attention over a cache, on XLA."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._shared import config_checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of a row in one step, rounded down to whole pages, at least one."""

    block_k: int

    def __post_init__(self) -> None:
        config_checks.positive(self, "block_k")


def reach(args: Any) -> int:
    """The most keys that a row can have."""
    if hasattr(args, "block_tables"):
        return args.block_tables.shape[1] * _page_size(args)
    return args.key.shape[1]


def _page_size(args: Any) -> int:
    return args.kv_pages.shape[1] if hasattr(args, "kv_pages") else args.key_cache.shape[2]


def step_keys(bytes_of_a_key: int, target: Target) -> int:
    """Keys of a step: enough to fill a device, few enough to stay near its cache."""
    if target.kind != "cpu":
        return 1024  # not measured yet
    # 8 rows over 4096 keys, d=64, float32 on 2 cores (x86-64): steps of 4 MiB of keys and values
    # take 10 to 30 ms with 2 to 8 key heads, those of 16 MiB 1.5 to 3.5 times as long
    return min(max(2**22 // max(bytes_of_a_key, 1), 64), 1024)


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """A step near the cache, no longer than the rows are."""
    keys = step_keys(_bytes_of_a_key(args), target)
    return Config(block_k=max(min(keys, reach(args)), 1))


def _bytes_of_a_key(args: Any) -> int:
    """Of one key and value, for all rows and heads, in the dtype that products are taken in."""
    cache, values, groups = _caches(args)
    width = cache.shape[-1] + values.shape[-1]
    return args.query.shape[0] * groups * width * args.query.dtype.itemsize


def _caches(args: Any) -> tuple[Any, Any, int]:
    if hasattr(args, "key_cache"):
        return args.key_cache, args.value_cache, args.key_cache.shape[1]
    return args.key, args.value, args.key.shape[2]


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """The heuristic's neighbours; a tuner measures them."""
    made = [Config(block_k=max(min(k, reach(args)), 1)) for k in (128, 256, 512, 1024, 2048)]
    return tuple(dict.fromkeys([heuristic(args, direction, target), *made]))


def memory(args: Any, direction: str, cfg: Config) -> int:
    """Bytes of the keys, values and logits of one step."""
    rows, heads, _ = args.query.shape
    return cfg.block_k * (_bytes_of_a_key(args) + 2 * 4 * rows * heads)


def testing(args: Any, direction: str) -> Config:
    """A config that cuts the small shapes of tests into several steps."""
    return Config(block_k=8)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's block size; the rest means nothing to XLA."""
    return dataclasses.replace(guess, block_k=settings.get("block_k", guess.block_k))
