"""`recurrent` on a GPU beside a plain `lax.scan` that JAX differentiates, and torch's cuDNN.

ejkernel bench --workloads benchmarks/gpu_recurrent.py --tune 60 --bars
"""

import dataclasses
import functools

from ejkernel.bench import Bar, Workload, _peers
from ejkernel.bench._workloads import BOTH, FWD
from ejkernel.kernels._specs._work_linear import cell

_GRADS = ("inputs", "hidden", "weights")
_BATCH, _STEPS = 64, 512
# Times of a plain scan: forward at most 1.05; with backward by the features of the state.
_FORWARD, _GRADIENTS = 1.05, {256: 0.8, 512: 0.8, 1024: 0.6}


def _peer(peer):
    # the plain scan rounds its states to the dtype of the inputs at every step: gradients of
    # weights are off by 4 % of the largest in bfloat16, after 256 steps of 128 features
    return dataclasses.replace(peer, agrees=False) if peer.name == "lax.scan" else peer


def workload(cell_type, d, dtype):
    name = f"{cell_type.upper()} B{_BATCH} T{_STEPS} {d} {dtype}"
    sizes = {"b": _BATCH, "t": _STEPS, "i": d, "d": d}
    bars = ()
    if dtype == "bfloat16" and d in _GRADIENTS:
        times = {FWD: _FORWARD, BOTH: _GRADIENTS[d]}
        bars = tuple(Bar(1 / most, "lax.scan", modes=(mode,)) for mode, most in times.items())
    return Workload(
        "recurrent",
        name,
        functools.partial(cell, cell_type=cell_type, **sizes),
        dtype=dtype,
        grads=_GRADS,
        peers=tuple(_peer(peer) for peer in _peers.known("recurrent", "gpu")),
        known_peers=False,
        bars=bars,
    )


WORKLOADS = [
    workload(cell_type, d, dtype)
    for cell_type in ("lstm", "gru")
    for d in (128, 256, 512, 1024)  # at 128, weights stay in a multiprocessor
    for dtype in ("bfloat16", "float16")
]
