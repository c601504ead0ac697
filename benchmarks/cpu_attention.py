"""`flash_attention` on a CPU beside `jax.nn.dot_product_attention`: time, memory, eager calls."""

import functools

from ejkernel.bench import Bar, Workload
from ejkernel.kernels._specs._work_attention import qkv

# (tokens, causal) -> mode -> the least ratio peer / ours that we promise
_BARS = {
    (128, True): {"fwd": 0.8},
    (256, True): {"fwd": 0.8, "fwd+bwd": 0.8},
    (256, False): {"fwd": 0.8},
    (1024, True): {"fwd": 2.5, "fwd+bwd": 2.5},
    (1024, False): {"fwd": 0.9, "fwd+bwd": 0.9},
    (4096, True): {"fwd": 2.5, "fwd+bwd": 2.5},
    (4096, False): {"fwd": 0.9},
}


def workload(tokens, causal, modes, **more):
    name = f"B1 S{tokens} H8 d64 {'causal' if causal else 'full'}"
    sizes = (1, tokens, 8, 8, 64, {"causal": causal})
    values = lambda dtype, key: qkv(dtype, key, *sizes)
    return Workload("flash_attention", name, values, modes=tuple(modes), **more)


def bars(modes):
    return tuple(Bar(least, "jax.nn", modes=(mode,)) for mode, least in modes.items())


small = functools.partial(qkv, b=1, t=8, h=1, g=1, d=64, options={"causal": True})

WORKLOADS = [
    *(workload(*shape, modes, bars=bars(modes)) for shape, modes in _BARS.items()),
    # temporaries of forward and backward
    workload(16384, True, ("fwd+bwd",), quantity="bytes", bars=(Bar(8.0, "jax.nn"),)),
    # microseconds that an eager call costs over the jitted one
    Workload(
        "flash_attention",
        "B1 S8 H1 d64 causal",
        small,
        modes=("fwd",),
        quantity="us",
        known_peers=False,
        bars=(Bar(40.0),),
    ),
]
