"""The oracle of attention: dense, a line a rule, in the precision of its inputs (f32 at least)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._reference import philox


def flash_attention(args) -> tuple[jax.Array, ...]:
    """Output, and lse when asked for."""
    out, lse, _ = attend(args)
    return (out, lse) if args.return_lse else (out,)


def attend(args) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output, log-sum-exp and weights of one call."""
    batch, t, num_heads, _ = args.query.shape
    s = args.key.shape[1]
    group = num_heads // args.key.shape[2]
    wide = jnp.promote_types(args.query.dtype, jnp.float32)
    exact = jax.lax.Precision.HIGHEST
    k, v = (jnp.repeat(x, group, axis=2) for x in (args.key, args.value))
    q_pos, k_pos, visible = _positions(args, batch, t, s)

    x = jnp.einsum("bthd,bshd->bhts", args.query, k, precision=exact, preferred_element_type=wide)
    x = x * args.softmax_scale
    if args.logits_soft_cap is not None:
        x = args.logits_soft_cap * jnp.tanh(x / args.logits_soft_cap)
    if args.bias is not None:
        x = x + args.bias.astype(wide)
    if args.alibi_slopes is not None:
        distance = (k_pos[:, None, :] - q_pos[:, :, None])[:, None].astype(wide)  # [b, 1, t, s]
        x = x + args.alibi_slopes.astype(wide)[None, :, None, None] * distance

    left, right = args.sliding_window
    if left is not None:
        visible &= (q_pos[:, :, None] - left <= k_pos[:, None, :])[:, None]
    if right is not None:
        visible &= (k_pos[:, None, :] <= q_pos[:, :, None] + right)[:, None]
    if args.q_segment_ids is not None:
        q_ids, k_ids = args.q_segment_ids[:, :, None], args.kv_segment_ids[:, None, :]
        visible &= ((q_ids == k_ids) & (q_ids >= 0))[:, None]
    if args.attention_mask is not None:
        visible &= args.attention_mask
    # XLA for CPUs leaves memory unwritten where it knows, under a cap, that nothing is visible
    x = jnp.where(jax.lax.optimization_barrier(visible), x, -jnp.inf)

    if args.softmax_aux is not None:
        sinks = args.softmax_aux.astype(wide)[None, :, None, :]
        sinks = jnp.broadcast_to(sinks, (batch, num_heads, t, sinks.shape[-1]))
        x = jnp.concatenate([x, sinks], axis=-1)
    empty = jnp.isneginf(x).all(axis=-1, keepdims=True)
    safe = jnp.where(empty, 0.0, x)  # the softmax of nothing is nothing, not nan
    weights = jnp.where(empty, 0.0, jax.nn.softmax(safe, axis=-1))[..., :s]
    lse = jnp.where(empty, -jnp.inf, jax.nn.logsumexp(safe, axis=-1, keepdims=True))[..., 0]
    if args.dropout_prob:
        weights = weights * _keep(args, batch, num_heads, t, s) / (1 - args.dropout_prob)
    weights = weights.astype(v.dtype)
    out = jnp.einsum("bhts,bshe->bthe", weights, v, precision=exact, preferred_element_type=wide)
    return out.astype(args.query.dtype), lse.astype(wide), weights


def gradient_magnitudes(args, outputs, cotangents) -> dict[str, jax.Array]:
    """Gradients of query and key with |p| (|dp| + |delta|), |q|, |k| in place of signed values."""
    group = args.query.shape[2] // args.key.shape[2]
    _, _, p = attend(dataclasses.replace(args, dropout_prob=0.0))
    q, k, v = args.query, jnp.repeat(args.key, group, 2), jnp.repeat(args.value, group, 2)
    dout = cotangents[0]
    dp = jnp.abs(jnp.einsum("bthe,bshe->bhts", dout, v)) / (1 - args.dropout_prob)
    delta = jnp.abs((outputs[0] * dout).sum(-1)).transpose(0, 2, 1)
    if args.return_lse:
        delta += jnp.abs(cotangents[1])
    ds = jnp.abs(p * args.softmax_scale) * (dp + delta[..., None])
    dk = jnp.einsum("bhts,bthd->bshd", ds, jnp.abs(q))
    dk = dk.reshape(*args.key.shape[:3], group, dk.shape[-1]).sum(3)
    return {"query": jnp.einsum("bhts,bshd->bthd", ds, jnp.abs(k)), "key": dk}


def _positions(args, batch, t, s):
    """Positions of queries [b, t] and keys [b, s], and pairs [b, 1, t, s] that are real."""
    visible = np.ones((batch, 1, t, s), bool)
    q_pos = np.broadcast_to(np.arange(t) + s - t, (batch, t))
    k_pos = np.broadcast_to(np.arange(s), (batch, s))
    if args.cum_seqlens_q is not None:
        q_pos, k_pos, visible = np.array(q_pos), np.array(k_pos), np.zeros_like(visible)
        cum_q, cum_k = np.asarray(args.cum_seqlens_q), np.asarray(args.cum_seqlens_k)
        for n in range(len(cum_q) - 1):
            row = n if batch > 1 else 0
            q0, k0 = (0, 0) if batch > 1 else (cum_q[n], cum_k[n])
            len_q, len_k = cum_q[n + 1] - cum_q[n], cum_k[n + 1] - cum_k[n]
            q_pos[row, q0 : q0 + len_q] = np.arange(len_q) + len_k - len_q
            k_pos[row, k0 : k0 + len_k] = np.arange(len_k)
            visible[row, 0, q0 : q0 + len_q, k0 : k0 + len_k] = True
    if args.q_positions is not None:
        q_pos = np.broadcast_to(np.asarray(args.q_positions, np.int64), (batch, t))
    if args.kv_positions is not None:
        k_pos = np.broadcast_to(np.asarray(args.kv_positions, np.int64), (batch, s))
    return q_pos, k_pos, visible


def _keep(args, batch, num_heads, t, s):
    b, h, i, j = np.ix_(*(np.arange(n) for n in (batch, num_heads, t, s)))
    words = philox.words(np.asarray(args.dropout_seed), j >> 2, i, h, b)
    word = np.choose(j & 3, words)
    return word >= np.uint64(np.floor(args.dropout_prob * 2.0**32))
