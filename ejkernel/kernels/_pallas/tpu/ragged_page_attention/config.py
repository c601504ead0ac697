"""Blocks of ragged attention over pages on TPUs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel._device import Target
from ejkernel.callib import next_power_of_2
from ejkernel.kernels._pallas.tpu._blocks import capacity, keys
from ejkernel.kernels._pallas.tpu.page_attention import config as decoding
from ejkernel.kernels._shared import config_checks


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
        config_checks.positive(self, "block_k", "decode_block_k")


def queries(args: Any) -> Any:
    """The queries; of latent vectors, those without the rope part."""
    return args.q_nope if hasattr(args, "q_nope") else args.queries


def sizes(args: Any) -> decoding.Sizes:
    """The sizes of a call, of heads or of latent vectors."""
    _, heads, e = queries(args).shape
    _, size, *inner = args.kv_pages.shape
    groups = inner[0] // 2 if len(inner) == 2 else 1
    wide, narrow = (jnp.dtype(x.dtype).itemsize for x in (queries(args), args.kv_pages))
    reach = args.block_tables.shape[1] * size
    return decoding.Sizes(heads, groups, inner[-1], e, reach, size, wide, narrow)


def pages_of_steps(args: Any, cfg: Config) -> tuple[int, int]:
    """Pages of a step of decoding, and of one of prefill."""
    size, blocks = args.kv_pages.shape[1], args.block_tables.shape[1]
    decoded, others = (
        keys.pages_of_step(n, size, blocks) for n in (cfg.decode_block_k, cfg.block_k)
    )
    return decoded, others


def most_blocks(args: Any, cfg: Config) -> int:
    """At least the blocks of queries of all sequences that have several."""
    tokens, count = queries(args).shape[0], args.block_tables.shape[0]
    return tokens // cfg.block_q + min(count, tokens // 2)


def table_numbers(args: Any) -> int:
    """The most numbers in scalar memory: six a block of at least 16 queries."""
    tokens, sequences = queries(args).shape[0], args.block_tables.shape[0]
    return 6 * (tokens // 16 + min(sequences, tokens // 2))


def refusal(args: Any, target: Target) -> str | None:
    """Why a TPU has no room for the least blocks of a call with wide heads."""
    needed, most = decoding.vmem_bytes(sizes(args), 16, 128), capacity.vmem(target)
    if needed <= most:
        return None
    return f"needs {needed >> 20} MiB of VMEM for 16 tokens of all heads; it may use {most >> 20}"


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
    total = queries(args).shape[0]
    mean = next_power_of_2(-(-total // max(args.block_tables.shape[0], 1)))
    longest = max(next_power_of_2(total), 16)
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
