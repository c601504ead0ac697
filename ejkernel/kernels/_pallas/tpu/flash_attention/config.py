"""Block sizes of attention on TPUs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel._device import Target
from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.tpu._blocks import capacity
from ejkernel.kernels._shared import config_checks
from ejkernel.ops.core.kernel import BACKWARD, FORWARD

_LANES = 128
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Queries and keys in a tile, and how a core works on them.

    Backward for dk and dv holds `block_k` keys and streams `block_q` queries; backward for dq has
    the two sizes exchanged. With `one_pass`, the pass over keys makes dq too, the sums of all
    queries of a key head in VMEM.
    """

    block_q: int
    block_k: int
    parts: int = 1  # of the held block, worked on side by side
    stream: int = 4  # blocks of the streamed side that are fetched at once
    overlap: bool = False  # parts are one stage behind each other, not one after the other
    one_pass: bool = False

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 8 or value % 8:
                raise ValueError(f"`Config`: {name}={value!r} must be a multiple of 8.")
        config_checks.positive(self, "parts", "stream")
        for name in ("block_q", "block_k"):
            if getattr(self, name) % (8 * self.parts):
                raise ValueError(f"`Config`: parts={self.parts} must cut {name} into eights.")


def vmem_bytes(args: Any, cfg: Config, holds_keys: bool = False) -> int:
    """An estimate of the VMEM of a program: twice what is fetched, and its tiles in float32."""
    size = jnp.dtype(args.query.dtype).itemsize
    d, e = (cdiv(x.shape[-1], _LANES) * _LANES for x in (args.query, args.value))
    held, step = (cfg.block_k, cfg.block_q) if holds_keys else (cfg.block_q, cfg.block_k)
    length = args.query.shape[1] if holds_keys else args.key.shape[1]
    fetched = step * min(cfg.stream, cdiv(length, step))
    blocks = 2 * size * (held + fetched) * (d + e)
    state = 4 * held * (2 * (d + e) + 6 * _LANES)
    for pair in (args.bias, args.attention_mask):
        if pair is not None and pair.shape[2] > 1:
            blocks += 2 * 4 * held * fetched
    return blocks + state + 4 * 4 * held * step // cfg.parts


def vmem_limit(args: Any, cfg: Config) -> int:
    """What to ask of the compiler."""
    needed = max(vmem_bytes(args, cfg, holds_keys) for holds_keys in (False, True))
    rows = cdiv(args.query.shape[1], cfg.block_q) * cfg.block_q if cfg.one_pass else 0
    return max(16 * _MIB, 2 * needed) + dq_bytes(args, rows)


def dq_bytes(args: Any, rows: int) -> int:
    """VMEM for dq of so many queries of each head: sums of a key head, and what is copied out."""
    _, _, heads, d = args.query.shape
    size = jnp.dtype(args.query.dtype).itemsize
    lanes = cdiv(d, _LANES) * _LANES
    return rows * (4 * d * heads // args.key.shape[2] + size * lanes)


# (block_q, block_k, parts, stream), best first by the cycles of the compiled schedule, for 8 heads
# of 4096 tokens and d = 128 in bfloat16, with and without a mask (benchmarks/tpu_static.py).
_SMALL = ((512, 512, 1, 8), (256, 512, 1, 4), (256, 256, 1, 4), (128, 128, 1, 1))
_GUESSES = {
    (FORWARD, "v5"): ((1024, 1024, 4, 4), (512, 1024, 2, 4), (512, 512, 1, 8)),
    (FORWARD, ""): (
        (2048, 1024, 4, 4),
        (2048, 2048, 4, 2),
        (1024, 1024, 1, 4),
        (512, 1024, 1, 4),
    ),
    (BACKWARD, "v5"): ((512, 512, 1, 4), (512, 512, 2, 4), (512, 1024, 2, 4)),
    (BACKWARD, ""): ((1024, 1024, 2, 2), (512, 1024, 1, 4), (512, 512, 1, 4)),
}
# A window ends in blocks that are partly hidden: larger ones cost two passes more than they save.
_BACKWARD_NEAR = ((512, 512, 1, 4),)
# Best on v5e and v6e, with and without a mask or a window.
_ONE_PASS = ((1024, 1024, 2, 2), (512, 1024, 1, 4), (512, 512, 1, 4))


# Arrays that do not tell which tokens belong together: without others, one table serves all rows.
_NO_IDS = frozenset({
    "query", "key", "value", "bias", "attention_mask", "alibi_slopes", "softmax_aux",
    "dropout_seed", "dropout_offset",
})  # fmt: skip


def table_numbers(args: Any) -> int:
    """The most numbers in scalar memory, with the smallest blocks that are guessed."""
    batch, t, heads, _ = args.query.shape
    rows = cdiv(max(t, args.key.shape[1]), _SMALL[-1][0])
    per_row = 4 * batch if args.arrays().keys() - _NO_IDS else 8  # bounds, or bounds and bands
    return per_row * rows + 2 * heads  # sinks and slopes


def _guesses(args: Any, direction: str, target: Target) -> Sequence[tuple[int, ...]]:
    if direction == BACKWARD and args.sliding_window != (None, None):
        return _BACKWARD_NEAR
    model = target.model.lower()
    return next(g for (way, name), g in _GUESSES.items() if way == direction and name in model)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Guesses that fit the device and the lengths; at least the smallest one."""
    limit, model = capacity.vmem(target), target.model.lower()
    # by the schedules of forward: v6e 329 k cycles with 4 parts that overlap, 335 k with one part;
    # v5e 584 k with 4 parts that overlap, 545 k with 4 one after the other
    overlap = direction == FORWARD and "v5" not in model
    guesses = (*_guesses(args, direction, target), *_SMALL)
    made = [_guess(args, guess, overlap=overlap) for guess in guesses]
    # two cores of a chip share the heads of keys
    alone = "lite" in model or args.key.shape[0] * args.key.shape[2] > 1
    if direction == BACKWARD and alone:
        made = [_guess(args, guess, one_pass=True) for guess in _ONE_PASS] + made
    fitting = [cfg for cfg in made if vmem_limit(args, cfg) <= limit]
    return tuple(dict.fromkeys(fitting or made[-1:]))


def _guess(args: Any, guess: tuple[int, ...], **options: bool) -> Config:
    block_q, block_k, parts, stream = guess
    cfg = Config(block_q=block_q, block_k=block_k, parts=parts, stream=stream, **options)
    return _short(args, cfg)


def _short(args: Any, cfg: Config) -> Config:
    """Blocks no longer than the call, in whole registers; little fetched at once of pairs."""
    whole = lambda length: max(cdiv(length, _LANES), 1) * _LANES
    wide = any(x is not None and x.shape[2] > 1 for x in (args.bias, args.attention_mask))
    return dataclasses.replace(
        cfg,
        block_q=min(cfg.block_q, whole(args.query.shape[1])),
        block_k=min(cfg.block_k, whole(args.key.shape[1])),
        stream=1 if wide else cfg.stream,
        parts=1 if min(args.query.shape[1], args.key.shape[1]) < cfg.block_q else cfg.parts,
    )


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def misfit(args: Any, direction: str, cfg: Config, target: Target) -> str | None:
    """Why a config of another call has no room here."""
    return dq_misfit(cfg, vmem_limit(args, cfg), target)


def dq_misfit(cfg: Config, needed: int, target: Target) -> str | None:
    """Why there is no room for dq; how long sequences are matters to nothing else."""
    limit = capacity.vmem(target)
    if cfg.one_pass and needed > limit:
        return f"dq of all queries of a key head takes {needed} bytes of VMEM, more than {limit}"
    return None


def testing(args: Any, direction: str) -> Config:
    """Small blocks that cut the shapes of tests, two of them to a fetch."""
    if direction == FORWARD:
        return Config(block_q=32, block_k=24, stream=2)
    return Config(block_q=24, block_k=32, stream=2, one_pass=True)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's block sizes; warps and stages mean nothing to a TPU."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    return dataclasses.replace(guess, **mine)


def exchanged(cfg: Config) -> Config:
    """The config of backward over queries from that over keys."""
    return dataclasses.replace(cfg, block_q=cfg.block_k, block_k=cfg.block_q)
