"""Sparse attention on a GPU: block-sparse beside our dense kernel, native sparse beside FLA.

ejkernel bench --workloads benchmarks/gpu_sparse.py --tune 60 --bars

A dense peer computes every pair, so only its time is compared.
"""

import functools

import jax.numpy as jnp
import numpy as np

from ejkernel.bench import Bar, Peer, Workload
from ejkernel.kernels._specs import _work_sparse
from ejkernel.kernels._specs._work_attention import qkv
from ejkernel.modules import flash_attention

_TRITON = "triton/gpu"
_TOKENS, _HEADS, _DIM, _SIZE = 32768, 16, 128, 128
_BOTH = ("fwd+bwd",)


def dense(values, causal, platform="triton"):
    arrays = (values[name] for name in ("query", "key", "value"))
    return flash_attention(*arrays, causal=causal, platform=platform)


def dense_peer(op, name, **how):
    run = functools.partial(dense, **how)
    return Peer(name, (op,), run, agrees=False, same_work=False, backend="gpu")


FULL = dense_peer("blocksparse_attention", "our flash_attention, full", causal=False)
CAUSAL, FASTEST = (
    dense_peer("native_sparse_attention", name, causal=True, platform=platform)
    for name, platform in (
        ("our flash_attention, causal", "triton"),
        ("our fastest flash_attention, causal", "auto"),
    )
)


def blocks(share, bars, heads=None):
    """So many of the blocks of each row, at random; `heads`: each has a mask of its own."""
    count = _TOKENS // _SIZE

    def values(dtype, key):
        made = qkv(dtype, key, 1, _TOKENS, _HEADS, _HEADS, _DIM, {})
        rng = np.random.default_rng(0)
        drawn = rng.random((heads or 1, count, count)).argsort(axis=2) < count * share
        return made | {"sparsity_mask": jnp.asarray(drawn), "block_size": _SIZE}

    masks = "a mask a head" if heads else "one mask"
    return Workload(
        "blocksparse_attention",
        f"B1 S{_TOKENS} H{_HEADS} d{_DIM}, {share:g} of blocks of {_SIZE}, {masks}",
        values,
        dtype="bfloat16",
        peers=(FULL,),
        known_peers=False,
        bars=bars,
    )


def native(length, bars, modes, peers=()):
    """Compressed and selected, 16 blocks of 64 for each token and key head."""
    return Workload(
        "native_sparse_attention",
        f"T{length} H64/4 d128, 16 of 64, compressed and selected",
        functools.partial(_work_sparse._nsa, t=length, h=64, g=4, d=128, count=16, gates=True),
        dtype="bfloat16",
        modes=modes,
        peers=peers,
        known_peers=not peers,
        bars=bars,
    )


_EIGHTH = (
    Bar(4.5, FULL.name, of=_TRITON, modes=("fwd",)),
    Bar(4.0, FULL.name, of=_TRITON, modes=_BOTH),
)
_FLA = Bar(1.2, "FLA", of=_TRITON, modes=("fwd",))

WORKLOADS = [
    blocks(1 / 8, _EIGHTH),
    blocks(1 / 8, _EIGHTH, heads=_HEADS),
    blocks(1.0, (Bar(1 / 1.2, FULL.name, of=_TRITON),)),
    native(8192, (_FLA, Bar(6.0, "FLA", of=_TRITON, modes=_BOTH)), ("fwd", "fwd+bwd")),
    native(32768, (_FLA,), ("fwd",)),
    native(65536, (Bar(2.5, CAUSAL.name, of=_TRITON),), ("fwd",), peers=(CAUSAL, FASTEST)),
]
