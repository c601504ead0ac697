"""The oracle of attention over cached keys: dense, one query a row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def page_attention(args) -> tuple[jax.Array, ...]:
    """Output, and lse when asked for."""
    pages, _, page_size, _ = args.key_cache.shape
    batch, blocks = args.block_tables.shape
    tables = np.clip(np.asarray(args.block_tables), 0, pages - 1)

    def gather(cache):  # [p, g, w, d] -> [b, m * w, g, d]
        rows = cache[tables].transpose(0, 1, 3, 2, 4)
        return rows.reshape(batch, blocks * page_size, *rows.shape[3:])

    end = np.clip(np.asarray(args.context_lens), 0, blocks * page_size)
    out, lse = decode(args, gather(args.key_cache), gather(args.value_cache), 0 * end, end)
    return (out, lse) if args.return_lse else (out,)


def decode(args, key, value, start, end) -> tuple[jax.Array, jax.Array]:
    """Attention of one query a row, at position end - 1, over keys in [start, end)."""
    batch, num_heads, d = args.query.shape
    s, num_kv_heads = key.shape[1:3]
    group = num_heads // num_kv_heads
    dtype = args.query.dtype  # holds int8 and float8 exactly
    wide = jnp.promote_types(dtype, jnp.float32)
    exact = jax.lax.Precision.HIGHEST
    position = np.arange(s)[None]
    last = np.asarray(end)[:, None] - 1
    visible = (np.asarray(start)[:, None] <= position) & (position <= last)
    left, _ = args.sliding_window
    if left is not None:
        visible &= last - left <= position
    value = jnp.where(visible[..., None, None], value.astype(dtype), 0)
    query = args.query.reshape(batch, num_kv_heads, group, d)

    def per_head(scale):  # [g] -> [1, h, 1]
        return jnp.repeat(scale.astype(wide), group)[None, :, None]

    product = functools.partial(jnp.einsum, precision=exact, preferred_element_type=wide)
    x = product("bgnd,bsgd->bgns", query, key.astype(dtype)).reshape(batch, num_heads, s)
    x = x * args.softmax_scale
    if args.k_scale is not None:
        x = x * per_head(args.k_scale)
    if args.logits_soft_cap is not None:
        x = args.logits_soft_cap * jnp.tanh(x / args.logits_soft_cap)
    if args.alibi_slopes is not None:
        x = x + args.alibi_slopes.astype(wide)[None, :, None] * (position - last)[:, None]
    x = jnp.where(visible[:, None], x, -jnp.inf)
    if args.softmax_aux is not None:
        sinks = args.softmax_aux.astype(wide)[None]
        sinks = jnp.broadcast_to(sinks, (batch, num_heads, sinks.shape[-1]))
        x = jnp.concatenate([x, sinks], axis=-1)
    empty = jnp.isneginf(x).all(axis=-1, keepdims=True)
    safe = jnp.where(empty, 0.0, x)
    weights = jnp.where(empty, 0.0, jax.nn.softmax(safe, axis=-1))[..., :s].astype(dtype)
    lse = jnp.where(empty, -jnp.inf, jax.nn.logsumexp(safe, axis=-1, keepdims=True))[..., 0]
    weights = weights.reshape(batch, num_kv_heads, group, s)
    out = product("bgns,bsge->bgne", weights, value).reshape(batch, num_heads, value.shape[-1])
    if args.v_scale is not None:
        out = out * per_head(args.v_scale)
    return out.astype(dtype), lse.astype(wide)
