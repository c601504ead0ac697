"""Native sparse attention as a formula that JAX can differentiate any number of times.

Forward mode and second order use it. A block of query rows is computed against all keys and
recomputed when differentiated, so memory stays at a few rows of logits.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.precision import xla_precision
from ejkernel.kernels._specs import native_sparse_attention as spec
from ejkernel.kernels._xla._blocks import loops, softmax
from ejkernel.kernels._xla._blocks.logits import pad
from ejkernel.kernels._xla.native_sparse_attention import fwd, select, table

_ROWS = 256


def native_sparse_attention(args: Any) -> tuple[jax.Array]:
    """Outputs of `native_sparse_attention`."""
    if spec.is_empty(args):
        return (jnp.zeros((*args.query.shape[:3], args.value.shape[-1]), args.query.dtype),)
    args = fwd.without_padding(args)
    have, x = spec.branches(args), fwd.Operands(args)
    size = min(_ROWS, x.t)
    count = -(-x.t // size)

    def cut(a: Any) -> Any:
        return None if a is None else pad(a, 1, count * size)

    q, tokens = cut(x.q), table.padded(x.table.tokens, count * size)
    lists = [None if a is None else cut(x.keys(a)) for a in (args.block_indices, args.block_counts)]
    gates = [
        None if a is None else cut(x.queries(a)).astype(x.dtype)
        for a in (args.g_cmp, args.g_slc, args.g_swa)
    ]
    kc, vc = x.means()
    # what nobody may see must not reach a derivative as 0 * nan
    inside = (jnp.asarray(x.table.tokens.own) >= 0)[None, :, None]
    k, v = jnp.where(inside, x.k, 0), jnp.where(inside, x.v, 0)
    twins = jax.vmap(lambda rows: select.twins(x.table, rows))(jax.lax.stop_gradient(kc))

    @jax.checkpoint
    def part(m: Any, i: Any) -> jax.Array:
        here = table.Tokens(*(loops.take(a, i, size, 0) for a in tokens))
        more = [None if a is None else loops.take(a[m], i, size, 0) for a in lists]
        gate: list[Any] = [
            None if a is None else loops.take(a[m], i, size, 0)[..., None] for a in gates
        ]
        q_rows = loops.take(q[m], i, size, 0)
        weights = fwd.compressed_weights(x, q_rows.astype(x.dtype), kc[m], fwd.completed(here, x.n))
        out = jnp.zeros((size, x.repeat, x.e), x.dtype)
        if have.compressed:
            values = jnp.einsum("trn,ne->tre", weights, vc[m], precision=xla_precision(x.dtype))
            out = out + gate[0] * values
        position = (i * size + jnp.arange(size, dtype=jnp.int32))[:, None]
        key = jnp.arange(x.t, dtype=jnp.int32)[None]
        own = jnp.asarray(x.table.tokens.own)
        causal = (key <= position) & (own[None] >= here.first[:, None]) & (here.own >= 0)[:, None]
        if have.selected:
            importance = jax.lax.stop_gradient(weights.sum(axis=1))[:, twins[m]]
            blocks = fwd.choose(x, importance, here, more)
            seen = causal & blocks[:, jnp.maximum(own, 0)]
            values = _dense(x, q_rows, k[m], v[m], seen)
            out = out + (values if gate[1] is None else gate[1] * values)
        if have.window:
            seen = causal & (position - key < args.window_size)
            values = _dense(x, q_rows, k[m], v[m], seen)
            out = out + gate[2] * values
        return out

    rows = loops.stack(x.m, lambda m: loops.stack(count, lambda i: part(m, i)))
    out = rows.reshape(x.m, count * size, x.repeat, x.e)[:, : x.t]
    return (x.from_queries(out).astype(args.query.dtype),)


def _dense(x: fwd.Operands, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Attention of queries [t, r, d] over the keys [t, s] that they see."""
    exact = xla_precision(q.dtype)
    dots = jnp.einsum("trd,sd->trs", q, k, precision=exact, preferred_element_type=x.dtype)
    logits = jnp.where(seen[:, None], dots * x.args.softmax_scale, -jnp.inf)
    peak = softmax.shift(jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
    weights = jnp.exp(softmax.below(logits, peak))
    total = weights.sum(axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0.0, 1.0, total)).astype(v.dtype)
    return jnp.einsum("trs,se->tre", weights, v, precision=exact, preferred_element_type=x.dtype)
