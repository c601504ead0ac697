"""Decoding over pages on CPU beside dense attention on contiguous keys.

Peers walk no table: `jax.nn.dot_product_attention` over [B, S, G, D], and two einsums around a
softmax over [B, G, S, D], the layout that suits a matrix product best.
"""

import common
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import page_attention, pages_to_interleaved, ragged_page_attention

BATCH, HEADS, HEAD_DIM, CONTEXT = 8, 8, 64, 4096
BAR = 0.67
# keys laid out for two products, without lengths or tables: how far the walk is from the least
EINSUM_BAR = 0.3


def setup(groups, size, full):
    """Query, contiguous keys and values, and the same in shuffled pages with their table."""
    keys = jax.random.split(jax.random.key(groups + size), 3)
    query = jax.random.normal(keys[0], (BATCH, HEADS, HEAD_DIM))
    dense = [jax.random.normal(k, (BATCH, CONTEXT, groups, HEAD_DIM)) for k in keys[1:]]
    blocks = CONTEXT // size
    order = np.random.default_rng(0).permutation(BATCH * blocks)
    caches = []
    for x in dense:
        pages = x.reshape(BATCH * blocks, size, groups, HEAD_DIM).transpose(0, 2, 1, 3)
        caches.append(jnp.zeros_like(pages).at[order].set(pages))
    lens = np.full(BATCH, CONTEXT) if full else np.linspace(CONTEXT // 2, CONTEXT, BATCH)
    return (
        query,
        *dense,
        *caches,
        jnp.asarray(lens, jnp.int32),
        jnp.asarray(order.reshape(BATCH, blocks), jnp.int32),
    )


def peer(q, k, v, lens):
    out = jax.nn.dot_product_attention(
        q[:, None], k, v, key_value_seq_lengths=lens, implementation="xla"
    )
    return out[:, 0]


def plain(q, k, v, lens):
    groups, length = k.shape[1:3]
    x = jnp.einsum("bgrd,bgsd->bgrs", q.reshape(BATCH, groups, -1, HEAD_DIM), k) * HEAD_DIM**-0.5
    x = jnp.where(jnp.arange(length) < lens[:, None, None, None], x, -jnp.inf)
    return jnp.einsum("bgrs,bgsd->bgrd", jax.nn.softmax(x), v).reshape(q.shape)


def decode(groups, size, full=True, beside=peer):
    def make():
        q, k, v, kc, vc, lens, tables = setup(groups, size, full)
        if beside is plain:
            k, v = (x.swapaxes(1, 2) for x in (k, v))
        return (
            lambda q, k, v, kc, vc: page_attention(q, kc, vc, lens, tables),
            lambda q, k, v, kc, vc: beside(q, k, v, lens),
            (q, k, v, kc, vc),
        )

    return make


def ragged(groups, size):
    def make():
        q, k, v, kc, vc, lens, tables = setup(groups, size, full=True)
        starts = jnp.arange(BATCH + 1)
        return (
            lambda q, k, v, pages: ragged_page_attention(q, pages, lens, tables, starts, BATCH),
            lambda q, k, v, pages: peer(q, k, v, lens),
            (q, k, v, pages_to_interleaved(kc, vc)),
        )

    return make


COMPARISONS = [
    common.Comparison("page_attention, 2 key heads, page 16", BAR, decode(2, 16)),
    common.Comparison("page_attention, 2 key heads, page 128", BAR, decode(2, 128)),
    common.Comparison("page_attention, 8 key heads, page 16", BAR, decode(8, 16)),
    common.Comparison("page_attention, 8 key heads, page 128", BAR, decode(8, 128)),
    common.Comparison("page_attention, 8 key heads, page 16, half full", BAR, decode(8, 16, False)),
    common.Comparison("einsums, 2 key heads, page 16", EINSUM_BAR, decode(2, 16, beside=plain)),
    common.Comparison("einsums, 2 key heads, page 128", EINSUM_BAR, decode(2, 128, beside=plain)),
    common.Comparison("einsums, 8 key heads, page 16", EINSUM_BAR, decode(8, 16, beside=plain)),
    common.Comparison("einsums, 8 key heads, page 128", EINSUM_BAR, decode(8, 128, beside=plain)),
    common.Comparison("ragged_page_attention, 2 key heads, page 16", BAR, ragged(2, 16)),
    common.Comparison("ragged_page_attention, 8 key heads, page 16", BAR, ragged(8, 16)),
]

if __name__ == "__main__":
    shape = f"{BATCH} rows, {HEADS} heads, d={HEAD_DIM}, {CONTEXT} keys, float32; milliseconds"
    common.main(__doc__, "cpu_paged", shape, COMPARISONS)
