"""Keys of a step of decoding on TPUs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel._device import Target
from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.tpu._blocks import capacity, tiles
from ejkernel.kernels._shared import config_checks

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of a sequence that are copied at once, rounded down to whole pages, at least one."""

    block_k: int

    def __post_init__(self) -> None:
        config_checks.positive(self, "block_k")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the memory of a program depends on, of a call of any op over cached keys."""

    heads: int
    groups: int
    d: int
    e: int
    reach: int  # the most keys of a sequence
    page: int  # keys that are copied together
    wide: int  # bytes of an element of a query
    narrow: int  # and of a key


def sizes(args: Any) -> Sizes:
    """The sizes of a call; those of `page_attention`, or of keys that are not paged."""
    _, heads, d = args.query.shape
    if hasattr(args, "key_cache"):
        _, groups, page, _ = args.key_cache.shape
        cache, e = args.key_cache, args.value_cache.shape[-1]
        reach = args.block_tables.shape[1] * page
    else:
        _, reach, groups, _ = args.key.shape
        cache, e, page = args.key, args.value.shape[-1], 1
    wide, narrow = (jnp.dtype(x.dtype).itemsize for x in (args.query, cache))
    return Sizes(heads, groups, d, e, reach, page, wide, narrow)


def whole(x: int, unit: int) -> int:
    return max(cdiv(x, unit), 1) * unit


def vmem_bytes(of: Sizes, tokens: int, block_k: int) -> int:
    """An estimate of the VMEM of a program: two steps of keys, the state of rows, and tiles."""
    d, e = (whole(x, tiles.LANES) for x in (of.d, of.e))
    step = max(min(block_k, of.reach), of.page)
    group = of.heads // max(of.groups, 1)
    rows = of.groups * whole(group * tokens, 8)
    # heads of a narrow dtype fill words of 32 bits, or a page's keys do
    buffers = 2 * step * whole(of.groups, 4 // of.narrow) * (d + e) * of.narrow
    buffers += step * of.groups * (d + e) * of.wide  # heads that were parted
    state = rows * (4 * (e + 3 * tiles.LANES) + 2 * of.wide * (d + e))
    tile = 4 * whole(step, tiles.LANES) * (3 * (d + e) + 6 * whole(group * tokens, 8))
    return buffers + state + tile


def limit(needed: int) -> int:
    """What to ask of the compiler."""
    return max(16 * _MIB, 2 * needed)


def vmem_limit(args: Any, cfg: Config) -> int:
    return limit(vmem_bytes(sizes(args), 1, cfg.block_k))


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Steps that fit, best guess first; at least the smallest one."""
    of, most = sizes(args), capacity.vmem(target)
    # not measured; on a v5e the schedule of a step of 512 keys is shorter than its copies
    made = [Config(block_k=max(min(k, of.reach), 1)) for k in (512, 1024, 256, 128)]
    fitting = [cfg for cfg in made if limit(vmem_bytes(of, 1, cfg.block_k)) <= most]
    return tuple(dict.fromkeys(fitting or made[-1:]))


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def testing(args: Any, direction: str) -> Config:
    """Small steps, so that the short sequences of tests have several."""
    return Config(block_k=8)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's step; the rest means nothing to a TPU."""
    return dataclasses.replace(guess, block_k=settings.get("block_k", guess.block_k))
