"""`grouped_matmul` and `mean_pooling` on a GPU, beside a dense product, a copy and other libraries.

ejkernel bench --workloads benchmarks/gpu_matmul.py --tune 60 --bars
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.bench import Bar, Peer, Workload
from ejkernel.bench._workloads import BOTH, FWD
from ejkernel.kernels._specs._work_matmul import grouped

_TRITON, _HOPPER = "triton/gpu", "pallas/gpu"
_DENSE, _COPY = "dense matmul", "copy"


def _product(values, grads, mode, cotangent):
    """As many operations in one product: all rows times the first matrix."""
    lhs, matrix = values["lhs"], jnp.array(values["rhs"][0])
    if mode == FWD:
        forward = jax.jit(jnp.matmul)
        return lambda: forward(lhs, matrix)

    @jax.jit
    def both(lhs, matrix, cotangent):
        out, pull = jax.vjp(jnp.matmul, lhs, matrix)
        return out, pull(cotangent)

    return lambda: both(lhs, matrix, cotangent)


def _copied(values, grads, mode, cotangent):
    """As many bytes: a copy reads and writes what pooling only reads, and its backward writes."""
    x = values["inputs"].reshape(-1)
    x = x[: x.size // 2] if mode == FWD else x
    copy, held = jax.jit(jnp.copy), jnp.array(x)
    return lambda: copy(held)


_PEERS = {
    "grouped_matmul": Peer(_DENSE, ("grouped_matmul",), build=_product, agrees=False),
    "mean_pooling": Peer(_COPY, ("mean_pooling",), build=_copied, agrees=False),
}


def bars(beside, forward, both, entries=(_TRITON,)):
    """Least shares of a ceiling; `both` is of forward and backward together."""
    shares = ((forward, FWD), (both, BOTH))
    return tuple(
        Bar(least, beside, of=entry, modes=(mode,)) for entry in entries for least, mode in shares
    )


def skewed(dtype, key, m, k, n, g):
    """Group sizes that fall as 1 / (1 + rank), in no order, and one group without rows."""
    weights = 1.0 / (1.0 + np.random.default_rng(1).permutation(g))
    weights[0] = 0.0
    ends = np.floor(m * np.cumsum(weights) / weights.sum() + 0.5)
    sizes = np.diff(ends, prepend=0.0)
    return grouped(dtype, key, m, k, n, g) | {"group_sizes": jnp.asarray(sizes, jnp.int32)}


def product(name, sizes, shares, values=grouped):
    m, k, n, g = sizes
    return Workload(
        "grouped_matmul",
        name,
        functools.partial(values, m=m, k=k, n=n, g=g),
        dtype="bfloat16",
        peers=(_PEERS["grouped_matmul"],),
        bars=bars(_DENSE, *shares, entries=(_TRITON, _HOPPER)),
    )


def pooled(dtype, key, shape, chunk, packed, masked):
    keys = jax.random.split(key, 2)
    made = {"inputs": jax.random.normal(keys[0], shape, jnp.float32).astype(dtype)}
    if chunk is not None:
        made["chunk_size"] = chunk
    if packed:
        made["cu_seqlens"] = jnp.asarray(np.linspace(0, shape[1], packed + 1), jnp.int32)
    if masked:
        made["mask"] = jax.random.bernoulli(keys[1], 0.9, shape[:2])
    return made


def pool(name, shares, chunk=None, packed=0, masked=False):
    given = {"shape": (1, 65536, 16, 128), "chunk": chunk, "packed": packed, "masked": masked}
    return Workload(
        "mean_pooling",
        f"T65536 H16 d128{name}",
        functools.partial(pooled, **given),
        dtype="bfloat16",
        peers=(_PEERS["mean_pooling"],),
        bars=bars(_COPY, *shares) if shares else (),
    )


WORKLOADS = [
    # forward at 0.62 and both gradients at 0.55 of a dense product are 0.57 together
    product("M32768 E8 4096x4096", (32768, 4096, 4096, 8), (0.62, 0.57)),
    product("M65536 E64 4096x4096", (65536, 4096, 4096, 64), (0.50, 0.50)),
    product("M65536 E64 4096x4096 skewed", (65536, 4096, 4096, 64), (0.50, 0.50), skewed),
    product("M8192 E8 4096x4096", (8192, 4096, 4096, 8), (0.62, 0.57)),
    pool(" chunk 64", (0.78, 0.68), chunk=64),
    pool("", (0.78, 0.68)),
    pool(" chunk 64 masked", None, chunk=64, masked=True),
    pool(" 8 sequences", None, packed=8),
    pool(" 8 sequences chunk 64", None, chunk=64, packed=8),
]
