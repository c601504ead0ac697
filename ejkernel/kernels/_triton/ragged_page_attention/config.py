"""Tiles, splits, warps and stages of ragged attention over pages in Triton."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.callib import next_power_of_2
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._blocks import packed
from ejkernel.kernels._triton.page_attention import config as decoding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_launch.LaunchConfig):
    """Rows (tokens times heads of a key head) and keys of a tile of prefill; and of decoding.

    Sequences whose tokens fit into `decode_rows` are decoded, with the config that the last members
    make.
    """

    block_q: int
    block_k: int
    decode_rows: int = 16
    decode_block_k: int
    decode_warps: int = 4
    decode_stages: int = 2
    programs: int = 1024  # keys are split until there are about so many
    split_keys: int = 256  # the least keys of a part

    def __post_init__(self) -> None:
        _launch.check_blocks(self, "block_q", "block_k", "decode_rows")
        super().__post_init__()
        for_decoding(self)  # checks them


def for_decoding(cfg: Config) -> decoding.Config:
    """The config of sequences that have few tokens."""
    return decoding.Config(
        block_k=cfg.decode_block_k,
        num_warps=cfg.decode_warps,
        num_stages=cfg.decode_stages,
        programs=cfg.programs,
        split_keys=cfg.split_keys,
    )


def sizes(args: Any) -> decoding.Sizes:
    """The sizes of a call."""
    _, heads, d = args.queries.shape
    pages, size, double, _ = args.kv_pages.shape
    reach = args.block_tables.shape[1] * size if pages else 0
    wide, narrow = args.queries.dtype.itemsize, args.kv_pages.dtype.itemsize
    return decoding.Sizes(heads, double // 2, d, d, reach, wide, narrow)


_MOST_DECODE_ROWS = 64


def _decode_rows(args: Any) -> int:
    """Rows for the mean number of tokens of a sequence, if that is small: drafts to be verified."""
    count, (tokens, heads, _) = args.block_tables.shape[0], args.queries.shape
    group = heads // max(args.kv_pages.shape[2] // 2, 1)
    rows = max(next_power_of_2(-(-tokens // max(count, 1)) * group), 16)
    return rows if rows <= _MOST_DECODE_ROWS else 16


def decode_tiles(of: decoding.Sizes, rows: int) -> packed.Tiles:
    """Rows of sequences with few tokens."""
    return packed.tiles(of.heads, of.key_heads, rows, 2**30)


def prefill_tiles(of: decoding.Sizes, cfg: Config) -> packed.Tiles:
    return packed.tiles(of.heads, of.key_heads, cfg.block_q, 2**30)


# (block_q, block_k, warps, stages), best guess first; not measured. Two programs of the first one
# share a multiprocessor of an H200: one computes products while the other computes weights.
_GUESSES = {
    64: ((64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 32, 4, 2)),
    128: ((64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2)),
    256: ((64, 32, 4, 2), (128, 32, 8, 2), (64, 64, 8, 2), (32, 32, 4, 1)),
}
# float32 products run on the ordinary units, from registers
_WIDE_GUESSES = ((32, 32, 4, 2), (64, 32, 4, 2), (16, 16, 4, 1))
_AMD_GUESSES = ((64, 32, 4, 2), (128, 32, 8, 2), (64, 64, 4, 2), (32, 32, 4, 1))


def _guesses(of: decoding.Sizes, target: Target) -> tuple[tuple[int, ...], ...]:
    if of.wide >= 4:
        return _WIDE_GUESSES
    if _launch.is_amd(target):
        return _AMD_GUESSES
    return _GUESSES[64 if of.d <= 64 else 128 if of.d <= 128 else 256]


def shared_bytes(of: decoding.Sizes, cfg: Config, target: Target) -> int:
    """An estimate of the shared memory of a program, of prefill or decoding."""
    rows = prefill_tiles(of, cfg).BLOCK
    prefill = decoding.Config(block_k=cfg.block_k, num_stages=cfg.num_stages)
    few = decode_tiles(of, cfg.decode_rows).BLOCK
    return max(
        decoding.shared_bytes(of, rows, prefill, target),
        decoding.shared_bytes(of, few, for_decoding(cfg), target),
    )


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Each prefill with the best guess of decoding, and the best guess of prefill with each."""
    of, rows = sizes(args), _decode_rows(args)
    few = decoding.decoding(of, decode_tiles(of, rows).BLOCK, target)

    def config(prefill: Sequence[int], decode: decoding.Config) -> Config:
        names = ("block_q", "block_k", "num_warps", "num_stages")
        return Config(
            **dict(zip(names, prefill, strict=True)),
            decode_rows=rows,
            decode_block_k=decode.block_k,
            decode_warps=decode.num_warps,
            decode_stages=decode.num_stages,
            programs=decode.programs,
            split_keys=decode.split_keys,
        )

    fits = lambda cfg: shared_bytes(of, cfg, target)
    made = [config(prefill, few[0]) for prefill in _guesses(of, target)]
    made = _launch.fitting(made, fits, target)
    first = [getattr(made[0], n) for n in ("block_q", "block_k", "num_warps", "num_stages")]
    return tuple(dict.fromkeys([*made, *(config(first, decode) for decode in few[1:])]))


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def misfit(args: Any, direction: str, cfg: Config, target: Target) -> str | None:
    """Why a config of another call cannot serve this one."""
    return _launch.misfit(cfg, shared_bytes(sizes(args), cfg, target), target)


def testing(args: Any, direction: str) -> Config:
    """Small tiles, and as many splits as there are tiles."""
    return Config(
        block_q=16, block_k=16, decode_block_k=16, programs=2**20, split_keys=16, num_stages=1
    )


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's own sizes, which are those of prefill."""
    return _launch.from_params(guess, settings, tile=("block_q", "block_k"))
