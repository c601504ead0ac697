"""Attention forward with online softmax (Dao, 2023) on a TPU.

A program holds a block of queries of one head; maximum, sum and weighted values of its rows stay in
VMEM while keys and values pass by.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu._blocks import logits, softmax, tiles
from ejkernel.kernels._pallas.tpu.flash_attention import call, config


def _kernel(of: call.Call, refs: Any) -> None:
    at = of.here(refs)

    @pl.when(of.is_first())
    def _() -> None:
        refs.m[...] = jnp.full_like(refs.m, softmax.LEAST)
        refs.l[...] = jnp.zeros_like(refs.l)
        refs.acc[...] = jnp.zeros_like(refs.acc)
        of.fill_columns(refs)

    of.tiles(refs, at, functools.partial(_fold, of, refs, at))

    @pl.when(of.is_last())
    def _() -> None:
        sink = None if refs.sinks is None else refs.sinks[at.head]
        factor, lse = softmax.finish(refs.m[...], refs.l[...], of.units, sink)
        out = refs.acc[...] * tiles.wide(factor, of.e)
        refs.out[...] = out.astype(refs.out.dtype)
        refs.lse[...] = tiles.to_row(lse)


def _fold(of: call.Call, refs: Any, at: call.Place, tile: logits.Tile) -> Iterator[None]:
    """Folds some keys into the state of some rows."""
    rows, lanes, rules = tile.rows, tile.lanes, of.rules
    dots = tiles.product(refs.query[rows], refs.key[lanes], transpose=True)  # [rows, lanes]
    yield
    x, _ = logits.logits(rules, refs, tile, dots, at.head)
    seen = logits.visible(rules, refs, tile)
    if seen is not None:
        x = jnp.where(seen, x, -jnp.inf)
    m, l, p, alpha = softmax.update(refs.m[rows], refs.l[rows], x, of.units)
    refs.m[rows], refs.l[rows] = m, l
    (p,) = logits.drop(rules, refs, tile, at.batch, at.head, p)
    yield
    v = refs.value[lanes]
    values = tiles.product(p.astype(v.dtype), v)
    refs.acc[rows] = refs.acc[rows] * tiles.wide(alpha, of.e) + values


def forward(
    args: Any, cfg: config.Config, prepare: type[call.Call] = call.Call
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Outputs (out, and lse when asked for) and residuals (lse); `prepare` says what is visited."""
    nothing = 0 in (args.query.size, args.key.size)
    out, lse = _empty(args) if nothing else _attend(args, cfg, prepare)
    return ((out, lse) if args.return_lse else (out,)), (lse,)


def _empty(args: Any) -> tuple[jax.Array, jax.Array]:
    """Without tokens there is nothing to launch; sinks alone make the logsumexp."""
    batch, t, num_heads, _ = args.query.shape
    lse = jnp.full(num_heads, -jnp.inf, jnp.float32)
    if args.softmax_aux is not None:
        sinks = jax.nn.logsumexp(args.softmax_aux.astype(jnp.float32), axis=-1)
        lse = jnp.broadcast_to(sinks, (num_heads,))
    out = jnp.zeros((batch, t, num_heads, args.value.shape[-1]), args.query.dtype)
    return out, jnp.broadcast_to(lse[None, :, None], (batch, num_heads, t))


def _attend(args: Any, cfg: config.Config, prepare: type[call.Call]) -> tuple[jax.Array, jax.Array]:
    of = prepare(args, cfg, holds_keys=False)
    of.add("query", of.queries(args.query), of.query_spec(of.d))
    of.add("key", of.keys(of.marked(args.key, args.value)), of.key_spec(of.d))
    of.add("value", of.keys(of.clean(args.value)), of.key_spec(of.e))
    lead, length = (of.batch, of.num_heads), of.padded[0]
    scratch = {
        "m": pltpu.VMEM((of.held_size, tiles.LANES), jnp.float32),
        "l": pltpu.VMEM((of.held_size, min(of.step, tiles.LANES)), jnp.float32),
        "acc": pltpu.VMEM((of.held_size, of.e), jnp.float32),
    }
    out, lse = of.run(
        "flash_attention_fwd_kernel",
        _kernel,
        {
            "out": (
                jax.ShapeDtypeStruct((*lead, length, of.e), args.query.dtype),
                of.query_spec(of.e),
            ),
            "lse": (
                jax.ShapeDtypeStruct((*lead, 1, length), jnp.float32),
                of.query_row_spec(1),
            ),
        },
        scratch,
    )
    return of.taken(out, 2, 0).transpose(0, 2, 1, 3), of.taken(lse[:, :, 0], 2, 0)
