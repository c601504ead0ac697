"""Which blocks a token attends to, as bits: the best by importance, or those of a given list."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._specs import native_sparse_attention as spec
from ejkernel.kernels._xla._blocks import loops
from ejkernel.kernels._xla.native_sparse_attention.table import Table, Tokens

# Words are whole numbers in floats: under `shard_map` the derivative rule takes no integer
# residuals, and a float32 holds this many bits exactly.
_WORD = spec.WORD


def twins(table: Table, kc: jax.Array) -> jax.Array:
    """For each block [n], the first of its sequence with the very same mean key [n, d].

    A matrix product may round equal columns differently; a tie must not depend on that.
    """
    n = kc.shape[0]
    of_sequence = jnp.asarray(table.tokens.first)[table.start]
    same = (kc[:, None] == kc[None]).all(axis=-1)
    same = same & (of_sequence[:, None] == of_sequence[None])
    index = jnp.arange(n, dtype=jnp.int32)
    return jnp.minimum(jnp.where(same, index[None], n).min(axis=-1), index)


def best(importance: jax.Array, tokens: Tokens, count: Any) -> jax.Array:
    """The own block and the `count - 1` most important earlier ones; importance [t, n]."""
    # the bits of floats that are not negative are ordered as they are; nan counts as 0
    wide = importance.dtype.itemsize == 8
    unsigned = jnp.uint64 if wide else jnp.uint32
    rank = jax.lax.bitcast_convert_type(importance, unsigned)
    top = jax.lax.bitcast_convert_type(jnp.asarray(jnp.inf, importance.dtype), unsigned)
    rank = jnp.where(rank <= top, rank, unsigned(0))
    block = jnp.arange(importance.shape[1], dtype=jnp.int32)[None]
    first, own = tokens.first[:, None], tokens.own[:, None]
    earlier = (block >= first) & (block < own)
    rank = jnp.where(earlier, rank + unsigned(1), unsigned(0))
    need = jnp.clip(count - 1, 0, tokens.own - tokens.first).astype(jnp.int32)[:, None]

    def bit(i: Any, least: jax.Array) -> jax.Array:
        trial = least | (unsigned(1) << (63 if wide else 31) - i.astype(unsigned))
        enough = (rank >= trial).sum(axis=1, keepdims=True, dtype=jnp.int32) >= need
        return jnp.where(enough, trial, least)

    # the rank of the last block that is taken, bit by bit: neither a sort nor a bound on `count`
    least = jnp.zeros((importance.shape[0], 1), unsigned)
    least = jax.lax.fori_loop(
        jnp.int32(0), jnp.int32(64 if wide else 32), bit, loops.vary_like(least, importance)
    )
    above, level = rank > least, rank == least
    room = need - above.sum(axis=1, keepdims=True, dtype=jnp.int32)
    level = level & (jnp.cumsum(level, axis=1, dtype=jnp.int32) <= room)
    return (earlier & (above | level)) | (block == own)


def listed(indices: jax.Array, tokens: Tokens, count: Any, num_blocks: int) -> jax.Array:
    """The first `count` blocks of lists [t, k], numbered in their sequence; -1 is none."""
    t, k = indices.shape
    last = (tokens.own - tokens.first)[:, None]
    used = (indices >= 0) & (indices <= last) & (tokens.own >= 0)[:, None]
    if count is not None:
        used = used & (jnp.arange(k, dtype=jnp.int32)[None] < count[:, None])
    block = jnp.where(used, tokens.first[:, None] + indices, num_blocks)
    row = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[:, None], block.shape)
    mask = loops.vary_like(jnp.zeros((t, num_blocks), bool), indices)
    return mask.at[row, block].set(True, mode="drop")


def pack(mask: jax.Array) -> jax.Array:
    """[t, n] bool -> [t, words] float32."""
    t, n = mask.shape
    words = -(-n // _WORD)
    bits = jnp.pad(mask, ((0, 0), (0, words * _WORD - n))).reshape(t, words, _WORD)
    values = bits.astype(jnp.uint32) << jnp.arange(_WORD, dtype=jnp.uint32)[None, None]
    return values.sum(axis=-1, dtype=jnp.uint32).astype(jnp.float32)


def unpack(words: jax.Array, num_blocks: int) -> jax.Array:
    """[t, words] float32 -> [t, n] bool."""
    values = words.astype(jnp.uint32)[..., None]
    bits = (values >> jnp.arange(_WORD, dtype=jnp.uint32)[None, None]) & jnp.uint32(1)
    return bits.reshape(words.shape[0], -1)[:, :num_blocks] > 0
