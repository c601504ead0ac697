"""Latent attention beside plain code that makes keys and values of all heads, on CPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from ejkernel.modules import mla_attention, mla_page_attention

# batch, queries, keys, heads, head size, rope, latent
_TRAIN = (1, 1024, 1024, 8, 64, 32, 256)
_DECODE = (4, 1, 2048, 16, 128, 64, 512)
_PAGE = 16


def _arrays(batch: int, t: int, s: int, h: int, d: int, r: int, l: int) -> list[jax.Array]:
    """query, key_value, w_kc, w_vc, b_q, b_k and a cotangent of the output."""
    keys = jax.random.split(jax.random.key(0), 7)
    shapes = [(batch, t, h, d), (batch, s, l), (l, h, d), (l, h, d), (batch, t, h, r)]
    shapes += [(batch, s, r), (batch, t, h, d)]
    made = [jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)]
    made[2:4] = [w * l**-0.5 for w in made[2:4]]
    return made


def _plain(query, latent, w_kc, w_vc, b_q, b_k) -> jax.Array:
    """Causal attention over keys and values of all heads."""
    key = jnp.einsum("bsl,lhd->bshd", latent, w_kc)
    value = jnp.einsum("bsl,lhd->bshd", latent, w_vc)
    rope = jnp.broadcast_to(b_k[:, :, None], (*key.shape[:3], b_k.shape[-1]))
    query, key = jnp.concatenate([query, b_q], -1), jnp.concatenate([key, rope], -1)
    t, s = query.shape[1], key.shape[1]
    scores = jnp.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
    seen = jnp.arange(s)[None] <= jnp.arange(t)[:, None] + s - t
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, value)


def _forward(shape: tuple[int, ...]) -> Any:
    ours = functools.partial(mla_attention, causal=True)
    return ours, _plain, _arrays(*shape)[:-1]


def _both(shape: tuple[int, ...]) -> Any:
    ours = functools.partial(mla_attention, causal=True)
    return common.with_gradient(ours, 6), common.with_gradient(_plain, 6), _arrays(*shape)


def _pages() -> Any:
    """One query a sequence, lengths between half and all of the tables."""
    batch, _, s, h, _, r, l = _DECODE
    blocks = s // _PAGE
    keys = jax.random.split(jax.random.key(1), 3)
    order = np.random.default_rng(0).permutation(batch * blocks).reshape(batch, blocks)
    lens = jnp.asarray(np.linspace(s // 2, s, batch), jnp.int32)
    starts, scale = jnp.arange(batch + 1), (l + r) ** -0.5

    def ours(q_nope, q_pe, pages, lens, tables):
        return mla_page_attention(
            q_nope, q_pe, pages, lens, tables, starts, batch, softmax_scale=scale
        )

    def peer(q_nope, q_pe, pages, lens, tables):
        rows = pages[tables].reshape(batch, s, l + r)
        query = jnp.concatenate([q_nope, q_pe], -1)
        scores = jnp.einsum("bhd,bsd->bhs", query, rows) * scale
        seen = (jnp.arange(s)[None] < lens[:, None])[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhs,bsl->bhl", weights, rows[..., :l])

    arrays = (
        jax.random.normal(keys[0], (batch, h, l)),
        jax.random.normal(keys[1], (batch, h, r)),
        jax.random.normal(keys[2], (batch * blocks, _PAGE, l + r)),
        lens,
        jnp.asarray(order, jnp.int32),
    )
    return ours, peer, arrays


_COMPARISONS = (
    common.Comparison("1024 tokens, forward", 0.9, functools.partial(_forward, _TRAIN)),
    common.Comparison("1024 tokens, forward and backward", 0.9, functools.partial(_both, _TRAIN)),
    common.Comparison("decode over 2048 keys", 0.9, functools.partial(_forward, _DECODE)),
    common.Comparison("decode over pages, 2048 keys", 0.9, _pages),
)

if __name__ == "__main__":
    common.main(
        __doc__,
        "cpu_mla",
        "float32, causal; training 8 heads, d=64, rope 32, latent 256; decoding batch 4, 16 heads, "
        "d=128, rope 64, latent 512; milliseconds",
        _COMPARISONS,
    )
