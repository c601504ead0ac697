"""Philox-4x32-10 in 32-bit integers, and the keep mask of dropout."""

import jax
import jax.numpy as jnp

_ROUNDS = 10
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def _mul_hi_lo(a: jax.Array, constant: int) -> tuple[jax.Array, jax.Array]:
    """High and low words of a 32 x 32 bit product, from 16-bit halves (XLA has no mulhi)."""
    low, high = jnp.uint32(constant & 0xFFFF), jnp.uint32(constant >> 16)
    a_low, a_high = a & jnp.uint32(0xFFFF), a >> 16
    cross = a_high * low + ((a_low * low) >> 16)
    middle = a_low * high + (cross & jnp.uint32(0xFFFF))
    return a_high * high + (cross >> 16) + (middle >> 16), a * jnp.uint32(constant)


def words(seed: jax.Array, counter: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Four words of each counter; `seed` is (low, high), counters broadcast."""
    c0, c1, c2, c3 = jnp.broadcast_arrays(*(jnp.asarray(c, jnp.uint32) for c in counter))
    for i in range(_ROUNDS):
        k0 = seed[0] + jnp.uint32(_W0 * i & 0xFFFFFFFF)
        k1 = seed[1] + jnp.uint32(_W1 * i & 0xFFFFFFFF)
        hi0, lo0 = _mul_hi_lo(c0, _M0)
        hi1, lo1 = _mul_hi_lo(c2, _M1)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
    return c0, c1, c2, c3


def keep(
    seed: jax.Array,
    prob: float,
    *,
    batch: jax.Array,
    head: jax.Array,
    query: jax.Array,
    first_key: jax.Array,
    num_keys: int,
) -> jax.Array:
    """Which of `num_keys` keys from `first_key` on are kept, [*broadcast of indices, num_keys].

    `first_key` and `num_keys` are multiples of four: one counter serves four neighbouring keys.
    """
    quads = jnp.asarray(first_key, jnp.uint32) // 4 + jnp.arange(num_keys // 4, dtype=jnp.uint32)
    counter = (quads, *(jnp.asarray(x, jnp.uint32)[..., None] for x in (query, head, batch)))
    bits = jnp.stack(words(seed, counter), axis=-1)
    bits = bits.reshape(*bits.shape[:-2], num_keys)
    return bits >= jnp.uint32(int(prob * 2.0**32))
