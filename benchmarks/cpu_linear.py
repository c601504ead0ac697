"""`gla` and `lightning_attention` on CPU beside the plain recurrence: one step at a time, in JAX.

Correctness first: nothing is timed before both agree. Results go to benchmarks/results/.
"""

import functools

import common
import jax
import jax.numpy as jnp

from ejkernel.modules import gla, lightning_attention

HEADS, SIZE = 4, 64
LAYER = {"layer_idx": 1, "num_layers": 4}


def plain(query, key, value, gates):
    """The recurrence, with one log gate for each row of the state."""

    def step(h, x):
        q, k, v, g = x
        h = jnp.exp(g)[..., None] * h + k[..., None] * v[..., None, :]
        return h, jnp.einsum("bhd,bhde->bhe", q * SIZE**-0.5, h)

    tokens = [x.swapaxes(0, 1) for x in (query, key, value, gates)]
    start = jnp.zeros((query.shape[0], HEADS, SIZE, SIZE))
    return jax.lax.scan(step, start, tokens)[1].swapaxes(0, 1)


def plain_lightning(query, key, value):
    decays = -(8 / HEADS) * (1 - LAYER["layer_idx"] / LAYER["num_layers"]) * jnp.arange(HEADS)
    gates = jnp.broadcast_to(decays[:, None], (*query.shape[:3], 1))
    return plain(query, key, value, gates)


def plain_step(query, key, value, gates, state):
    q, k, v, g = (x[:, 0] for x in (query, key, value, gates))
    state = jnp.exp(g)[..., None] * state + k[..., None] * v[..., None, :]
    return jnp.einsum("bhd,bhde->bhe", q * SIZE**-0.5, state)[:, None], state


def our_step(query, key, value, gates, state):
    return gla(query, key, value, gates, initial_state=state, return_state=True)


def arrays(batch, tokens, count):
    """Query, key, value, gates and more arrays of their shape."""
    keys = jax.random.split(jax.random.key(tokens), count)
    made = [jax.random.normal(key, (batch, tokens, HEADS, SIZE)) for key in keys]
    made[3] = jax.nn.log_sigmoid(made[3] + 2.0)
    return made


def train_gla(tokens):
    both = functools.partial(common.with_gradient, count=4)
    return both(gla), both(plain), arrays(1, tokens, 5)


def train_lightning(tokens):
    both = functools.partial(common.with_gradient, count=3)
    ours = functools.partial(lightning_attention, **LAYER)
    *xs, _, dout = arrays(1, tokens, 5)
    return both(ours), both(plain_lightning), [*xs, dout]


def forward_gla(tokens):
    return gla, plain, arrays(1, tokens, 4)


def decode(batch):
    state = jax.random.normal(jax.random.key(0), (batch, HEADS, SIZE, SIZE))
    return our_step, plain_step, [*arrays(batch, 1, 4), state]


COMPARISONS = [
    common.Comparison("gla fwd+bwd t=4096", 5.0, lambda: train_gla(4096), iterations=1),
    common.Comparison("lightning fwd+bwd t=4096", 5.0, lambda: train_lightning(4096), iterations=1),
    # forward alone the plain scan keeps its one state in the cache: there is nothing to win
    common.Comparison("gla fwd t=4096", 0.6, lambda: forward_gla(4096)),
    common.Comparison("gla decode t=1 b=1", 0.9, lambda: decode(1), iterations=50),
    common.Comparison("gla decode t=1 b=16", 0.9, lambda: decode(16), iterations=50),
]

if __name__ == "__main__":
    shape = f"batch 1 unless said, {HEADS} heads, d=e={SIZE}, float32; milliseconds"
    common.main(__doc__, "cpu_linear", shape, COMPARISONS)
