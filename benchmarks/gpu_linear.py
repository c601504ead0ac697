"""`gla` and `lightning_attention` on a GPU beside FLA and jax-linear-attention, and decoding.

ejkernel bench --workloads benchmarks/gpu_linear.py --tune 60 --bars
"""

import functools
import itertools

import jax
import jax.numpy as jnp

from ejkernel.bench import Bar, Peer, Workload
from ejkernel.bench._workloads import AUTO, BEST
from ejkernel.kernels._specs._work_linear import gated

_TRITON = "triton/gpu"
_TOKENS = 16384
_LENGTHS = (2048, 4096, 16384)
_MODELS = ((16, 128), (32, 64))  # heads, head size
_LAYER = {"layer_idx": 3, "num_layers": 12}
# rows, length, heads and head size of the bar in milliseconds
_TIMED = (4, 4096, 16, 128)
_OURS = Bar(0.98, BEST, of=AUTO)
_DECODE_BATCH = 128  # sequences that decode together


def sizes(model, length):
    heads, d = model
    return _TOKENS // length, length, heads, d


def name(batch, length, heads, d):
    return f"B{batch} T{length} H{heads} d{d}"


def gla(model, length):
    size = sizes(model, length)
    return Workload(
        "gla",
        name(*size),
        lambda dtype, key: gated(dtype, key, *size, ("g",), {}),
        dtype="bfloat16",
        bars=(Bar(1.0, "FLA", of=_TRITON), _OURS),
    )


def lightning(model, length):
    size = sizes(model, length)
    bars = (Bar(1.2, "FLA", of=_TRITON, modes=("fwd",)), _OURS)
    if size == _TIMED:
        bars += (Bar(1.8, of=_TRITON, modes=("fwd+bwd",)),)
    return Workload(
        "lightning_attention",
        name(*size),
        lambda dtype, key: gated(dtype, key, *size, (), _LAYER),
        dtype="bfloat16",
        bars=bars,
    )


def one_token(dtype, key, batch, heads, d):
    """A step of decoding, with the state before it."""
    made = gated(dtype, key, batch, 1, heads, d, ("g",), {"return_state": True})
    state = jax.random.normal(jax.random.fold_in(key, 9), (batch, heads, d, d))
    return made | {"initial_state": state}


# a step reads and writes the states, and hardly anything else
COPY = Peer(
    "copy of the states",
    ("gla",),
    lambda values: jnp.copy(values["initial_state"]),
    agrees=False,
    same_work=False,
)


def decode(model, batch=_DECODE_BATCH, repeats=16):
    heads, d = model
    return Workload(
        "gla",
        f"decode B{batch} H{heads} d{d}",
        functools.partial(one_token, batch=batch, heads=heads, d=d),
        dtype="bfloat16",
        modes=("fwd",),
        peers=(COPY,),
        known_peers=False,
        bars=(Bar(0.7, "copy of the states", of=_TRITON), _OURS),
        carried=(("initial_state", "state"),),
        repeats=repeats,
    )


def shapes():
    every = list(itertools.product(_MODELS, _LENGTHS))
    return [*(gla(*one) for one in every), *(lightning(*one) for one in every)]


WORKLOADS = [*shapes(), *map(decode, _MODELS)]
