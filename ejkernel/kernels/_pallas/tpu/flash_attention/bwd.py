"""Attention backward on a TPU, from the rows' logsumexp (Dao, 2023).

One kernel holds keys and gives dk and dv, and dq too where its sums fit into VMEM. Otherwise a
second one holds queries and gives dq, at the price of two products more. Each sum is made in one
place and in one order.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels import _attention
from ejkernel.kernels._pallas.tpu._blocks import logits, softmax, tiles
from ejkernel.kernels._pallas.tpu.flash_attention import call, config


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
    prepare: type[call.Call] = call.Call,
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments; `prepare` says what is visited."""
    (lse,) = residuals
    delta = _attention.row_sums(args, outputs, cotangents)
    grads: dict[str, jax.Array] = {}
    if "softmax_aux" in wanted:
        grads["softmax_aux"] = _attention.sink_gradient(args, lse, delta)
    arrays = args.arrays()
    if 0 in (args.query.size, args.key.size):
        return {name: jnp.zeros_like(arrays[name]) for name in wanted - grads.keys()} | grads
    dout = cotangents[0].astype(args.query.dtype)
    # a row that is not finite reaches, as nan weights, the keys that it sees
    bad = ~(jnp.isfinite(dout).all(axis=-1) & jnp.isfinite(args.query).all(axis=-1))
    bad = bad.transpose(0, 2, 1)
    # rows without a key have weights of zero, as those beyond the length
    shifted = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    rows = jnp.stack([jnp.where(bad, jnp.nan, shifted), delta], axis=2)  # [b, h, 2, t]
    # dbias takes a pass over queries, which makes dq as well
    if "query" not in wanted or "bias" in wanted:
        cfg = dataclasses.replace(cfg, one_pass=False)
    if wanted & {"key", "value"}:
        grads |= _over_keys(prepare(args, cfg, holds_keys=True), dout, rows)
    if (wanted - grads.keys()) & {"query", "bias"}:
        turned, with_bias = config.exchanged(cfg), "bias" in wanted
        of = prepare(args, turned, holds_keys=False, every_fetch=with_bias)
        grads |= _over_queries(of, dout, rows, with_bias)
    return {name: grads[name].astype(arrays[name].dtype) for name in wanted}


def _operands(of: call.Call, dout: jax.Array, rows: jax.Array) -> None:
    args = of.args
    of.add("query", of.queries(of.clean(args.query)), of.query_spec(of.d))
    of.add("key", of.keys(of.clean(args.key)), of.key_spec(of.d))
    of.add("value", of.keys(of.marked(args.value, args.key)), of.key_spec(of.e))
    of.add("dout", of.queries(of.clean(dout)), of.query_spec(of.e))
    # rows beyond the length have weights of zero
    made = [of.lay_out(rows[:, :, i], 2, 0, fill) for i, fill in enumerate((jnp.inf, 0.0))]
    of.add("rows", jnp.stack(made, axis=2), of.query_row_spec(2))


def _gradient_of_logits(
    of: call.Call,
    refs: Any,
    at: call.Place,
    tile: logits.Tile,
    products: tuple[jax.Array, jax.Array],
    rows: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights after dropout and gradients of what is capped and of the bias, from two products."""
    rules, (dots, dp), (lse, delta) = of.rules, products, rows
    x, capped = logits.logits(rules, refs, tile, dots, at.head)
    seen = logits.visible(rules, refs, tile)
    p = softmax.weights(x, lse, of.units)
    kept, dp = logits.drop(rules, refs, tile, at.batch, at.head, p, dp)
    added = ds = p * (dp - delta)
    if rules.cap is not None:
        ds = ds * (1.0 - jnp.square(capped * (1.0 / rules.cap)))
    if seen is not None:
        kept, ds, added = (jnp.where(seen, y, 0.0) for y in (kept, ds, added))
    return kept, ds, added


# dk and dv


def _keys_kernel(of: call.Call, refs: Any) -> None:
    at = of.here(refs)

    @pl.when(of.is_first())
    def _() -> None:
        refs.dk_sum[...] = jnp.zeros_like(refs.dk_sum)
        refs.dv_sum[...] = jnp.zeros_like(refs.dv_sum)
        of.fill_columns(refs)

    if of.dq is not None:
        of.dq.start(refs, at)

    def step(tile: logits.Tile) -> Iterator[None]:
        rows, lanes = tile.rows, tile.lanes
        q, dout = refs.query[lanes], refs.dout[lanes]
        stats = refs.rows[0:1, lanes], refs.rows[1:2, lanes]
        dots = tiles.product(refs.key[rows], q, transpose=True)  # [block_k, block_q]
        dp = tiles.product(refs.value[rows], dout, transpose=True)
        yield
        kept, ds, _ = _gradient_of_logits(of, refs, at, tile, (dots, dp), stats)
        yield
        refs.dv_sum[rows] += tiles.product(kept.astype(dout.dtype), dout)
        ds = ds.astype(q.dtype)
        refs.dk_sum[rows] += tiles.product(ds, q)
        if of.dq is not None:
            of.dq.add(refs, at, tile, ds)

    of.tiles(refs, at, step)
    if of.dq is not None:
        of.dq.finish(refs, at)

    @pl.when(of.is_last())
    def _() -> None:
        scale = float(of.args.softmax_scale)
        refs.dk[...] = (refs.dk_sum[...] * scale).astype(refs.dk.dtype)
        refs.dv[...] = refs.dv_sum[...].astype(refs.dv.dtype)


def _over_keys(of: call.Call, dout: jax.Array, rows: jax.Array) -> dict[str, jax.Array]:
    """dk and dv, and dq where the call makes it on the way."""
    _operands(of, dout, rows)
    lead, length = (of.batch, of.num_groups), of.padded[1]
    sizes = (("dk", of.d), ("dv", of.e))
    out = {
        name: (jax.ShapeDtypeStruct((*lead, length, size), of.args.key.dtype), of.key_spec(size))
        for name, size in sizes
    }
    scratch = {f"{name}_sum": pltpu.VMEM((of.held_size, size), jnp.float32) for name, size in sizes}
    if of.dq is not None:
        out, scratch = out | of.dq.out(), scratch | of.dq.scratch()
    dk, dv, *dq = of.run("flash_attention_bwd_dkv_kernel", _keys_kernel, out, scratch)
    grads = {} if of.dq is None else {"query": of.dq.taken(*dq)}
    for name, x in (("key", dk), ("value", dv)):
        grads[name] = of.taken(x, 2, 1).transpose(0, 2, 1, 3)
    return grads


# dq and dbias


def _queries_kernel(of: call.Call, refs: Any) -> None:
    at = of.here(refs)

    @pl.when(of.is_first())
    def _() -> None:
        refs.dq_sum[...] = jnp.zeros_like(refs.dq_sum)
        for i in range(2):
            refs.stats[i] = tiles.to_column(refs.rows[i : i + 1])
        of.fill_columns(refs)

    if refs.dbias is not None:
        refs.dbias[...] = jnp.zeros_like(refs.dbias)

    def step(tile: logits.Tile) -> Iterator[None]:
        rows, lanes = tile.rows, tile.lanes
        k, v = refs.key[lanes], refs.value[lanes]
        dots = tiles.product(refs.query[rows], k, transpose=True)  # [block_q, block_k]
        dp = tiles.product(refs.dout[rows], v, transpose=True)
        yield
        lse, delta = (tiles.wide(refs.stats[i, rows], tile.shape[1]) for i in range(2))
        _, ds, added = _gradient_of_logits(of, refs, at, tile, (dots, dp), (lse, delta))
        if refs.dbias is not None:
            _add_bias(refs.dbias, added, tile)
        yield
        refs.dq_sum[rows] += tiles.product(ds.astype(k.dtype), k)

    of.tiles(refs, at, step)

    @pl.when(of.is_last())
    def _() -> None:
        scale = float(of.args.softmax_scale)
        refs.dq[...] = (refs.dq_sum[...] * scale).astype(refs.dq.dtype)


def _add_bias(dbias: Any, ds: jax.Array, tile: logits.Tile) -> None:
    """A tile of dbias; with one row for all queries, summed over those of a block."""
    if dbias.shape[0] == 1:
        dbias[:, tile.lanes] += jnp.sum(ds, axis=0, keepdims=True)
    else:
        dbias[tile.rows, tile.lanes] = ds


def _over_queries(
    of: call.Call, dout: jax.Array, rows: jax.Array, with_bias: bool
) -> dict[str, jax.Array]:
    args = of.args
    _operands(of, dout, rows)
    lead, (t, s) = (of.batch, of.num_heads), of.padded
    out = {
        "dq": (
            jax.ShapeDtypeStruct((*lead, t, of.d), args.query.dtype),
            of.query_spec(of.d),
        )
    }
    shared = with_bias and args.bias.shape[2] == 1
    if with_bias:
        # a part for each block of queries, whose sum is fixed; broadcast axes are summed afterwards
        size = 1 if shared else of.held_size
        shape = (*lead, of.num_held, size, s)
        spec = pl.BlockSpec(
            (None, None, None, size, of.fetched), lambda b, h, i, f, _: (b, h, i, 0, f)
        )
        out["dbias"] = (jax.ShapeDtypeStruct(shape, jnp.float32), spec)
    scratch = {
        "dq_sum": pltpu.VMEM((of.held_size, of.d), jnp.float32),
        "stats": pltpu.VMEM((2, of.held_size, tiles.LANES), jnp.float32),
    }
    made = of.run("flash_attention_bwd_dq_kernel", _queries_kernel, out, scratch)
    grads = {"query": of.taken(made[0], 2, 0).transpose(0, 2, 1, 3)}
    if with_bias:
        full = made[1].reshape(*lead, -1, s)
        full = full.sum(2, keepdims=True) if shared else full[:, :, : of.t]
        full = full[..., : of.s]
        axes = tuple(i for i in range(4) if args.bias.shape[i] != full.shape[i])
        grads["bias"] = full.sum(axes, keepdims=True)
    return grads
