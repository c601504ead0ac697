"""Block-sparse attention backward: weights are recomputed from lse, one listed block at a time.

For each block of keys, the blocks of queries that list it are visited once; dk and dv stay in the
loop, dq is added up in place. Tiles are [.., s, r, t], as in dense attention.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import multiply
from ejkernel.kernels._xla._blocks import loops, softmax
from ejkernel.kernels._xla._blocks.logits import Tile
from ejkernel.kernels._xla.blocksparse_attention import config
from ejkernel.kernels._xla.blocksparse_attention.blocks import ListedPairs, over
from ejkernel.kernels._xla.flash_attention import bwd as dense


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    lse, delta = dense.row_terms(args, outputs, residuals, cotangents)
    grads = {name: jnp.zeros_like(array) for name, array in args.arrays().items() if name in wanted}
    if "softmax_aux" in wanted:
        grads["softmax_aux"] = dense.sink_gradient(args, lse, delta)
    if 0 in args.query.shape[:3] or args.key.shape[1] == 0:
        return grads
    pairs = ListedPairs(args, config.blocks(args, cfg))
    operands = _operands(args, pairs, cotangents[0], lse, delta)
    chunks = (pairs.batch // pairs.blocks.b, pairs.groups // pairs.blocks.g)
    lists, dbias = pairs.query_lists(), None
    if "bias" in wanted:
        dbias = loops.vary_like(jnp.zeros(pairs.bias.shape, pairs.dtype), args.query)

    def rows(dbias: Any, chunk: Any) -> tuple[Any, tuple[jax.Array, ...]]:
        b, g = chunk // chunks[1], chunk % chunks[1]
        shape = (pairs.blocks.b, pairs.blocks.g, *operands.q.shape[2:])
        state = (loops.vary_like(jnp.zeros(shape, pairs.dtype), args.query), dbias)

        def keys(state: Any, j: Any) -> tuple[Any, Any]:
            return _key_block(pairs, operands, lists, state, Tile(b, g, 0, j))

        (dq, dbias), (dk, dv) = loops.scan(pairs.num_k, keys, state)
        return dbias, (dq, dk, dv)

    dbias, (dq, dk, dv) = loops.scan(chunks[0] * chunks[1], rows, dbias)
    # [chunks, bb, gg, r, T, d] -> [b, t, h, d]
    dq = dq.reshape(*chunks, *dq.shape[1:]).transpose(0, 2, 5, 1, 3, 4, 6)
    dq = dq.reshape(pairs.batch, pairs.padded_t, pairs.heads, dq.shape[-1])[:, : pairs.t]
    grads["query"] = (dq * args.softmax_scale).astype(args.query.dtype)
    grads["key"] = (_of_keys(pairs, chunks, dk) * args.softmax_scale).astype(args.key.dtype)
    grads["value"] = _of_keys(pairs, chunks, dv).astype(args.value.dtype)
    if "softmax_scale" in wanted:
        grads["softmax_scale"] = dense.scale_gradient(args.query, dq)
    if dbias is not None:
        full = args.bias.shape
        grads["bias"] = dbias[..., : full[2], : full[3]].reshape(full).astype(args.bias.dtype)
    return grads


def _operands(args: Any, pairs: ListedPairs, dout: jax.Array, lse, delta) -> dense._Operands:
    """Arrays in the kernel's layout; see `_Operands`."""
    if not pairs.whole:
        return dense.operands_of(args, pairs, dout, lse, delta)
    q, k, dout = pairs.queries(args.query), pairs.keys(args.key), pairs.queries(dout)
    lse, delta = pairs.rows(softmax.shift(lse)), pairs.rows(delta)
    dout = dout.astype(q.dtype)
    return dense._Operands(q, q, k, k, pairs.keys(args.value), dout, dout, lse, delta)


def _of_keys(pairs: ListedPairs, chunks: tuple[int, int], x: jax.Array) -> jax.Array:
    """[chunks, nk, bb, gg, bk, d] -> [b, s, kv heads, d], summed over heads that share keys."""
    x = x.reshape(*chunks, *x.shape[1:]).transpose(0, 3, 2, 5, 1, 4, 6)
    heads = x.shape[4] * x.shape[5] // pairs.share
    x = x.reshape(pairs.batch, pairs.padded_s, heads, pairs.share, x.shape[-1])
    return x.sum(axis=3)[:, : pairs.s]


def _key_block(
    pairs: ListedPairs, x: Any, lists: jax.Array, state: Any, first: Tile
) -> tuple[Any, Any]:
    """Adds one block of keys to dq (and dbias); its dk and dv."""
    k_tile, v_tile = pairs.k_block(x.k, first), pairs.k_block(x.v, first)  # [bb, gg, bk, d]
    k_transposed = pairs.k_block(x.k_clean, first).swapaxes(2, 3)
    dtype = x.q.dtype

    def step(i: Any, carry: Any) -> Any:
        (dq, dbias), dk, dv = carry
        at = first._replace(i=i)
        lse, delta = (pairs.q_block(row, at)[:, :, None] for row in (x.lse, x.delta))
        dots = multiply("bgsd,bgrtd->bgsrt", k_tile, pairs.q_block(x.q, at))
        capped, seen = pairs.capped(dots), pairs.visible(at, "st")
        weights = jnp.exp(softmax.below(pairs.add_offsets(capped, at, "st"), lse))
        dweights = multiply("bgse,bgrte->bgsrt", v_tile, pairs.q_block(x.dout, at))
        dlogits = weights * (dweights - delta)
        dscores = dlogits * pairs.slope_of_cap(capped)  # of what is capped, before bias and slopes
        if seen is not None:
            hide = lambda x: jnp.where(seen, x, 0.0)
            weights, dlogits, dscores = map(hide, (weights, dlogits, dscores))
        dv += multiply("bgsrt,bgrte->bgse", weights.astype(dtype), pairs.q_block(x.dout_clean, at))
        narrow = dscores.astype(dtype)
        dk += multiply("bgsrt,bgrtd->bgsd", narrow, pairs.q_block(x.q_clean, at))
        dq_tile = multiply("bgds,bgsrt->bgdrt", k_transposed, narrow).transpose(0, 1, 3, 4, 2)
        dq = loops.put(dq, dq_tile, (0, 0, 0, i, 0))
        if dbias is not None:
            dbias = dense.add_bias(dbias, dlogits, at)
        return (dq, dbias), dk, dv

    zeros = (jnp.zeros(k_tile.shape, pairs.dtype), jnp.zeros(v_tile.shape, pairs.dtype))
    carry = (state, *loops.vary_like(zeros, x.q))
    state, dk, dv = over(lists, (first.b, first.g, first.j), step, carry)
    return state, (dk, dv)
