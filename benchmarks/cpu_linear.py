"""`gla` and `lightning_attention` on a CPU beside the plain recurrence, a token at a time."""

import functools

import jax
import jax.numpy as jnp

from ejkernel.bench import Bar, Peer, Workload
from ejkernel.kernels._specs._work_linear import gated

_HEADS, _SIZE = 4, 64
_LAYER = {"layer_idx": 1, "num_layers": 4}


def tokens(t, gates, more):
    return functools.partial(gated, b=1, t=t, h=_HEADS, d=_SIZE, gates=gates, more=more)


def one_token(dtype, key, batch):
    """A step of decoding, with the state before it."""
    made = gated(dtype, key, batch, 1, _HEADS, _SIZE, ("g",), {"return_state": True})
    state = jax.random.normal(jax.random.fold_in(key, 9), (batch, _HEADS, _SIZE, _SIZE))
    return made | {"initial_state": state}


def plain_step(values):
    q, k, v, g = (values[name][:, 0] for name in ("query", "key", "value", "g"))
    state = jnp.exp(g)[..., None] * values["initial_state"] + k[..., None] * v[..., None, :]
    return jnp.einsum("bhd,bhde->bhe", q * _SIZE**-0.5, state)[:, None], state


STEP = Peer("one step", ("gla",), plain_step)


def decode(batch):
    return Workload(
        "gla",
        f"decode B{batch} H4 d64",
        functools.partial(one_token, batch=batch),
        modes=("fwd",),
        peers=(STEP,),
        known_peers=False,
        bars=(Bar(0.9, "one step"),),
    )


WORKLOADS = [
    Workload(
        "gla",
        "B1 T4096 H4 d64",
        tokens(4096, ("g",), {}),
        # forward alone the plain scan keeps its one state in the cache: there is nothing to win
        bars=(Bar(0.6, "lax.scan", modes=("fwd",)), Bar(5.0, "lax.scan", modes=("fwd+bwd",))),
    ),
    Workload(
        "lightning_attention",
        "B1 T4096 H4 d64",
        tokens(4096, (), _LAYER),
        modes=("fwd+bwd",),
        bars=(Bar(5.0, "lax.scan"),),
    ),
    decode(1),
    decode(16),
]
