"""Latent attention backward: weights are recomputed from lse, one tile at a time.

A block of keys is made once, visits the queries that see it, and its gradients go back through the
up-projections before the next one is made. Tiles are [.., s, r, t], as in `flash_attention`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import finite
from ejkernel.kernels._xla._blocks import loops, softmax
from ejkernel.kernels._xla._blocks.logits import Tile
from ejkernel.kernels._xla.flash_attention import bwd as flash
from ejkernel.kernels._xla.mla_attention import config
from ejkernel.kernels._xla.mla_attention.forms import Form


class _Rows(NamedTuple):
    """What backward knows of the queries, [b, g, r, T, …]."""

    q: jax.Array
    dout: jax.Array  # zeros for what is not finite
    lse: jax.Array
    delta: jax.Array


class _Sums(NamedTuple):
    """Gradients that are added up over tiles; None when nobody asks."""

    latent: jax.Array  # [b, S, l]
    rope: Any  # [b, S, r]
    w_kc: jax.Array | None  # [g, l, d]
    w_vc: jax.Array | None  # [g, l, e]
    bias: jax.Array | None  # [b, g, r, T, S]


class _OfRows(NamedTuple):
    """Gradients of one chunk of queries."""

    q: jax.Array  # [bb, gg, r, T, d]
    context: jax.Array | None  # the output in latent space, for the gradient of `w_vc`


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    grads = {name: jnp.zeros_like(array) for name, array in args.arrays().items()}
    if 0 not in args.query.shape[:3]:
        lse, delta = flash.row_terms(args, outputs, residuals, cotangents)
        if args.key_value.shape[1]:
            grads |= _pull(Form(args, cfg), cotangents[0], lse, delta, wanted)
        if "softmax_aux" in wanted:
            grads["softmax_aux"] = flash.sink_gradient(args, lse, delta)
    return grads


def _pull(
    form: Form, dout: jax.Array, lse: jax.Array, delta: jax.Array, wanted: frozenset[str]
) -> dict[str, jax.Array]:
    """Gradients of all that the pairs touch."""
    args, pairs = form.args, form.pairs
    # where a cotangent is not finite, nan weights carry that to the keys the row sees, no others
    spoiled = ~jnp.isfinite(dout).all(axis=-1).transpose(0, 2, 1)
    dout = finite(dout.astype(args.query.dtype))
    x = _Rows(
        q=form.queries(),
        dout=pairs.queries(form.into_latent(dout, args.w_vc) if form.absorb else dout),
        lse=pairs.rows(jnp.where(spoiled, jnp.nan, softmax.shift(lse))),
        delta=pairs.rows(delta),
    )
    sums, of_rows = loops.scan(
        form.chunks[0] * form.chunks[1],
        lambda sums, index: _chunk(form, x, sums, index, wanted),
        _zeros(form, wanted),
    )
    dq = form.join(of_rows.q)
    grads = {}
    if "softmax_scale" in wanted:
        grads["softmax_scale"] = flash.scale_gradient(x.q, pairs.queries(dq))
    dq = dq * args.softmax_scale
    weights = {"w_kc": sums.w_kc, "w_vc": sums.w_vc}
    split = form.latent_dim if form.absorb else form.nope
    grads["query"] = dq[..., :split]
    if args.b_q is not None:
        drope = dq[..., split:]
        shared = args.b_q.shape[2] != drope.shape[2]
        grads["b_q"] = drope.sum(axis=2, keepdims=True) if shared else drope
    if form.absorb:
        weights = _pull_absorbed(form, dq[..., :split], of_rows.context, dout, wanted)
        grads["query"] = form.out_of_latent(dq[..., :split], args.w_kc)
    for name in ("w_kc", "w_vc"):
        if name in wanted:
            grads[name] = weights[name].transpose(1, 0, 2)
    s = args.key_value.shape[1]
    grads["key_value"] = sums.latent[:, :s]
    if sums.rope is not None:
        grads["b_k"] = sums.rope[:, :s]
    if sums.bias is not None:
        full = args.bias.shape
        grads["bias"] = sums.bias[..., : full[2], : full[3]].reshape(full)
    return {name: value.astype(getattr(args, name).dtype) for name, value in grads.items()}


def _pull_absorbed(
    form: Form, dq: jax.Array, context: jax.Array | None, dout: jax.Array, wanted: frozenset[str]
) -> dict[str, jax.Array]:
    """Gradients [g, l, d] of weights that were multiplied into queries and outputs."""
    sides = {"w_kc": (dq, finite(form.args.query))}
    if context is not None:
        sides["w_vc"] = (form.join(context), dout)
    return {
        name: form.multiply("btgrl,btgrd->gld", form.split(a), form.split(b))
        for name, (a, b) in sides.items()
        if name in wanted
    }


def _zeros(form: Form, wanted: frozenset[str]) -> _Sums:
    pairs, made = form.pairs, {}
    if form.rope is not None:
        made["rope"] = form.rope.shape
    for name in ("w_kc", "w_vc"):
        if name in wanted and not form.absorb:
            made[name] = getattr(form, name).shape
    if "bias" in wanted:
        made["bias"] = pairs.bias.shape
    made["latent"] = form.latent.shape
    zeros = {name: jnp.zeros(shape, pairs.dtype) for name, shape in made.items()}
    none: dict[str, Any] = dict.fromkeys(_Sums._fields)
    sums = _Sums(**none | zeros)
    return loops.vary_like(sums, form.args.query)


def _chunk(
    form: Form, x: _Rows, sums: _Sums, index: Any, wanted: frozenset[str]
) -> tuple[_Sums, _OfRows]:
    """All pairs of one chunk of rows and heads."""
    pairs = form.pairs
    first = Tile(index // form.chunks[1], index % form.chunks[1], 0, 0)
    mine = _Rows(*(form.rows(a, first) for a in x))
    dq = jnp.zeros(mine.q.shape, pairs.dtype)
    context = jnp.zeros((*dq.shape[:-1], form.width), pairs.dtype)
    rows = _OfRows(dq, context if form.absorb and "w_vc" in wanted else None)

    def block(j: Any, carry: tuple[_Sums, _OfRows]) -> tuple[_Sums, _OfRows]:
        return _key_block(form, mine, carry, first._replace(j=j), wanted)

    carry = (sums, loops.vary_like(rows, x.q))
    return loops.fori(*form.key_bounds(first.b), block, carry)


def _key_block(
    form: Form, x: _Rows, carry: tuple[_Sums, _OfRows], first: Tile, wanted: frozenset[str]
) -> tuple[_Sums, _OfRows]:
    """Adds what one block of keys gives."""
    pairs, size, multiply = form.pairs, form.blocks.q, form.multiply
    keys = form.keys(first.b, first.g, first.j)
    key_rows, value_rows = (a.swapaxes(2, 3) for a in (finite(keys.key), keys.value))

    def step(i: Any, state: Any) -> Any:
        dbias, rows, dk, dv = state
        at = first._replace(i=i)
        q, dout, lse, delta = (loops.take(a, i, size, 3) for a in x)
        capped = pairs.capped(multiply("bgsd,bgrtd->bgsrt", keys.key, q))
        logits = pairs.add_offsets(capped, at, "st")
        seen = pairs.visible(at, "st")
        weights = jnp.exp(softmax.below(logits, lse[:, :, None]))
        dweights = multiply("bgse,bgrte->bgsrt", keys.value, dout)
        drop = pairs.dropout(at, "st")
        kept = weights
        if drop is not None:
            kept, dweights = weights * drop, dweights * drop
        dlogits = weights * (dweights - delta[:, :, None])
        dscores = dlogits * pairs.slope_of_cap(capped)  # of what is capped, before bias and slopes
        if seen is not None:
            hide = lambda x: jnp.where(seen, x, 0.0)
            kept, dlogits, dscores = map(hide, (kept, dlogits, dscores))
        dv += multiply("bgsrt,bgrte->bgse", kept, dout)
        dk += multiply("bgsrt,bgrtd->bgsd", dscores, finite(q))
        dq, context = _add_rows(form, rows.q, key_rows, dscores, i), rows.context
        if context is not None:
            context = _add_rows(form, context, value_rows, kept, i)
        rows = _OfRows(dq, context)
        if dbias is not None:
            dbias = flash.add_bias(dbias, dlogits, at)
        return dbias, rows, dk, dv

    sums, rows = carry
    zeros = tuple(jnp.zeros(a.shape, pairs.dtype) for a in (keys.key, keys.value))
    state = (sums.bias, rows, *loops.vary_like(zeros, x.q))
    dbias, rows, dk, dv = loops.fori(*pairs.query_bounds(first.b, first.j), step, state)
    dk = dk * form.args.softmax_scale
    dlatent, drope, dweights = form.pull_keys(keys, dk, dv, first.g, wanted)
    place = (first.b, first.j, 0)
    sums = sums._replace(
        latent=loops.put(sums.latent, dlatent, place),
        rope=None if drope is None else loops.put(sums.rope, drope, place),
        bias=dbias,
        **{n: loops.put(getattr(sums, n), w, (first.g, 0, 0)) for n, w in dweights.items()},
    )
    return sums, rows


def _add_rows(form: Form, x: jax.Array, keys: jax.Array, tile: jax.Array, i: Any) -> jax.Array:
    """Adds the product of keys [.., d, s] and a tile [.., s, r, t] to a block of rows."""
    made = form.multiply("bgds,bgsrt->bgdrt", keys, tile).transpose(0, 1, 3, 4, 2)
    return loops.put(x, made, (0, 0, 0, i, 0))
