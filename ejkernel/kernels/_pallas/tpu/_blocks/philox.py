"""Philox-4x32-10 and the keep mask of dropout; the same bits as on every other backend."""

import jax
import jax.numpy as jnp

_ROUNDS = 10
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def _multiply(a: jax.Array, constant: int) -> tuple[jax.Array, jax.Array]:
    """High and low words of a product, from 16-bit halves: there is no wide multiplication."""
    low, high = jnp.uint32(constant & 0xFFFF), jnp.uint32(constant >> 16)
    a_low, a_high = a & jnp.uint32(0xFFFF), a >> jnp.uint32(16)
    cross = a_high * low + ((a_low * low) >> jnp.uint32(16))
    middle = a_low * high + (cross & jnp.uint32(0xFFFF))
    top = a_high * high + (cross >> jnp.uint32(16)) + (middle >> jnp.uint32(16))
    return top, a * jnp.uint32(constant)


def words(
    k0: jax.Array, k1: jax.Array, counter: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Four words of each counter, all uint32 of one shape; the key is (k0, k1)."""
    c0, c1, c2, c3 = counter
    for i in range(_ROUNDS):
        hi0, lo0 = _multiply(c0, _M0)
        hi1, lo1 = _multiply(c2, _M1)
        c0, c1 = hi1 ^ c1 ^ (k0 + jnp.uint32(_W0 * i & 0xFFFFFFFF)), lo1
        c2, c3 = hi0 ^ c3 ^ (k1 + jnp.uint32(_W1 * i & 0xFFFFFFFF)), lo0
    return c0, c1, c2, c3


def keep(
    seed: tuple[jax.Array, jax.Array],
    batch: jax.Array,
    head: jax.Array,
    query: jax.Array,
    key: jax.Array,
    threshold: int,
) -> jax.Array:
    """Which pairs are kept; `query` and `key` are indices of one shape, the rest scalars."""
    fill = lambda x: jnp.broadcast_to(x.astype(jnp.uint32), key.shape)
    quad, rest = key >> 2, key & 3
    counter = (fill(quad), fill(query), fill(head), fill(batch))
    w0, w1, w2, w3 = words(seed[0].astype(jnp.uint32), seed[1].astype(jnp.uint32), counter)
    # neighbouring lanes share a counter and would have to be interleaved: each computes its own
    word = jnp.where(rest < 2, jnp.where(rest == 0, w0, w1), jnp.where(rest == 2, w2, w3))
    # unsigned order through signed numbers, which vector units compare
    flip = jnp.uint32(1 << 31)
    signed = jax.lax.bitcast_convert_type(word ^ flip, jnp.int32)
    return signed >= jnp.int32(threshold - (1 << 31))
