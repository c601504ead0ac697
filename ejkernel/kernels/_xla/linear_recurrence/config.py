"""How the linear recurrence runs on XLA: chunk sizes, and token by token or not."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._shared import config_checks
from ejkernel.kernels._specs.linear_recurrence import num_heads
from ejkernel.ops.core.kernel import FORWARD


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tokens in a chunk, chunks at once; `recurrent`: one token at a time, one chunk at once."""

    block_t: int = 64
    block_n: int = 1
    recurrent: bool = False

    def __post_init__(self) -> None:
        config_checks.positive(self, "block_t", "block_n")


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """A few tokens one by one; on a CPU one chunk at a time, elsewhere many to fill the device.

    One by one against chunks of 64, milliseconds forward and backward, float32, 2 busy cores of an
    AMD EPYC, JAX 0.10.2. With a gate for each element (gla, 4 heads, d=e=64): t=4 0.05, 0.14
    against 0.06, 0.17; t=16 0.12, 0.44 against 0.06, 0.24; t=4096 12, 92 against 20, 46; with
    d=e=128 and t=1024 52, 576 against 40, 45. With one for a head (lightning): t=1 of 8 rows of 8
    heads 0.09, 0.27 against 0.21, 0.31; t=4 0.06, 0.13 against 0.04, 0.09; t=4096 12, 75 against
    11, 26.
    """
    t, d, e = args.query.shape[1], args.query.shape[-1], args.value.shape[-1]
    by_element = args.gk is not None or args.gv is not None
    if t <= (4 if by_element else 1):
        return Config(recurrent=True)
    if target.kind != "cpu":
        return Config(block_n=_at_once(args, direction))
    if by_element and direction == FORWARD and t >= 64 and d * e <= 64 * 64:
        # a row in one piece: 47 against 58 ms in pieces of 64; packed, a piece holds one sequence
        return Config(recurrent=True, block_t=t if args.cu_seqlens is None else 64)
    return Config()


def _at_once(args: Any, direction: str) -> int:
    """Chunks that fill a device; more of them as far as they take half as much as the inputs.

    Not measured on a device. XLA reports these temporaries for a CPU, with 4 rows of 4096 tokens of
    16 heads of 128 in bfloat16 and gates of elements: 64 chunks at once 1.5 GiB forward and 4.1
    backward, the numbers chosen here 0.7 and 1.1.
    """
    batch, t, _, d = args.query.shape
    heads, e = num_heads(args), args.value.shape[-1]
    inputs = max(4 * batch * t * heads * (2 * d + 2 * e), 256 << 20)
    count = 1
    while count < 64 and 2 * count * 64 <= t:
        cfg = Config(block_n=2 * count)
        inside = memory(args, direction, cfg) - _states(args, direction, cfg)
        fills = count * batch * heads >= 128  # products, one to a multiprocessor
        if fills and inside > inputs // 2:
            break
        count *= 2
    return count


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """The heuristic's neighbours; a tuner measures them."""
    guess = heuristic(args, direction, target)
    at_once = 1 if target.kind == "cpu" else guess.block_n
    made = [Config(block_t=t, block_n=at_once) for t in (64, 128, 32)]
    return tuple(dict.fromkeys([guess, made[0], Config(recurrent=True), *made[1:]]))


def memory(args: Any, direction: str, cfg: Config) -> int:
    """Bytes of the states between chunks and of the pairs of the chunks at once."""
    batch, _, _, d = args.query.shape
    heads, e = num_heads(args), args.value.shape[-1]
    size = chunk_size(args, cfg)
    if cfg.recurrent:
        inside = 0 if direction == FORWARD else size * d * e
    else:
        inside = cfg.block_n * (size * (size + 16 * max(d, e)) + 4 * d * e)
    inside *= 4 * batch * heads * (1 if direction == FORWARD else 3)
    return _states(args, direction, cfg) + inside


def _states(args: Any, direction: str, cfg: Config) -> int:
    """Bytes of the states between chunks, which backward keeps."""
    batch, t, _, d = args.query.shape
    count = 0 if direction == FORWARD else -(-t // chunk_size(args, cfg))
    return 4 * batch * num_heads(args) * count * d * args.value.shape[-1]


def testing(args: Any, direction: str) -> Config:
    """A config that cuts the small shapes of tests into several chunks of several halves."""
    return Config(block_t=8, block_n=2)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's sizes; `block_q` of the portable spelling is the chunk."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    if "block_q" in settings:
        mine["block_t"] = settings["block_q"]
    return dataclasses.replace(guess, **mine)


def chunk_size(args: Any, cfg: Config) -> int:
    """Tokens in a chunk that a call can use: a power of two where halves meet."""
    if cfg.recurrent:
        return max(min(cfg.block_t, args.query.shape[1]), 1)
    size = 1
    while 2 * size <= cfg.block_t and size < args.query.shape[1]:
        size *= 2
    return size
