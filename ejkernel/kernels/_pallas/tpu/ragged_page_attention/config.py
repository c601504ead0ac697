"""Blocks of ragged attention over pages on TPUs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel._device import Target
from ejkernel.callib import next_power_of_2
from ejkernel.kernels._pallas.tpu._blocks import capacity, keys
from ejkernel.kernels._pallas.tpu.page_attention import config as decoding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Queries of a block and keys of its steps; and keys of the steps of single queries.

    Keys are rounded down to whole pages, at least one.
    """

    block_q: int
    block_k: int
    decode_block_k: int

    def __post_init__(self) -> None:
        value = self.block_q
        if not isinstance(value, int) or value < 8 or value & (value - 1):
            raise ValueError(f"`Config`: block_q={value!r} must be a power of two, at least 8.")
        for name in ("block_k", "decode_block_k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`Config`: {name}={value!r} must be a positive int.")


def sizes(args: Any) -> decoding.Sizes:
    """The sizes of a call."""
    _, heads, d = args.queries.shape
    _, size, double, _ = args.kv_pages.shape
    wide, narrow = (jnp.dtype(x.dtype).itemsize for x in (args.queries, args.kv_pages))
    reach = args.block_tables.shape[1] * size
    return decoding.Sizes(heads, double // 2, d, d, reach, size, wide, narrow)


def pages_of_steps(args: Any, cfg: Config) -> tuple[int, int]:
    """Pages of a step of decoding, and of one of prefill."""
    size, blocks = args.kv_pages.shape[1], args.block_tables.shape[1]
    decoded, others = (
        keys.pages_of_step(n, size, blocks) for n in (cfg.decode_block_k, cfg.block_k)
    )
    return decoded, others


def most_blocks(args: Any, cfg: Config) -> int:
    """At least the blocks of queries of all sequences that have several."""
    tokens, count = args.queries.shape[0], args.block_tables.shape[0]
    return tokens // cfg.block_q + min(count, tokens // 2)


def vmem_limit(args: Any, cfg: Config) -> int:
    """What to ask of the compiler for prefill."""
    return decoding.limit(decoding.vmem_bytes(sizes(args), cfg.block_q, cfg.block_k))


def decode_vmem_limit(args: Any, cfg: Config) -> int:
    return decoding.limit(decoding.vmem_bytes(sizes(args), 1, cfg.decode_block_k))


# (rows of a tile, keys of a step), best guess first; not measured. For 32 query and 8 key heads of
# 128 in bfloat16 a step of the first one is about 9800 bundles on a v5e, and 8192 are its products.
_GUESSES = ((512, 512), (1024, 512), (256, 512), (256, 256), (128, 128))
# a product in float32 is several, and as much more code
_WIDE_GUESSES = ((256, 256), (128, 256), (128, 128))


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Guesses that fit the device and the call; at least the smallest one."""
    of, most = sizes(args), capacity.vmem(target)
    group = max(of.heads // max(of.groups, 1), 1)
    mean = next_power_of_2(-(-args.queries.shape[0] // max(args.block_tables.shape[0], 1)))
    longest = max(next_power_of_2(args.queries.shape[0]), 16)
    fits = lambda tokens, k: decoding.limit(decoding.vmem_bytes(of, tokens, k)) <= most
    few = next((k for k in (512, 256) if fits(1, k)), 128)
    made = []
    for rows, k in _WIDE_GUESSES if of.wide == 4 else _GUESSES:
        # blocks much longer than most sequences are padding
        tokens = max(min(rows // next_power_of_2(group), max(8 * mean, 32), longest), 16)
        made.append((tokens, k))
    fitting = [x for x in made if fits(*x)] or [(16, 128)]
    return tuple(
        dict.fromkeys(
            Config(block_q=q, block_k=max(min(k, of.reach), 1), decode_block_k=few)
            for q, k in fitting
        )
    )


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def testing(args: Any, direction: str) -> Config:
    """Small blocks, so that the short sequences of tests have several."""
    return Config(block_q=8, block_k=8, decode_block_k=8)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's own sizes, which are those of prefill."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    return dataclasses.replace(guess, **mine)
