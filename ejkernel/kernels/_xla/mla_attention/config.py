"""Form and block sizes of latent attention on XLA."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._shared import config_checks
from ejkernel.kernels._xla._blocks.logits import Blocks
from ejkernel.kernels._xla.flash_attention import config as flash
from ejkernel.ops.core.kernel import FORWARD


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Queries, keys, batch rows and key heads in one tile, and whether projections are absorbed."""

    block_q: int
    block_k: int
    block_b: int = 1
    block_h: int = 1
    absorb: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.absorb, bool):
            raise ValueError(f"`Config`: absorb={self.absorb!r} must be a bool.")
        config_checks.positive(self, "block_q", "block_k", "block_b", "block_h")


def work(args: Any, direction: str, absorb: bool) -> float:
    """Multiplications of a form: those of the up-projections and those of the pairs."""
    batch, t, num_q_heads, nope = args.query.shape
    s, latent = args.key_value.shape[1:]
    num_kv_heads, width = args.w_vc.shape[1:]
    rope = 0 if args.b_k is None else args.b_k.shape[-1]
    reach = s - min(t, s) / 2 if args.causal else s  # keys that a query sees, on average
    left, right = args.sliding_window
    if left is not None and right is not None:
        reach = min(reach, left + right + 1)
    rows = t * num_q_heads if absorb else s * num_kv_heads
    key, value = (latent, latent) if absorb else (nope, width)
    forward = direction == FORWARD
    # backward makes a product three times over, and once more the context of an absorbed form
    pair = key + rope + value if forward else 3 * (key + rope) + (3 if absorb else 2) * value
    projections = rows * latent * (nope + width) * (1 if forward else 3)
    return batch * (projections + t * reach * num_q_heads * pair)


def _sized(args: Any, direction: str, absorb: bool, most: tuple[int, int], tile: int) -> Config:
    """As many heads, then batch rows, as a tile holds; an absorbed tile holds all query heads."""
    batch, t, num_q_heads, _ = args.query.shape
    s, num_kv_heads = args.key_value.shape[1], args.w_kc.shape[1]
    block_q, block_k = flash.even(t, most[0]), flash.even(s, most[1])
    groups = 1 if absorb else num_kv_heads
    repeat = max(num_q_heads // groups, 1)
    if absorb:
        block_q = min(block_q, max(tile // (block_k * repeat), 16))
    one = block_q * block_k * repeat
    block_h = flash.divisor(groups, tile // one)
    block_b = flash.divisor(batch, tile // (one * block_h)) if block_h == groups else 1
    return Config(block_q=block_q, block_k=block_k, block_b=block_b, block_h=block_h, absorb=absorb)


def heuristic(args: Any, direction: str, target: Target) -> Config:
    """The form with less work, in the tiles of `flash_attention`."""
    # With 2048 keys, 8 heads of 64, rope 32 and a latent of 256 in float32, on 2 cores of an AMD
    # EPYC, absorbed is faster up to 32 queries and slower from 128; `work` turns at about 80.
    absorb = work(args, direction, True) < work(args, direction, False)
    cpu = target.kind == "cpu"
    most = (512, 256) if direction == FORWARD else (256, 512)
    tile = flash.CPU_TILE[direction] if cpu else flash.WIDE_TILE
    return _sized(args, direction, absorb, most if cpu else (1024, 1024), tile)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    """The heuristic, the other form, and neighbours of the heuristic; a tuner measures them."""
    guess = heuristic(args, direction, target)
    tile = flash.CPU_TILE[direction] if target.kind == "cpu" else flash.WIDE_TILE
    sizes = ((512, 256), (256, 512), (512, 512), (128, 128), (1024, 1024), (2048, 2048))
    made = [_sized(args, direction, guess.absorb, most, tile) for most in sizes]
    other = _sized(args, direction, not guess.absorb, (guess.block_q, guess.block_k), tile)
    return tuple(dict.fromkeys([guess, other, *made]))


def memory(args: Any, direction: str, cfg: Config) -> int:
    """Bytes of the tiles alive at once, and of the keys and values of a block."""
    size = blocks(args, cfg)
    num_kv_heads = 1 if cfg.absorb else args.w_kc.shape[1]
    repeat = args.query.shape[2] // max(num_kv_heads, 1)
    tiles = 2 if direction == FORWARD else 4
    latent, _, nope = args.w_kc.shape
    width = latent if cfg.absorb else nope + args.w_vc.shape[-1]
    return 4 * size.b * size.g * size.k * (tiles * repeat * size.q + tiles * width)


def testing(args: Any, direction: str) -> Config:
    """A config that cuts the small shapes of tests into blocks; one key head is absorbed."""
    return Config(block_q=16, block_k=12, absorb=args.w_kc.shape[1] == 1)


def from_params(guess: Config, settings: dict[str, int]) -> Config:
    """The guess with the caller's block sizes; warps and stages mean nothing to XLA."""
    mine = {name: value for name, value in settings.items() if hasattr(guess, name)}
    return dataclasses.replace(guess, **mine)


def blocks(args: Any, cfg: Config) -> Blocks:
    """The block sizes that a call can use: within its lengths, dividing its rows and heads."""
    batch, t = args.query.shape[:2]
    groups = 1 if cfg.absorb else args.w_kc.shape[1]
    size_k = min(cfg.block_k, max(args.key_value.shape[1], 1))
    if args.dropout_prob:
        size_k = -(-size_k // 4) * 4  # one random counter serves four keys
    return Blocks(
        b=flash.divisor(batch, cfg.block_b),
        g=flash.divisor(groups, cfg.block_h),
        q=min(cfg.block_q, max(t, 1)),
        k=size_k,
    )
