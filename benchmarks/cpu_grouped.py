"""`grouped_matmul` on a CPU beside `jax.lax.ragged_dot`."""

import functools

from ejkernel.bench import Bar, Workload
from ejkernel.kernels._specs._work_matmul import grouped

WORKLOADS = [
    Workload(
        "grouped_matmul",
        "M4096 E64 256x256",
        functools.partial(grouped, m=4096, k=256, n=256, g=64),
        bars=(Bar(3.0, "lax.ragged_dot"),),
    ),
]
