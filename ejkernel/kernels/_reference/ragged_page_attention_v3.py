"""The oracle of a serving step: tokens into their pages, then attention."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._reference import ragged_page_attention


def ragged_page_attention_v3(args) -> tuple[jax.Array, ...]:
    """Output, pages, and lse when asked for."""
    num_pages, size, _, _ = args.kv_pages.shape
    tables, starts = np.asarray(args.block_tables), np.asarray(args.query_start_loc)
    lens = np.clip(np.asarray(args.kv_lens), 0, tables.shape[1] * size)
    dtype = args.kv_pages.dtype
    keys = stored(args.keys, args.k_scale, dtype)
    values = stored(args.values, args.v_scale, dtype)
    count, places = int(np.asarray(args.distribution)[2]), []
    for n in range(count):
        for i in range(starts[n], starts[n + 1]):
            position = lens[n] - (starts[n + 1] - i)
            page = tables[n, position // size] if position >= 0 else -1
            if 0 <= page < num_pages:
                places.append((page, position % size, i))
    page, slot, token = np.asarray(places, int).reshape(-1, 3).T
    pages = args.kv_pages.at[page, slot, 0::2].set(keys[token])
    pages = pages.at[page, slot, 1::2].set(values[token])
    names = "queries block_tables query_start_loc sliding_window softmax_scale k_scale v_scale"
    names += " alibi_slopes logits_soft_cap softmax_aux return_lse"
    view = types.SimpleNamespace(
        kv_pages=pages,
        context_lens=lens,
        num_seqs=np.asarray([count]),
        **{name: getattr(args, name) for name in names.split()},
    )
    out, *lse = ragged_page_attention.ragged_page_attention(view)
    return out, pages, *lse


def stored(new, scale, dtype) -> jax.Array:
    """Tokens [n, g, d] as the cache holds them."""
    new = new.astype(jnp.promote_types(new.dtype, jnp.float32))
    if scale is not None:
        new = new / scale.astype(new.dtype)[None, :, None]
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(new), -128, 127).astype(dtype)
    if dtype.itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        new = jnp.clip(new, -limit, limit)
    return new.astype(dtype)
