"""`recurrent` on CPU beside a plain `lax.scan` that JAX differentiates: one table, ratios.

The peer projects each step's input inside the scan, as one writes it down. Nothing is timed before
both agree.
"""

import functools

import common
import jax
import jax.numpy as jnp

from ejkernel.modules import recurrent

_BATCH, _STEPS, _FEATURES, _HIDDEN = 16, 256, 256, 256
_GATES = {"lstm": 4, "gru": 3}


def lstm(state, x, y):
    i, f, g, o = jnp.split(x + y, 4, axis=-1)
    c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def gru(state, x, y):
    (xr, xz, xn), (yr, yz, yn) = jnp.split(x, 3, axis=-1), jnp.split(y, 3, axis=-1)
    r, z = jax.nn.sigmoid(xr + yr), jax.nn.sigmoid(xz + yz)
    return ((1 - z) * jnp.tanh(xn + r * yn) + z * state[0],)


def plain(cell, inputs, state, weights):
    def step(state, x):
        x = x @ weights["w_ih"].T + weights["b_ih"]
        y = state[0] @ weights["w_hh"].T + weights["b_hh"]
        state = cell(state, x, y)
        return state, state[0]

    state, out = jax.lax.scan(step, state, inputs.swapaxes(0, 1))
    return out.swapaxes(0, 1), state


def ours(cell_type, inputs, state, weights):
    out, last = recurrent(inputs, state if cell_type == "lstm" else state[0], weights, cell_type)
    return out, last if cell_type == "lstm" else (last,)


def arrays(cell_type):
    """Inputs, states, weights, and cotangents of outputs and states."""
    keys = iter(jax.random.split(jax.random.key(0), 12))
    rows, bound = _GATES[cell_type] * _HIDDEN, _HIDDEN**-0.5

    def uniform(*shape):
        return jax.random.uniform(next(keys), shape, minval=-bound, maxval=bound)

    def states():
        count = 2 if cell_type == "lstm" else 1
        return tuple(jax.random.normal(next(keys), (_BATCH, _HIDDEN)) for _ in range(count))

    weights = {"w_ih": uniform(rows, _FEATURES), "w_hh": uniform(rows, _HIDDEN)}
    weights |= {"b_ih": uniform(rows), "b_hh": uniform(rows)}
    inputs = jax.random.normal(next(keys), (_BATCH, _STEPS, _FEATURES))
    dout = jax.random.normal(next(keys), (_BATCH, _STEPS, _HIDDEN))
    return [inputs, states(), weights, (dout, states())]


def make(cell_type, mode):
    cells = {"lstm": lstm, "gru": gru}
    pair = functools.partial(ours, cell_type), functools.partial(plain, cells[cell_type])
    if mode == "fwd+bwd":
        fns = [common.with_gradient(fn, 3) for fn in pair]
    else:
        fns = [lambda *xs, fn=fn: fn(*xs[:3]) for fn in pair]
    return *fns, arrays(cell_type)


def main():
    bars = {("lstm", "fwd+bwd"): 1.5, ("gru", "fwd+bwd"): 1.0, ("lstm", "fwd"): 0.8}
    comparisons = [
        common.Comparison(" ".join(key), bar, functools.partial(make, *key), tolerance=5e-5)
        for key, bar in bars.items()
    ]
    shape = f"batch {_BATCH}, {_STEPS} steps, {_FEATURES} features, {_HIDDEN} hidden, float32; ms"
    common.main(__doc__, "cpu_recurrent", shape, comparisons)


if __name__ == "__main__":
    main()
