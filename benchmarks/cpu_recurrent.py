"""`recurrent` on a CPU beside a plain `lax.scan` that JAX differentiates."""

import functools

from ejkernel.bench import Bar, Workload
from ejkernel.kernels._specs._work_linear import cell

_GRADS = ("inputs", "hidden", "weights")


def workload(cell_type, bars):
    values = functools.partial(cell, cell_type=cell_type, b=16, t=256, i=256, d=256)
    promised = tuple(Bar(least, "lax.scan", modes=(mode,)) for mode, least in bars.items())
    name, modes = f"{cell_type.upper()} B16 T256 256", tuple(bars)
    return Workload("recurrent", name, values, grads=_GRADS, modes=modes, bars=promised)


WORKLOADS = [workload("lstm", {"fwd": 0.8, "fwd+bwd": 1.5}), workload("gru", {"fwd+bwd": 1.0})]
