"""Block-sparse attention as flash attention's launches, whose programs follow lists."""

from typing import Any

import jax

from ejkernel.kernels._triton._blocks import block_ranges
from ejkernel.kernels._triton.blocksparse_attention import config, lists
from ejkernel.kernels._triton.flash_attention import bwd, fwd
from ejkernel.kernels._triton.flash_attention import call as flash


class Call(flash.Call):
    """One call; its schedules are the lists of its mask's rows or columns."""

    def __init__(self, args: Any, cfg: config.Config):
        config.check(args, cfg)
        super().__init__(args, cfg)
        # a list visits all tiles of a block of the mask, also those behind the last token
        self.cut_queries = bool(self.tokens.num_q % args.block_size)
        self.cut_keys = bool(self.tokens.num_k % args.block_size)
        self.cut = self.cut_queries or self.cut_keys
        self.masks = self.masks or self.cut

    def key_schedule(self) -> block_ranges.Schedule:
        turns = self.interleaved(self.args.query.shape[2])
        return block_ranges.Schedule(None, None, turns, lists.of_keys(self.args))

    def query_schedule(self) -> block_ranges.Schedule:
        turns = self.interleaved(self.args.key.shape[2])
        return block_ranges.Schedule(None, None, turns, lists.of_queries(self.args))

    def cost(self, products: float) -> None:
        """The mask decides."""
        return None


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Outputs (out, and lse when asked for) and residuals (lse)."""
    return fwd.forward(args, cfg, Call)


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    return bwd.backward(args, cfg, outputs, residuals, cotangents, wanted, Call)
