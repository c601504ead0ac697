"""Latent attention forward: blocks of keys, made once each, visit the queries that see them.

The online softmax of all queries of a chunk of rows and heads is the state of the loop.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import wide
from ejkernel.kernels._xla._blocks import loops, softmax
from ejkernel.kernels._xla._blocks.logits import Tile
from ejkernel.kernels._xla.mla_attention import config
from ejkernel.kernels._xla.mla_attention.forms import Form, Keys


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Outputs (out, and lse when asked for) and residuals (lse)."""
    batch, t, num_q_heads, _ = args.query.shape
    if 0 in (batch, t, num_q_heads):
        out = jnp.zeros((batch, t, num_q_heads, args.w_vc.shape[-1]), args.query.dtype)
        lse = jnp.zeros((batch, num_q_heads, t), wide(args.query.dtype))
        out, lse = loops.vary_like((out, lse), args.query)
    else:
        out, lse = _attend(Form(args, cfg))
    return ((out, lse) if args.return_lse else (out,)), (lse,)


def _attend(form: Form) -> tuple[jax.Array, jax.Array]:
    """Output [b, t, h, e] and lse [b, h, t]."""
    pairs, dtype = form.pairs, form.args.query.dtype
    q, sinks = form.queries(), pairs.sinks()

    def chunk(index: Any) -> tuple[jax.Array, jax.Array]:
        first = Tile(index // form.chunks[1], index % form.chunks[1], 0, 0)
        state = _chunk(form, q, first)
        out, lse = softmax.finish(softmax.add_sinks(state, pairs.head_block(sinks, first)))
        return out.astype(dtype), lse

    out, lse = loops.stack(form.chunks[0] * form.chunks[1], chunk)
    out, lse = form.join(out), form.join(lse[..., None])[..., 0].transpose(0, 2, 1)
    out = form.out_of_latent(out, form.args.w_vc) if form.absorb else out
    return out.astype(dtype), lse


def _chunk(form: Form, q: jax.Array, first: Tile) -> softmax.State:
    """The state of all queries of a chunk after all its keys."""
    pairs = form.pairs
    rows = form.rows(q, first)
    state = softmax.init(rows.shape[:-1], form.width, pairs.dtype)
    if not pairs.num_k:
        return loops.vary_like(state, q)

    def block(j: Any, state: softmax.State) -> softmax.State:
        keys = form.keys(first.b, first.g, j)

        def step(i: Any, state: softmax.State) -> softmax.State:
            return _step(form, rows, keys, first._replace(i=i, j=j), state)

        return loops.fori(*pairs.query_bounds(first.b, j), step, state)

    return loops.fori(*form.key_bounds(first.b), block, loops.vary_like(state, q))


def _step(form: Form, q: jax.Array, keys: Keys, at: Tile, state: softmax.State) -> softmax.State:
    """Folds one block of keys into one block of queries."""
    pairs, size = form.pairs, form.blocks.q
    old = softmax.State(*(loops.take(x, at.i, size, 3) for x in state))
    dots = form.multiply("bgrtd,bgsd->bgrts", loops.take(q, at.i, size, 3), keys.key)
    x = pairs.logits(dots, at, "ts")
    seen = pairs.visible(at, "ts")
    x = x if seen is None else jnp.where(seen, x, -jnp.inf)
    m, weights, alpha = softmax.weigh(old.m, x)
    total = old.l * alpha + weights.sum(axis=-1)
    drop = pairs.dropout(at, "ts")
    weights = weights if drop is None else weights * drop
    values = form.multiply("bgrts,bgse->bgrte", weights, keys.value)
    new = softmax.State(m, total, old.acc * alpha[..., None] + values)
    return softmax.State(*(_put(x, y, at.i) for x, y in zip(state, new, strict=True)))


def _put(x: jax.Array, block: jax.Array, i: Any) -> jax.Array:
    """Writes block i of the queries."""
    if x.shape == block.shape:
        return block
    return jax.lax.dynamic_update_slice_in_dim(x, block, i * block.shape[3], 3)
