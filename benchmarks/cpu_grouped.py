"""`grouped_matmul` on CPU beside `jax.lax.ragged_dot`: one run, one table, ratios.

Correctness first: nothing is timed before both agree. Results go to benchmarks/results/.
"""

import common
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import grouped_matmul

ROWS, SIZE, GROUPS = 4096, 256, 64


def arrays():
    """Rows, matrices, sizes of groups that differ, and a cotangent."""
    keys = jax.random.split(jax.random.key(0), 3)
    lhs, dout = (jax.random.normal(key, (ROWS, SIZE)) for key in keys[:2])
    rhs = jax.random.normal(keys[2], (GROUPS, SIZE, SIZE))
    sizes = np.random.default_rng(0).multinomial(ROWS, np.full(GROUPS, 1 / GROUPS))
    return lhs, rhs, jnp.asarray(sizes, jnp.int32), dout


def forward():
    return grouped_matmul, jax.lax.ragged_dot, arrays()[:3]


def both():
    ours, peer = (common.with_gradient(f, 2) for f in (grouped_matmul, jax.lax.ragged_dot))
    return ours, peer, arrays()


COMPARISONS = [
    common.Comparison("fwd", 3.0, forward, iterations=3),
    common.Comparison("fwd+bwd", 3.0, both, iterations=2),
]

if __name__ == "__main__":
    shape = f"m={ROWS}, k=n={SIZE}, {GROUPS} groups, float32; milliseconds"
    common.main(__doc__, "cpu_grouped", shape, COMPARISONS)
