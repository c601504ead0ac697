"""Decoding over pages on a CPU beside dense attention on contiguous keys.

The peers walk no table: `jax.nn.dot_product_attention` over [B, S, G, D], and two einsums around a
softmax over [B, G, S, D], the layout that suits a matrix product best.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.bench import Bar, Peer, Workload
from ejkernel.kernels._specs._work_paged import page, ragged

_BATCH, _HEADS, _SIZE, _CONTEXT = 8, 8, 64, 4096
_BAR = 0.67
# keys laid out for two products, without lengths or tables: how far the walk is from the least
_EINSUM_BAR = 0.3


def rows(values):
    """Keys and values of all pages, side by side: [b, s, g, d]."""
    tables = values["block_tables"]
    if "kv_pages" in values:
        flat = values["kv_pages"][tables].reshape(_BATCH, _CONTEXT, -1, _SIZE)
        return {"k": flat[:, :, ::2], "v": flat[:, :, 1::2]}
    flat = (values[n][tables].swapaxes(2, 3) for n in ("key_cache", "value_cache"))
    k, v = (x.reshape(_BATCH, _CONTEXT, -1, _SIZE) for x in flat)
    return {"k": k, "v": v}


def heads_first(values):
    return {name: x.swapaxes(1, 2).copy() for name, x in rows(values).items()}


def contiguous(values):
    query = values.get("query", values.get("queries"))
    out = jax.nn.dot_product_attention(
        query[:, None],
        values["k"],
        values["v"],
        key_value_seq_lengths=values["context_lens"],
        implementation="xla",
    )
    return out[:, 0]


def einsums(values):
    q, k, v, lens = (values[name] for name in ("query", "k", "v", "context_lens"))
    groups, length = k.shape[1:3]
    x = jnp.einsum("bgrd,bgsd->bgrs", q.reshape(_BATCH, groups, -1, _SIZE), k) * _SIZE**-0.5
    x = jnp.where(jnp.arange(length) < lens[:, None, None, None], x, -jnp.inf)
    return jnp.einsum("bgrs,bgsd->bgrd", jax.nn.softmax(x), v).reshape(q.shape)


BOTH_OPS = ("page_attention", "ragged_page_attention")
DENSE = Peer("jax.nn, contiguous", BOTH_OPS, contiguous, prepare=rows)
EINSUMS = Peer("einsums, contiguous", ("page_attention",), einsums, prepare=heads_first)


def decode(groups, size, full=True):
    sizes = {"b": _BATCH, "s": _CONTEXT, "h": _HEADS, "g": groups, "d": _SIZE, "size": size}

    def values(dtype, key):
        made = page(dtype, key, **sizes)
        lens = np.linspace(_CONTEXT // 2, _CONTEXT, _BATCH).astype(np.int32)
        return made if full else made | {"context_lens": jnp.asarray(lens)}

    name = f"B8 S4096 H8/{groups} d64 page {size}" + ("" if full else ", half full")
    bars = (Bar(_BAR, DENSE.name), Bar(_EINSUM_BAR, EINSUMS.name))
    return Workload("page_attention", name, values, peers=(DENSE, EINSUMS), bars=bars)


def mixed(groups, size):
    sizes = {"s": _CONTEXT, "h": _HEADS, "g": groups, "d": _SIZE, "size": size}
    values = functools.partial(ragged, steps=(1,) * _BATCH, **sizes)
    name = f"8 decodes S4096 H8/{groups} d64 page {size}"
    bars = (Bar(_BAR, DENSE.name),)
    return Workload("ragged_page_attention", name, values, peers=(DENSE,), bars=bars)


WORKLOADS = [
    decode(2, 16),
    decode(2, 128),
    decode(8, 16),
    decode(8, 128),
    decode(8, 16, full=False),
    mixed(2, 16),
    mixed(8, 16),
]
