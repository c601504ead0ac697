"""Native sparse attention backward: weights are recomputed, tile by tile as in the forward.

The selection is a constant. Compressed keys and values hand their gradients to the tokens of their
blocks; the selected branch visits the forward's tiles, where a block's dk and dv are one product
and dq is added where the queries lie; the window is `flash_attention`'s backward.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.precision import xla_precision
from ejkernel.kernels._shared.products import finite, multiply
from ejkernel.kernels._specs import native_sparse_attention as spec
from ejkernel.kernels._xla._blocks import loops, softmax
from ejkernel.kernels._xla._blocks.logits import pad
from ejkernel.kernels._xla.flash_attention import bwd as flash
from ejkernel.kernels._xla.native_sparse_attention import config, fwd, schedule, select, table
from ejkernel.kernels._xla.native_sparse_attention.fwd import Operands


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    if spec.is_empty(args):
        return {name: jnp.zeros_like(getattr(args, name)) for name in wanted}
    args = fwd.without_padding(args)
    have, x = spec.branches(args), Operands(args)
    dout = cotangents[0].astype(x.dtype)
    grads: dict[str, Any] = {}
    parts, scaled = [], []  # and the gradients of scaled queries
    if have.compressed:
        dgate, *part = _compressed(x, cfg, x.queries(args.g_cmp), x.queries(dout))
        grads["g_cmp"] = x.from_queries(dgate)
        scaled.append(part[0])
        parts.append(_of_tokens(x, *part))
    if have.selected:
        out, lse, bits = residuals[:3]
        dgate, gated = _gate(args.g_slc, out, dout)
        grads["g_slc"] = dgate
        part = _selected(x, cfg, (out, lse, bits), gated.astype(args.query.dtype))
        scaled.append(part[0])
        parts.append(_of_tokens(x, *part))
    if have.window:
        out, lse = residuals[3:]
        grads["g_swa"], gated = _gate(args.g_swa, out, dout)
        window = flash.backward(
            fwd.as_window(args),
            config.window(cfg),
            (out,),
            (lse,),
            (gated,),
            wanted & {"softmax_scale"},
        )
        parts.append(tuple(window[name].astype(x.dtype) for name in ("query", "key", "value")))
    if "softmax_scale" in wanted:
        total = sum(scaled[1:], scaled[0]) if scaled else jnp.zeros(x.q.shape, x.dtype)
        grads["softmax_scale"] = flash.scale_gradient(x.q, total)
        if have.window:
            grads["softmax_scale"] += window["softmax_scale"]
    for name, *terms in zip(("query", "key", "value"), *parts, strict=True):
        grads[name] = sum(terms[1:], terms[0]) if terms else jnp.zeros_like(getattr(args, name))
    return {name: grads[name].astype(getattr(args, name).dtype) for name in wanted}


def _of_tokens(x: Operands, dq: jax.Array, dk: jax.Array, dv: jax.Array) -> tuple[Any, ...]:
    """Gradients of q, k and v as the caller has them, from those of scaled queries, k and v."""
    return x.from_queries(dq * x.args.softmax_scale), x.from_keys(dk), x.from_keys(dv)


def _gate(gate: Any, out: jax.Array, dout: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradient of a gate [b, t, h], and the cotangent of its branch."""
    dgate = jnp.einsum("bthe,bthe->bth", out.astype(dout.dtype), dout)
    # a row that saw no key has output 0 whatever its cotangent is
    dgate = jnp.where((out == 0).all(axis=-1), 0.0, dgate)
    return dgate, dout if gate is None else gate.astype(dout.dtype)[..., None] * dout


def _compressed(x: Operands, cfg: config.Config, gate: jax.Array, dout: jax.Array) -> Any:
    """Gradients of gate [m, t, r], scaled q, k and v through the means of blocks."""
    tile = min(cfg.block_t, x.t)
    count = -(-x.t // tile)
    tokens = table.padded(x.table.tokens, count * tile)
    q, gate, dout = (pad(a.astype(x.dtype), 1, count * tile) for a in (x.q, gate, dout))
    kc, vc = x.means()
    exact = xla_precision(x.dtype)

    def row(m: Any) -> Any:
        def part(state: Any, i: Any) -> Any:
            q_tile, gate_tile, dout_tile = (loops.take(a[m], i, tile, 0) for a in (q, gate, dout))
            here = table.Tokens(*(loops.take(a, i, tile, 0) for a in tokens))
            seen = fwd.completed(here, x.n)
            some = seen.any(axis=1)[:, None]
            weights = fwd.compressed_weights(x, q_tile, kc[m], seen)
            dweights = jnp.einsum("tre,ne->trn", dout_tile, vc[m], precision=exact)
            dgate = jnp.where(some, (weights * dweights).sum(axis=-1), 0.0)
            dlogits = weights * (dweights - dgate[..., None]) * gate_tile[..., None]
            # what is not seen is 0 even where a query or cotangent is not finite
            dlogits = jnp.where(seen[:, None], dlogits, 0.0)
            kept = jnp.where(seen[:, None], weights * gate_tile[..., None], 0.0)
            dq = jnp.einsum("trn,nd->trd", dlogits, finite(kc[m]), precision=exact)
            dkc = jnp.einsum("trn,trd->nd", dlogits, finite(q_tile), precision=exact)
            dvc = jnp.einsum("trn,tre->ne", kept, finite(dout_tile), precision=exact)
            return (state[0] + dkc, state[1] + dvc), (dgate, dq)

        zeros = (jnp.zeros((x.n, x.d), x.dtype), jnp.zeros((x.n, x.e), x.dtype))
        (dkc, dvc), (dgate, dq) = loops.scan(count, part, loops.vary_like(zeros, x.q))
        return dgate, dq, dkc, dvc

    dgate, dq, dkc, dvc = loops.stack(x.m, row)
    dgate = dgate.reshape(x.m, count * tile, x.repeat)[:, : x.t]
    dq = dq.reshape(x.m, count * tile, x.repeat, x.d)[:, : x.t]
    dk = table.spread(x.table, dkc) * x.args.softmax_scale
    return dgate, dq, dk, table.spread(x.table, dvc)


def _selected(x: Operands, cfg: config.Config, residuals: Any, dout: jax.Array) -> Any:
    """Gradients of scaled q, k and v through the selected blocks."""
    out, lse, bits = residuals
    chunk = min(cfg.block_c, x.t)
    count = -(-x.t // chunk)
    delta = _gate(None, out, dout.astype(x.dtype))[0]
    # where a cotangent is not finite, nan weights carry that to the keys the row sees, no others
    spoiled = ~jnp.isfinite(dout).all(axis=-1)
    lse = jnp.where(spoiled, jnp.nan, softmax.shift(lse.transpose(0, 2, 1)))
    rows = [x.q, *map(x.queries, (dout, lse, delta))]
    q, dout, lse, delta = (pad(a, 1, count * chunk) for a in rows)
    bits = pad(bits.reshape(x.m, x.t, -1), 1, count * chunk)
    k, v = x.padded_keys(x.k), x.padded_keys(x.raw_v)

    def row(m: Any) -> Any:
        def part(state: Any, c: Any) -> Any:
            mask = select.unpack(loops.take(bits[m], c, chunk, 0), x.n)
            plan = schedule.make(mask, cfg.block_q, config.most_blocks(x.args))
            tile = [loops.take(a[m], c, chunk, 0) for a in (q, dout, lse, delta)]
            dq, *state = _visit(x, plan, tile, k[m], v[m], state, c * chunk)
            return tuple(state), dq

        zeros = tuple(jnp.zeros((x.t + x.size, width), x.dtype) for width in (x.d, x.e))
        (dk, dv), dq = loops.scan(count, part, loops.vary_like(zeros, x.q))
        return dq, dk[: x.t], dv[: x.t]

    dq, dk, dv = loops.stack(x.m, row)
    dq = dq.reshape(x.m, count * chunk, x.repeat, x.d)[:, : x.t]
    return dq, dk * x.args.softmax_scale, dv


def _visit(x: Operands, plan: schedule.Schedule, tile: Any, k, v, state: Any, offset: Any) -> Any:
    """Runs the tiles of a schedule; dq [c, r, d] of its queries, dk and dv of all keys."""
    q, dout, lse, delta = tile
    dtype = q.dtype

    def step(i: Any, state: Any) -> Any:
        dq, dk, dv = state
        tokens, j = plan.tile(i)
        q_tile, dout_tile, lse_tile, delta_tile = (
            schedule.rows(a, tokens) for a in (q, dout, lse, delta)
        )
        k_tile, v_tile = x.block(k, j), x.block(v, j)
        full = (tokens < q.shape[0])[:, None, None]
        seen = x.visible(tokens + offset, j) & full
        logits = multiply("crd,sd->crs", q_tile, k_tile) * x.args.softmax_scale
        weights = jnp.where(seen, jnp.exp(softmax.below(logits, lse_tile[..., None])), 0.0)
        dweights = multiply("cre,se->crs", dout_tile, v_tile)
        dlogits = jnp.where(seen, weights * (dweights - delta_tile[..., None]), 0.0).astype(dtype)
        dq = schedule.add(dq, tokens, multiply("crs,sd->crd", dlogits, finite(k_tile)))
        dk_tile = multiply("crs,crd->sd", dlogits, finite(q_tile))
        dv_tile = multiply("crs,cre->se", weights.astype(dtype), finite(dout_tile))
        return dq, _add(x, dk, dk_tile, j), _add(x, dv, dv_tile, j)

    dq = loops.vary_like(jnp.zeros(q.shape, x.dtype), q)
    return jax.lax.fori_loop(jnp.int32(0), plan.count, step, (dq, *state))


def _add(x: Operands, total: jax.Array, block: jax.Array, j: Any) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(total, x.block(total, j) + block, x.starts[j], 0)
