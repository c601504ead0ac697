"""The oracle of the linear recurrence: one step at a time, in float32 at least."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np


def linear_recurrence(args) -> tuple[jax.Array, ...]:
    """Output, and the last states when asked for."""
    return recur(args, g=args.g, gk=args.gk, gv=args.gv, g_gamma=args.g_gamma)


def recur(args, *, g=None, gk=None, gv=None, g_gamma=None) -> tuple[jax.Array, ...]:
    """The recurrence of each row, or of each sequence of a packed row."""
    batch, t, _, d = args.query.shape
    wide = jnp.promote_types(args.query.dtype, jnp.float32)
    xs = [x.astype(wide) for x in (args.query, args.key, args.value)]
    heads, e = max(x.shape[2] for x in xs), args.value.shape[-1]
    q, k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in xs)
    rows = jnp.zeros((batch, t, heads, d), wide)
    columns = jnp.zeros((batch, t, heads, e), wide)
    rows = rows if g is None else rows + g.astype(wide)[..., None]
    rows = rows if g_gamma is None else rows + g_gamma.astype(wide)[None, None, :, None]
    rows = rows if gk is None else rows + gk.astype(wide)
    columns = columns if gv is None else columns + gv.astype(wide)
    xs = (q * args.softmax_scale, k, v, rows, columns)

    packed = args.cu_seqlens is not None
    spans = [(0, t)]
    if packed:
        ends = np.asarray(args.cu_seqlens).tolist()
        spans = list(itertools.pairwise(ends))
    count = len(spans) if packed else batch
    state = args.initial_state
    state = jnp.zeros((count, heads, d, e), wide) if state is None else state.astype(wide)
    out, last = jnp.zeros((batch, t, heads, e), wide), []
    for n, (start, end) in enumerate(spans):
        h = state[n : n + 1] if packed else state
        o, h = _scan(h, [x[:, start:end] for x in xs], args.reverse)
        out = out.at[:, start:end].set(o)
        last.append(h)
    out = out.astype(args.query.dtype)
    last = jnp.concatenate(last) if last else state
    return (out, last) if args.return_state else (out,)


def _scan(h, xs, reverse):
    exact = jax.lax.Precision.HIGHEST

    def step(h, x):
        q, k, v, rows, columns = x
        h = h * jnp.exp(rows)[..., None] * jnp.exp(columns)[..., None, :]
        h = h + k[..., None] * v[..., None, :]
        return h, jnp.einsum("bhd,bhde->bhe", q, h, precision=exact)

    h, out = jax.lax.scan(step, h, [x.swapaxes(0, 1) for x in xs], reverse=reverse)
    return out.swapaxes(0, 1), h
