"""Rows and keys of a tile, splits, warps and stages of latent attention over pages in Triton."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel import _device
from ejkernel._device import Target
from ejkernel.callib import cdiv, next_power_of_2
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._blocks import packed
from ejkernel.kernels._triton.page_attention import config as decoding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(decoding.Config):
    """Rows of a tile, which are heads of some tokens, its keys, and how keys are split.

    Sequences with more tokens than a tile have sizes, warps and stages of their own, or the same.
    """

    block_q: int
    prefill_block_q: int = 0
    prefill_block_k: int = 0
    prefill_warps: int = 0
    prefill_stages: int = 0

    def __post_init__(self) -> None:
        _launch.check_blocks(self, "block_q")
        super().__post_init__()
        own = (self.prefill_block_q, self.prefill_block_k, self.prefill_warps, self.prefill_stages)
        if any(own):
            prefill(self)  # checks them


def prefill(cfg: Config) -> Config:
    """The config of sequences with more tokens than a tile."""
    names = ("prefill_block_q", "prefill_block_k", "prefill_warps", "prefill_stages")
    if not any(own := [getattr(cfg, name) for name in names]):
        return cfg
    block_q, block_k, warps, stages = own
    return Config(block_q=block_q, block_k=block_k, num_warps=warps, num_stages=stages)


def row_tiles(heads: int, block_q: int, tokens: int) -> packed.Tiles:
    """Tiles of `block_q` rows, with at most so many tokens."""
    held = min(heads, block_q)
    count = max(min(block_q // max(held, 1), tokens), 1)
    return packed.Tiles(heads, 1, heads, held, cdiv(heads, max(held, 1)), count, block_q)


def shared_bytes(args: Any, cfg: Config, target: Target) -> int:
    """An estimate of the shared memory of a program: queries, weights and pipelined keys."""
    wide, narrow = args.q_nope.dtype.itemsize, args.kv_pages.dtype.itemsize
    latent, rope = (max(next_power_of_2(x.shape[-1]), 16) for x in (args.q_nope, args.q_pe))
    keys = cfg.block_k * (latent + rope)
    if _launch.is_amd(target):  # queries are in registers, and so is a stage on its way
        return max(cfg.num_stages - 1, 1) * keys * narrow + cfg.block_q * cfg.block_k * wide
    # tiles of 64 rows run asynchronously from Hopper on, and keep one stage longer
    later = cfg.block_q >= 64 and float(target.capability or "9.0") >= 9.0
    tiles = cfg.num_stages if later else max(cfg.num_stages - 1, 1)
    held = cfg.block_q * (latent + rope + cfg.block_k) * wide
    if narrow < wide:  # the widened tile of a product is in shared memory too
        held += keys * wide
    if later and float(target.capability or "9.0") >= 10.0:  # seen in what Triton 3.9 makes
        held += cfg.block_k * latent * wide
    return held + tiles * keys * narrow


# (keys, warps, stages) by rows, best guess first; not measured. The first of each spills no
# registers on sm_90 with latent vectors of 512, and two programs of 16 rows share a multiprocessor.
# Products of 64 rows overlap, in one stage and in several: see the bounds of `latents.attend`.
_GUESSES = {
    16: ((32, 4, 3), (64, 8, 3), (64, 4, 2), (32, 4, 2), (32, 4, 1), (16, 4, 1)),
    32: ((32, 8, 3), (64, 8, 2), (32, 8, 2), (32, 8, 1), (16, 8, 1)),
    64: ((64, 8, 2), (32, 8, 3), (64, 8, 1), (32, 8, 2), (16, 8, 2), (16, 8, 1)),
}
# pages of 8 bits are widened in registers
_NARROW_GUESSES = {16: ((32, 8, 3), (16, 4, 3), (32, 8, 2), (32, 8, 1), (16, 4, 1))}
# with positions of several tokens, 64 x 64 pairs leave too few registers
_PREFILL = {64: ((32, 8, 3), (32, 8, 2), (16, 8, 2), (16, 8, 1))}
# float32 products run on the ordinary units, from registers
_WIDE_GUESSES = ((16, 8, 1), (32, 8, 1), (16, 4, 1))
_AMD_GUESSES = {16: ((32, 4, 1), (16, 4, 2), (16, 4, 1)), 32: ((16, 8, 1), (32, 4, 1))}


def _most_rows(args: Any, target: Target) -> int:
    if args.q_nope.dtype.itemsize >= 4:
        return 16
    return 32 if _launch.is_amd(target) else 64


def _rows(args: Any, target: Target) -> int:
    """Rows of a tile that holds the heads of a sequence's tokens, if they are spread evenly."""
    tokens, heads, _ = args.q_nope.shape
    mean = cdiv(max(tokens, 1), max(args.block_tables.shape[0], 1))
    return min(max(next_power_of_2(heads * min(mean, 4)), 16), _most_rows(args, target))


def _guesses(args: Any, rows: int, target: Target, prefills: bool) -> list[Config]:
    if args.q_nope.dtype.itemsize >= 4:
        found = _WIDE_GUESSES
    elif _launch.is_amd(target):
        found = _AMD_GUESSES[rows]
    else:
        narrow = args.kv_pages.dtype.itemsize < args.q_nope.dtype.itemsize
        special = _PREFILL if prefills else _NARROW_GUESSES if narrow else {}
        found = special.get(rows, _GUESSES[rows])
    # two programs of 16 rows, or one of 64, run at once on a multiprocessor: two rounds
    filling = (4 if rows < 64 else 2) * (_device.multiprocessors(target.capability) or 132)
    made = [
        Config(block_q=rows, block_k=k, num_warps=warps, num_stages=stages, programs=filling)
        for k, warps, stages in found
    ]
    return list(_launch.fitting(made, lambda cfg: shared_bytes(args, cfg, target), target))


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """What a tuner measures, best guess first."""
    made = _guesses(args, _rows(args, target), target, prefills=False)
    long = _guesses(args, _most_rows(args, target), target, prefills=True)[0]
    own = {
        "prefill_block_q": long.block_q,
        "prefill_block_k": long.block_k,
        "prefill_warps": long.num_warps,
        "prefill_stages": long.num_stages,
    }
    made += [dataclasses.replace(made[0], programs=made[0].programs * n // 2) for n in (1, 4)]
    return tuple(dict.fromkeys(dataclasses.replace(cfg, **own) for cfg in made))


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def misfit(args: Any, direction: str, cfg: Config, target: Target) -> str | None:
    """Why a config of another call cannot serve this one."""
    if cfg in candidates(args, direction, target):
        return None
    needed = max(shared_bytes(args, c, target) for c in (cfg, prefill(cfg)))
    return _launch.misfit(cfg, needed, target)


def testing(args: Any, direction: str) -> Config:
    """Small tiles, and as many splits as there are tiles."""
    return Config(block_q=16, block_k=16, programs=2**20, split_keys=16, num_stages=1)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's own sizes, which hold for all sequences."""
    names = ("prefill_block_q", "prefill_block_k", "prefill_warps", "prefill_stages")
    own = dict.fromkeys(names, 0) if settings else {}
    return _launch.from_params(guess, own | settings, tile=("block_q", "block_k"))
