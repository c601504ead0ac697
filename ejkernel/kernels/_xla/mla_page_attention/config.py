"""Queries, keys and blocks of queries in one step of latent attention over pages, on XLA."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._xla.ragged_page_attention import config as ragged

Config = ragged.Config
testing = ragged.testing
from_params = ragged.from_params


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """Blocks of the mean number of queries, fewer than over per-head keys: all heads are rows."""
    tokens, heads, _ = args.q_nope.shape
    count = max(args.block_tables.shape[0], 1)
    reach = max(args.block_tables.shape[1] * args.kv_pages.shape[1], 1)
    cpu = target.kind == "cpu"
    most = max((512 if cpu else 4096) // max(heads, 1), 1)  # rows of a product with one key head
    return Config(
        block_q=max(min(tokens // count, most), 1),
        block_k=min(256 if cpu else 512, reach),
        block_b=min(8 if cpu else 32, count),
    )


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """The heuristic's neighbours; a tuner measures them."""
    guess = heuristic(args, direction, target)
    made = [dataclasses.replace(guess, block_q=q) for q in (1, 4, 16, 64)]
    made += [dataclasses.replace(guess, block_k=k) for k in (128, 512)]
    return tuple(dict.fromkeys([guess, *made]))


def memory(args: Any, direction: str, cfg: Config) -> int:
    """Bytes of the pages, logits and sums of one step."""
    _, heads, latent = args.q_nope.shape
    row = args.kv_pages.shape[-1] * (args.kv_pages.dtype.itemsize + args.q_nope.dtype.itemsize)
    sums = 4 * 2 * heads * cfg.block_q * latent
    return cfg.block_b * (cfg.block_k * (row + 2 * 4 * heads * cfg.block_q) + sums)
