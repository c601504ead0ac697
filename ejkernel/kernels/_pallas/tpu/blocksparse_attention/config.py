"""Blocks of block-sparse attention on TPUs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.tpu._blocks import capacity, tiles
from ejkernel.kernels._pallas.tpu.flash_attention import config as dense
from ejkernel.ops.core.kernel import BACKWARD


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(dense.Config):
    """`stream`: listed blocks fetched at once; `parts`: so many pieces they are joined to."""


_SIZES = (512, 256, tiles.LANES)


def sizes(block_size: int) -> tuple[int, int]:
    """Tokens of a kernel's block, and with padding.

    A block of the mask is cut into parts of at most 512 tokens, or padded to whole registers.
    """
    for size in _SIZES:
        if block_size % size == 0:
            return size, size
    return block_size, cdiv(block_size, tiles.LANES) * tiles.LANES


def _with_stream(args: Any, stream: int, parts: int = 1, one_pass: bool = False) -> Config:
    _, padded = sizes(args.block_size)
    return Config(block_q=padded, block_k=padded, stream=stream, parts=parts, one_pass=one_pass)


def vmem_limit(args: Any, cfg: Config) -> int:
    """What to ask of the compiler."""
    size, padded = sizes(args.block_size)
    rows = cdiv(args.query.shape[1], size) * padded if cfg.one_pass else 0
    whole = dataclasses.replace(cfg, one_pass=False)
    return dense.vmem_limit(args, whole) + dense.dq_bytes(args, rows)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """More or fewer blocks at once, as many as fit; at least one."""
    limit = capacity.vmem(target)
    # by the cycles of schedules for v5e, 32768 tokens, d = 128, an eighth of blocks of 128, beside
    # dense attention: 8 blocks in 2 parts 0.20 forward, 0.16 backward; 4 in one 0.27 and 0.18;
    # backward in two passes 0.22
    guesses = ((8, 2), (4, 1), (2, 1), (1, 1))
    made = [_with_stream(args, *guess) for guess in guesses]
    if direction == BACKWARD:
        made = [dataclasses.replace(cfg, one_pass=True) for cfg in made[:2]] + made
    fitting = [cfg for cfg in made if vmem_limit(args, cfg) <= limit]
    return tuple(fitting or made[-1:])


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def misfit(args: Any, direction: str, cfg: Config, target: Target) -> str | None:
    """Why a config of another call has no room here."""
    return dense.dq_misfit(cfg, vmem_limit(args, cfg), target)


def testing(args: Any, direction: str) -> Config:
    """Two blocks at once, so that lists of tests have whole and partial steps."""
    return _with_stream(args, 2, one_pass=direction == BACKWARD)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess; the mask decides the blocks, and warps and stages mean nothing to a TPU."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    for name in ("block_q", "block_k"):
        if mine.pop(name, None) not in (None, getattr(guess, name)):
            raise ValueError(
                f"`blocksparse_attention`: `{name}` on TPUs follows the `block_size` of the mask, "
                f"{getattr(guess, name)}; got {settings[name]}. Leave it None."
            )
    return dataclasses.replace(guess, **mine)
