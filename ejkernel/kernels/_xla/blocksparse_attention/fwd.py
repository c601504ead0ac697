"""Block-sparse attention forward: online softmax over the listed blocks of each block of queries.

The mask may be traced: a loop follows the list of its row, as many steps as it has blocks, so
rows of different counts cost what they hold. Layout inside: [b, g, r, t, d], r query heads to a
key head.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import multiply
from ejkernel.kernels._xla._blocks import loops, softmax
from ejkernel.kernels._xla._blocks.logits import Tile
from ejkernel.kernels._xla.blocksparse_attention import config
from ejkernel.kernels._xla.blocksparse_attention.blocks import ListedPairs, over
from ejkernel.kernels._xla.flash_attention import formula
from ejkernel.kernels._xla.flash_attention import fwd as dense


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Outputs (out, and lse when asked for) and residuals (lse)."""
    batch, t, num_q_heads, _ = args.query.shape
    width = args.value.shape[-1]
    if 0 in (batch, t, num_q_heads):
        out, lse = dense.nothing(args)
    elif args.key.shape[1] == 0:
        out, lse, _ = formula.nothing(args)
    else:
        blocks = config.blocks(args, cfg)
        pairs = ListedPairs(args, blocks)
        operands = (*_operands(args, pairs), pairs.key_lists())
        chunks = (batch // blocks.b, pairs.groups // blocks.g)

        def rows(chunk: Any) -> tuple[jax.Array, jax.Array]:
            b, g = chunk // chunks[1], chunk % chunks[1]
            return loops.stack(pairs.num_q, lambda i: _row_block(pairs, operands, Tile(b, g, i, 0)))

        # [chunks, nq, bb, gg, r, bq, e] -> [b, T, h, e]
        out, lse = loops.stack(chunks[0] * chunks[1], rows)
        out = out.reshape(*chunks, *out.shape[1:]).transpose(0, 3, 2, 6, 1, 4, 5, 7)
        out = out.reshape(batch, pairs.padded_t, num_q_heads, width)[:, :t]
        lse = lse.reshape(*chunks, *lse.shape[1:]).transpose(0, 3, 1, 4, 5, 2, 6)
        lse = lse.reshape(batch, num_q_heads, pairs.padded_t)[..., :t]
    out = out.astype(args.query.dtype)
    return ((out, lse) if args.return_lse else (out,)), (lse,)


def _operands(args: Any, pairs: ListedPairs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k, v in the kernel's layout."""
    if not pairs.whole:
        return dense.operands_of(args, pairs)
    return pairs.queries(args.query), pairs.keys(args.key), pairs.keys(args.value)


def _row_block(
    pairs: ListedPairs, operands: tuple[jax.Array, ...], first: Tile
) -> tuple[jax.Array, jax.Array]:
    """Output and lse of one block of queries for one block of rows and heads."""
    q, k, v, lists = operands
    q_tile = pairs.q_block(q, first)  # [bb, gg, r, bq, d]

    def step(j: Any, state: softmax.State) -> softmax.State:
        at = first._replace(j=j)
        k_tile, v_tile = pairs.k_block(k, at), pairs.k_block(v, at)
        x = pairs.logits(multiply("bgrtd,bgsd->bgrts", q_tile, k_tile), at, "ts")
        seen = pairs.visible(at, "ts")
        x = x if seen is None else jnp.where(seen, x, -jnp.inf)
        m, weights, alpha = softmax.weigh(state.m, x)
        values = multiply("bgrts,bgse->bgrte", weights.astype(v.dtype), v_tile)
        total = state.l * alpha + weights.sum(axis=-1)
        return softmax.State(m, total, state.acc * alpha[..., None] + values)

    state = softmax.init(q_tile.shape[:-1], v.shape[-1], pairs.dtype)
    state = over(lists, (first.b, first.g, first.i), step, loops.vary_like(state, q))
    return softmax.finish(softmax.add_sinks(state, pairs.head_block(pairs.sinks(), first)))
