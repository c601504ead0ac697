"""The oracle of recurrent cells: one step at a time, in float32 at least."""

import jax
import jax.numpy as jnp

from ejkernel.kernels._specs import recurrent as spec


def recurrent(args) -> tuple[jax.Array, ...]:
    """Outputs, and the final states h and, of an LSTM, c."""
    wide = jnp.promote_types(args.inputs.dtype, jnp.float32)
    outs, states = [], []
    for p, backwards in enumerate(spec.directions(args)):
        out, state = _direction(args, p, backwards, wide)
        outs.append(out)
        states.append(state)
    stack = jnp.stack if args.bidirectional else lambda x: x[0]
    finals = [stack(s) for s in zip(*states, strict=True)]
    starts = (args.hidden, args.cell)[: len(finals)]
    finals = [s.astype(start.dtype) for s, start in zip(finals, starts, strict=True)]
    return (jnp.concatenate(outs, axis=-1).astype(args.inputs.dtype), *finals)


def _direction(args, p, backwards, wide):
    weight, bias = _pick(args, p, wide)
    starts = [args.hidden] if args.cell is None else [args.hidden, args.cell]
    state = tuple((s[p] if args.bidirectional else s).astype(wide) for s in starts)
    t = args.inputs.shape[1]
    lengths = jnp.full(1, t) if args.lengths is None else args.lengths
    seen = jnp.broadcast_to(jnp.arange(t)[:, None] < lengths[None], (t, args.inputs.shape[0]))
    xs = jnp.where(seen[..., None], args.inputs.swapaxes(0, 1).astype(wide), 0)

    def step(state, x):
        x, seen = x
        new = _cell(args, _dot(x, weight["w_ih"]) + bias["b_ih"], weight["w_hh"], bias, state)
        state = tuple(jnp.where(seen[:, None], n, s) for n, s in zip(new, state, strict=True))
        return state, jnp.where(seen[:, None], new[0], 0)

    state, out = jax.lax.scan(step, state, (xs, seen), reverse=backwards)
    return out.swapaxes(0, 1), state


def _pick(args, p, wide):
    weight = {n: getattr(args, n)[p].astype(wide) for n in ("w_ih", "w_hh")}
    biases = {n: getattr(args, n) for n in ("b_ih", "b_hh")}
    zero = jnp.zeros((), wide)
    return weight, {n: zero if b is None else b[p].astype(wide)[None] for n, b in biases.items()}


def _dot(x, w):
    return jnp.einsum("bi,mi->bm", x, w, precision=jax.lax.Precision.HIGHEST)


def _cell(args, x, w_hh, bias, state):
    act, gate = spec.function(args.activation), spec.function(args.gate_activation)
    h = state[0]
    y = _dot(h, w_hh) + bias["b_hh"]
    if args.cell_type == "rnn":
        return (act(x + y),)
    if args.cell_type == "gru":
        (xr, xz, xn), (yr, yz, yn) = jnp.split(x, 3, axis=-1), jnp.split(y, 3, axis=-1)
        r, z = gate(xr + yr), gate(xz + yz)
        n = act(xn + r * yn)
        return ((1 - z) * n + z * h,)
    i, f, g, o = jnp.split(x + y, 4, axis=-1)
    c = gate(f) * state[1] + gate(i) * act(g)
    return gate(o) * act(c), c
