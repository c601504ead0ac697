"""Chunks, blocks, warps and stages of the linear recurrence in Triton."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ejkernel._device import Target
from ejkernel.callib import cdiv, next_power_of_2
from ejkernel.kernels._specs.linear_recurrence import num_heads
from ejkernel.kernels._triton import _launch
from ejkernel.ops.core.kernel import BACKWARD, FORWARD

# so many tokens are taken one by one: the state is then read and written once
FEW_TOKENS = 16
_MOST_SEGMENTS = 64  # a program reads what each segment before its own has left


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_launch.LaunchConfig):
    """Tokens in a chunk, and elements of queries and keys that a program passes at once.

    Outputs and values have `block_e` columns to a program. Launches for scores (`score_d`) and for
    gradients of values (`value_d`) pass other numbers of elements at once. The launch that carries
    states has blocks of `state_d` x `state_e` to a program, and warps and stages of its own.
    Of forward alone, `recurrent`: one token at a time, with `state_e` columns of the state to a
    program; `segments`: outputs are computed while states are carried, in so many parts of a row,
    or states are stored if it is 0.
    """

    block_t: int = 64
    block_d: int = 64
    block_e: int = 128
    score_d: int = 64
    value_d: int = 64
    state_d: int = 64
    state_e: int = 64
    state_warps: int = 4
    state_stages: int = 2
    recurrent: bool = False
    segments: int = 0

    def __post_init__(self) -> None:
        names = ("block_t", "block_d", "block_e", "score_d", "value_d", "state_d", "state_e")
        _launch.check_blocks(self, *names)
        super().__post_init__()
        self._of_states()  # checks them
        if not isinstance(self.segments, int) or not 0 <= self.segments <= _MOST_SEGMENTS:
            raise ValueError(
                f"`Config`: segments={self.segments!r} must be in [0, {_MOST_SEGMENTS}]."
            )

    def _of_states(self) -> _launch.LaunchConfig:
        return _launch.LaunchConfig(num_warps=self.state_warps, num_stages=self.state_stages)

    def launch_scores(self) -> dict[str, Any]:
        """Options of the launch that computes scores, which has nothing to fetch ahead."""
        return _launch.LaunchConfig(num_warps=self.num_warps, num_stages=1).launch()

    def launch_values(self) -> dict[str, Any]:
        """Options of the launch that computes gradients of values."""
        return _launch.LaunchConfig(num_warps=self.num_warps, num_stages=2).launch()

    def launch_states(self) -> dict[str, Any]:
        """Options of the launch that carries states."""
        return self._of_states().launch()


def _width(size: int) -> int:
    return max(next_power_of_2(size), 16)


def shared_bytes(args: Any, direction: str, cfg: Config) -> int:
    """An estimate of the shared memory of a program: factors of products, and what is fetched."""
    if cfg.recurrent:
        return 0
    size = jnp.dtype(args.query.dtype).itemsize
    wide = 2 if args.query.dtype == jnp.bfloat16 else 4  # states, and what is multiplied by them
    gate = 0 if args.gk is None else args.gk.dtype.itemsize
    c, e = cfg.block_t, min(cfg.block_e, _width(args.value.shape[-1]))
    if cfg.segments and direction == FORWARD:
        d = _width(args.query.shape[-1])
        return cfg.num_stages * c * (2 * d + e) * size + (c + d) * e * wide
    most = [
        cfg.state_stages * c * (cfg.state_d * (size + gate) + cfg.state_e * size),
        c * (3 * cfg.score_d + c) * size,
    ]
    for d, stages in ((cfg.block_d, cfg.num_stages), (cfg.value_d, 2)):
        fetched = 2 * c * d * size + d * e * wide
        most.append(stages * fetched + c * (e + c) * size)
    if direction != FORWARD:  # gradients of queries and keys pass as many columns as elements
        d = cfg.block_d
        fetched = 2 * d * (c + d) * wide
        most.append(cfg.num_stages * fetched + c * (3 * d + 2 * c) * size)
    return max(most)


_NAMES = (
    *("block_t", "block_d", "score_d", "value_d", "num_warps", "num_stages"),
    *("state_d", "state_e", "state_warps", "state_stages"),
)
# Best first, as measured on an H200 with 16384 tokens and head sizes of 128 and 64. Gates of
# elements need a product for each level of blocks in a chunk, one gate for a head needs none: its
# chunks may be longer, with fewer states to store. Two warps have the 32 rows of a short chunk.
_GUESSES = {
    (FORWARD, True): (
        (32, 64, 64, 64, 2, 3, 32, 64, 2, 4),
        (32, 128, 128, 64, 2, 2, 32, 64, 4, 3),
        (32, 64, 64, 64, 2, 2, 64, 64, 4, 3),
        (64, 64, 128, 64, 4, 2, 64, 64, 4, 3),
        (32, 64, 64, 64, 4, 2, 64, 64, 4, 3),
        (32, 32, 32, 32, 4, 1, 32, 32, 4, 2),
    ),
    (FORWARD, False): (
        (128, 64, 64, 64, 8, 2, 64, 128, 8, 3),
        (128, 64, 64, 64, 8, 2, 32, 64, 4, 3),
        (64, 64, 64, 64, 4, 2, 32, 64, 4, 4),
        (64, 64, 64, 64, 4, 2, 64, 64, 4, 3),
        (32, 32, 32, 32, 4, 1, 32, 32, 4, 2),
    ),
    (BACKWARD, True): (
        (32, 64, 64, 64, 2, 2, 64, 128, 4, 3),
        (32, 64, 64, 128, 4, 2, 32, 64, 4, 3),
        (32, 64, 64, 64, 2, 2, 64, 64, 4, 3),
        (32, 64, 128, 64, 4, 2, 64, 128, 8, 3),
        (32, 32, 32, 32, 4, 1, 64, 32, 4, 2),
        (16, 16, 16, 16, 4, 1, 32, 32, 4, 1),
    ),
    (BACKWARD, False): (
        (64, 64, 64, 64, 4, 1, 64, 64, 4, 4),
        (64, 64, 64, 64, 4, 2, 64, 64, 4, 3),
        (128, 64, 64, 64, 8, 2, 64, 64, 4, 3),
        (32, 32, 32, 32, 4, 1, 64, 32, 4, 2),
        (16, 16, 16, 16, 4, 1, 32, 32, 4, 1),
    ),
}
# float32 products run on the ordinary units, from registers
_WIDE_GUESSES = (
    (32, 32, 32, 32, 4, 1, 32, 32, 4, 1),
    (16, 32, 32, 32, 4, 1, 32, 32, 4, 1),
    (16, 16, 16, 16, 4, 1, 16, 16, 4, 1),
)
# Chunk, columns, warps, stages and least segments of one pass. The first one was the fastest of all
# on an H200. A program of 4 warps holds a state of 128 x 64 in half of its registers.
_ONE_PASS_NAMES = ("block_t", "block_e", "num_warps", "num_stages", "segments")
_ONE_PASS = ((64, 64, 4, 3, 1), (128, 64, 8, 2, 1))
_STEPS = (32, 16, 64)  # columns of a state to a program that takes tokens one by one
_PROGRAMS = 128  # of states, about one for each multiprocessor of a large GPU


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """Guesses that fit the device and the sizes; at least the smallest one."""
    if direction == FORWARD and args.query.shape[1] <= FEW_TOKENS:
        found = [Config(recurrent=True, state_e=e, state_stages=1) for e in _STEPS]
        return tuple(dict.fromkeys(_short(args, cfg) for cfg in found))
    if jnp.dtype(args.query.dtype).itemsize == 4:
        rows = _WIDE_GUESSES
    else:
        rows = _GUESSES[direction, args.gk is not None]
    guesses = [Config(**dict(zip(_NAMES, row, strict=True))) for row in rows]
    if rows is _GUESSES[FORWARD, False]:
        one_pass = [Config(**dict(zip(_ONE_PASS_NAMES, row, strict=True))) for row in _ONE_PASS]
        guesses = [*one_pass, *guesses]
    if _launch.is_amd(target):  # a stage on its way is in registers there
        guesses = [dataclasses.replace(c, state_stages=min(c.state_stages, 2)) for c in guesses]
    fits = _launch.fitting(guesses, lambda c: shared_bytes(args, direction, c), target)
    return tuple(dict.fromkeys(_short(args, cfg) for cfg in fits))


def _short(args: Any, cfg: Config) -> Config:
    """Blocks no larger than the call, and of states enough of them to fill a device."""
    t, d, e = args.query.shape[1], _width(args.query.shape[-1]), _width(args.value.shape[-1])
    rows = args.query.shape[0] if args.cu_seqlens is None else args.cu_seqlens.shape[0] - 1
    state_d, state_e = min(cfg.state_d, d), min(cfg.state_e, e)
    programs = rows * num_heads(args)
    few = lambda: programs * (d // state_d) * (e // state_e) < _PROGRAMS
    while not cfg.recurrent and few() and max(state_d, state_e) > 32:
        if state_d >= state_e:
            state_d //= 2
        else:
            state_e //= 2
    block_t, block_e = min(cfg.block_t, _width(t)), min(cfg.block_e, e)
    segments, most = cfg.segments, min(cdiv(t, block_t), _MOST_SEGMENTS)
    while segments and programs * (e // block_e) * segments < _PROGRAMS and 2 * segments <= most:
        segments *= 2
    return dataclasses.replace(
        cfg,
        block_t=block_t,
        block_d=min(cfg.block_d, d),
        block_e=block_e,
        segments=min(segments, most),
        score_d=min(cfg.score_d, d),
        value_d=min(cfg.value_d, d),
        state_d=state_d,
        state_e=state_e,
    )


def misfit(args: Any, direction: str, cfg: Config, target: Target) -> str | None:
    """Why a config of another call cannot serve this one."""
    if cfg in candidates(args, direction, target):
        return None
    if cfg.segments and direction != FORWARD:
        return "`segments` are for forward"
    needed = shared_bytes(args, direction, cfg)
    if reason := no_segments(args, cfg) or _launch.misfit(cfg, needed, target):
        return reason
    states = lambda c: (c.state_d, c.state_e, c.segments)
    if states(_short(args, cfg)) != states(cfg):
        return "has blocks of states that this call does not fill, or too few programs of them"
    return None


def no_segments(args: Any, cfg: Config) -> str | None:
    """Why forward cannot be one pass as a config asks."""
    if cfg.segments and args.gk is not None:
        return "`segments` need one gate a head: scores with gates of elements (`gk`) come before"
    return None


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The first guess that fits."""
    return candidates(args, direction, target)[0]


def testing(args: Any, direction: str) -> Config:
    """The smallest chunks and blocks, which cut the shapes of tests."""
    names = ("block_t", "block_d", "block_e", "score_d", "value_d", "state_d", "state_e")
    return Config(**dict.fromkeys(names, 16), num_warps=4, num_stages=1, state_stages=1)


def from_params(guess: Config, settings: dict[str, Any]) -> Config:
    """The guess with the caller's sizes; `block_q` is the chunk, and `block_k` means nothing."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    if "block_q" in settings:
        mine |= {"block_t": settings["block_q"], "recurrent": False}
    elif guess.recurrent:  # its one launch is that of the states
        for own, name in (("state_warps", "num_warps"), ("state_stages", "num_stages")):
            mine |= {own: settings[name]} if name in settings else {}
    return dataclasses.replace(guess, **mine)
