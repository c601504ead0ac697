"""Attention forward in blocks with online softmax (Dao, 2023), in plain JAX.

For each block of queries, only the blocks of keys that its masks can reach are visited; memory is
one tile of logits. Layout inside: [b, g, r, t, d], r query heads to a key head.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import finite, multiply, wide
from ejkernel.kernels._xla._blocks import loops, softmax
from ejkernel.kernels._xla._blocks.logits import Pairs, Tile
from ejkernel.kernels._xla.flash_attention import config


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Outputs (out, and lse when asked for) and residuals (lse)."""
    batch, t, num_q_heads, _ = args.query.shape
    width = args.value.shape[-1]
    if 0 in (batch, t, num_q_heads):
        out, lse = nothing(args)
    else:
        blocks = config.blocks(args, cfg)
        pairs = Pairs(args, blocks)
        q, k, v = operands_of(args, pairs)
        sinks = pairs.sinks()
        chunks = (batch // blocks.b, pairs.groups // blocks.g)

        def rows(chunk: Any) -> tuple[jax.Array, jax.Array]:
            b, g = chunk // chunks[1], chunk % chunks[1]
            return loops.stack(pairs.num_q, lambda i: _row_block(pairs, q, k, v, sinks, b, g, i))

        # [chunks, nq, bb, gg, r, bq, e] -> [b, T, h, e]
        out, lse = loops.stack(chunks[0] * chunks[1], rows)
        out = out.reshape(*chunks, *out.shape[1:]).transpose(0, 3, 2, 6, 1, 4, 5, 7)
        out = out.reshape(batch, pairs.padded_t, num_q_heads, width)[:, :t]
        lse = lse.reshape(*chunks, *lse.shape[1:]).transpose(0, 3, 1, 4, 5, 2, 6)
        lse = lse.reshape(batch, num_q_heads, pairs.padded_t)[..., :t]
    out = out.astype(args.query.dtype)
    return ((out, lse) if args.return_lse else (out,)), (lse,)


def operands_of(args: Any, pairs: Pairs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k, v in the kernel's layout; a value that is not finite marks its key, not its matrix."""
    spoiled = ~jnp.isfinite(args.value).all(axis=-1, keepdims=True)
    key = jnp.where(spoiled, jnp.nan, args.key)
    return pairs.queries(args.query), pairs.keys(key), pairs.keys(finite(args.value))


def _row_block(pairs, q, k, v, sinks, b, g, i) -> tuple[jax.Array, jax.Array]:
    """Output and lse of one block of queries for one block of rows and heads."""
    first = Tile(b, g, i, 0)
    q_tile = pairs.q_block(q, first)  # [bb, gg, r, bq, d]

    def step(j: Any, state: softmax.State) -> softmax.State:
        at = Tile(b, g, i, j)
        k_tile, v_tile = pairs.k_block(k, at), pairs.k_block(v, at)
        x = pairs.logits(multiply("bgrtd,bgsd->bgrts", q_tile, k_tile), at, "ts")
        seen = pairs.visible(at, "ts")
        x = x if seen is None else jnp.where(seen, x, -jnp.inf)
        m, weights, alpha = softmax.weigh(state.m, x)
        total = state.l * alpha + weights.sum(axis=-1)
        drop = pairs.dropout(at, "ts")
        weights = weights if drop is None else weights * drop
        values = multiply("bgrts,bgse->bgrte", weights.astype(v.dtype), v_tile)
        return softmax.State(m, total, state.acc * alpha[..., None] + values)

    state = softmax.init(q_tile.shape[:-1], v.shape[-1], pairs.dtype)
    lower, upper = pairs.key_bounds(b, i) if pairs.num_k else (0, 0)
    state = loops.fori(lower, upper, step, loops.vary_like(state, q))
    return softmax.finish(softmax.add_sinks(state, pairs.head_block(sinks, first)))


def nothing(args: Any) -> tuple[jax.Array, jax.Array]:
    """The output of a call without a query."""
    batch, t, num_q_heads, _ = args.query.shape
    out = jnp.zeros((batch, t, num_q_heads, args.value.shape[-1]), args.query.dtype)
    lse = jnp.zeros((batch, num_q_heads, t), wide(args.query.dtype))
    return loops.vary_like(out, args.query), loops.vary_like(lse, args.query)
