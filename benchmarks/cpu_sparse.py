"""`blocksparse_attention` on a CPU beside our dense `flash_attention`: what left-out blocks save.

An eighth of the blocks is listed. The peer computes every block, so only its time is compared.
"""

import jax.numpy as jnp

from ejkernel.bench import Bar, Peer, Workload
from ejkernel.kernels._specs._work_attention import qkv
from ejkernel.modules import block_mask, flash_attention

_TOKENS, _HEADS, _DIM = 4096, 8, 64


def table(size, heads):
    """An eighth of the blocks, chosen at random for each row of blocks (and head)."""
    count = _TOKENS // size // 8
    tables = [
        block_mask.random(count, seed).build(_TOKENS, _TOKENS, size) for seed in range(heads or 1)
    ]
    return jnp.stack(tables) if heads else jnp.asarray(tables[0])


def dense(values):
    return flash_attention(values["query"], values["key"], values["value"])


DENSE = Peer(
    "our flash_attention", ("blocksparse_attention",), dense, agrees=False, same_work=False
)


def workload(size, heads):
    def values(dtype, key):
        made = qkv(dtype, key, 1, _TOKENS, _HEADS, _HEADS, _DIM, {})
        return made | {"sparsity_mask": table(size, heads), "block_size": size}

    # heads that share no mask share no tile, and small products use one core
    least = 2.5 if size == 64 and heads else 3.0
    return Workload(
        "blocksparse_attention",
        f"B1 S4096 H8 d64, blocks of {size}, {'a mask a head' if heads else 'one mask'}",
        values,
        peers=(DENSE,),
        known_peers=False,
        bars=(Bar(least, DENSE.name),),
    )


WORKLOADS = [workload(size, heads) for size in (64, 128) for heads in (0, _HEADS)]
