"""Attention backward in blocks: weights are recomputed from lse, one tile at a time.

For each block of keys, the blocks of queries that can see it are visited once; dk and dv stay in
the loop, dq is added up in place. Tiles are [.., s, r, t]: their products with queries and output
cotangents then need no transpose, and the query heads of one key head are summed by the product.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels import _attention
from ejkernel.kernels._shared.products import finite, multiply
from ejkernel.kernels._xla._blocks import loops, softmax
from ejkernel.kernels._xla._blocks.logits import Pairs, Tile, pad
from ejkernel.kernels._xla.flash_attention import config


class _Operands(NamedTuple):
    """Arrays in the kernel's layout; `*_clean` have zeros for what is not finite."""

    q: jax.Array
    q_clean: jax.Array
    k: jax.Array
    k_clean: jax.Array
    v: jax.Array
    dout: jax.Array
    dout_clean: jax.Array
    lse: jax.Array
    delta: jax.Array


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    batch, t, num_q_heads, _ = args.query.shape
    s = args.key.shape[1]
    if 0 in (batch, t, num_q_heads, s):
        grads = {name: jnp.zeros_like(array) for name, array in args.arrays().items()}
        if "softmax_aux" in wanted and t * batch * num_q_heads:
            grads["softmax_aux"] = sink_gradient(
                args, *row_terms(args, outputs, residuals, cotangents)
            )
        return grads
    blocks = config.blocks(args, cfg)
    pairs = Pairs(args, blocks)
    lse, delta = row_terms(args, outputs, residuals, cotangents)
    operands = operands_of(args, pairs, cotangents[0], lse, delta)
    chunks = (batch // blocks.b, pairs.groups // blocks.g)
    dbias = None
    if "bias" in wanted:
        dbias = loops.vary_like(jnp.zeros(pairs.bias.shape, pairs.dtype), args.query)

    def rows(dbias: Any, chunk: Any) -> tuple[Any, tuple[jax.Array, ...]]:
        b, g = chunk // chunks[1], chunk % chunks[1]
        dq = jnp.zeros((blocks.b, blocks.g, *operands.q.shape[2:]), pairs.dtype)
        state = (loops.vary_like(dq, args.query), dbias)

        def keys(state: Any, j: Any) -> tuple[Any, Any]:
            return _key_block(pairs, operands, state, b, g, j)

        (dq, dbias), (dk, dv) = loops.scan(pairs.num_k, keys, state)
        return dbias, (dq, dk, dv)

    dbias, (dq, dk, dv) = loops.scan(chunks[0] * chunks[1], rows, dbias)
    # dq: [chunks, bb, gg, r, T, d]; dk, dv: [chunks, nk, bb, gg, bk, d]
    dq = dq.reshape(*chunks, *dq.shape[1:]).transpose(0, 2, 5, 1, 3, 4, 6)
    dq = dq.reshape(batch, pairs.padded_t, num_q_heads, -1)[:, :t]

    def of_keys(x: jax.Array) -> jax.Array:
        x = x.reshape(*chunks, *x.shape[1:]).transpose(0, 3, 2, 5, 1, 4, 6)
        return x.reshape(batch, pairs.padded_s, pairs.groups, -1)[:, :s]

    grads = {
        "query": (dq * args.softmax_scale).astype(args.query.dtype),
        "key": (of_keys(dk) * args.softmax_scale).astype(args.key.dtype),
        "value": of_keys(dv).astype(args.value.dtype),
    }
    if dbias is not None:
        full = args.bias.shape
        grads["bias"] = dbias[..., : full[2], : full[3]].reshape(full).astype(args.bias.dtype)
    if "softmax_aux" in wanted:
        grads["softmax_aux"] = sink_gradient(args, lse, delta)
    if "softmax_scale" in wanted:
        grads["softmax_scale"] = scale_gradient(args.query, dq)
    return grads


def scale_gradient(query: jax.Array, dq: jax.Array) -> jax.Array:
    """The gradient of `softmax_scale` from that of the scaled query, dq; in the dtype of dq."""
    # a query that no result depends on has a gradient of 0, whatever it holds
    terms = finite(query).astype(dq.dtype) * dq
    return _sum(terms.sum(axis=-1).reshape(-1))


def row_terms(args: Any, outputs, residuals, cotangents) -> tuple[jax.Array, jax.Array]:
    """The rows' lse, and delta = sum(out * dout) - dlse; [b, h, t]."""
    (lse,) = residuals
    dtype = lse.dtype
    delta = jnp.einsum("bthe,bthe->bht", outputs[0].astype(dtype), cotangents[0].astype(dtype))
    # a row that saw no key has output 0 whatever its cotangent is
    delta = jnp.where((outputs[0] == 0).all(axis=-1).transpose(0, 2, 1), 0.0, delta)
    return lse, delta - cotangents[1].astype(dtype) if args.return_lse else delta


def operands_of(args: Any, pairs: Pairs, dout: jax.Array, lse, delta) -> _Operands:
    dout = dout.astype(args.query.dtype)
    # where a cotangent is not finite, nan weights carry that to the keys the row sees, no others
    spoiled = ~jnp.isfinite(dout).all(axis=-1).transpose(0, 2, 1)
    q, k, dout = pairs.queries(args.query), pairs.keys(args.key), pairs.queries(dout)
    return _Operands(
        q=q,
        q_clean=finite(q),
        k=k,
        k_clean=finite(k),
        v=pairs.keys(args.value),
        dout=dout,
        dout_clean=finite(dout),
        lse=pairs.rows(jnp.where(spoiled, jnp.nan, softmax.shift(lse))),
        delta=pairs.rows(delta),
    )


def _key_block(pairs: Pairs, x: _Operands, state: Any, b: Any, g: Any, j: Any) -> tuple[Any, Any]:
    """Adds one block of keys to dq (and dbias); its dk and dv."""
    first = Tile(b, g, 0, j)
    k_tile, v_tile = pairs.k_block(x.k, first), pairs.k_block(x.v, first)  # [bb, gg, bk, d]
    k_transposed = pairs.k_block(x.k_clean, first).swapaxes(2, 3)
    dtype = x.q.dtype

    def step(i: Any, carry: Any) -> Any:
        (dq, dbias), dk, dv = carry
        at = Tile(b, g, i, j)
        q_tile, dout_tile = pairs.q_block(x.q, at), pairs.q_block(x.dout, at)
        lse, delta = (pairs.q_block(row, at)[:, :, None] for row in (x.lse, x.delta))
        capped = pairs.capped(multiply("bgsd,bgrtd->bgsrt", k_tile, q_tile))
        logits = pairs.add_offsets(capped, at, "st")
        seen = pairs.visible(at, "st")
        weights = jnp.exp(softmax.below(logits, lse))
        dweights = multiply("bgse,bgrte->bgsrt", v_tile, dout_tile)
        drop = pairs.dropout(at, "st")
        kept = weights
        if drop is not None:
            kept, dweights = weights * drop, dweights * drop
        dlogits = weights * (dweights - delta)
        dscores = dlogits * pairs.slope_of_cap(capped)  # of what is capped, before bias and slopes
        if seen is not None:
            hide = lambda x: jnp.where(seen, x, 0.0)
            kept, dlogits, dscores = map(hide, (kept, dlogits, dscores))
        dv += multiply("bgsrt,bgrte->bgse", kept.astype(dtype), pairs.q_block(x.dout_clean, at))
        narrow = dscores.astype(dtype)
        dk += multiply("bgsrt,bgrtd->bgsd", narrow, pairs.q_block(x.q_clean, at))
        dq_tile = multiply("bgds,bgsrt->bgdrt", k_transposed, narrow).transpose(0, 1, 3, 4, 2)
        dq = loops.put(dq, dq_tile, (0, 0, 0, i, 0))
        if dbias is not None:
            dbias = add_bias(dbias, dlogits, at)
        return (dq, dbias), dk, dv

    zeros = (jnp.zeros(k_tile.shape, pairs.dtype), jnp.zeros(v_tile.shape, pairs.dtype))
    lower, upper = pairs.query_bounds(b, j)
    carry = (state, *loops.vary_like(zeros, x.q))
    state, dk, dv = loops.fori(lower, upper, step, carry)
    return state, (dk, dv)


def add_bias(dbias: jax.Array, dlogits: jax.Array, at: Tile) -> jax.Array:
    """Adds a tile [b, g, s, r, t] to dbias [b, g, r, T, S], summed over its broadcast axes."""
    block = dlogits.transpose(0, 1, 3, 4, 2)
    ones = tuple(axis for axis, size in enumerate(dbias.shape) if size == 1)
    block = block.sum(axis=ones, keepdims=True)
    return loops.put(dbias, block, (at.b, at.g, 0, at.i, at.j))


def sink_gradient(args: Any, lse: jax.Array, delta: jax.Array) -> jax.Array:
    return _sum(_attention.sink_terms(args, lse, delta)).astype(args.softmax_aux.dtype)


def _sum(x: jax.Array) -> jax.Array:
    """The sum over the first axis in pairs: the terms cancel, and one after another they lose."""
    while x.shape[0] > 1:
        half = -(-x.shape[0] // 2)
        x = pad(x, 0, 2 * half)
        x = x[:half] + x[half:]
    return x.sum(axis=0)
