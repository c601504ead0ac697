"""The oracle of native sparse attention: dense weights, one sequence at a time."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

_EXACT = jax.lax.Precision.HIGHEST


def native_sparse_attention(args) -> tuple[jax.Array]:
    """The gated sum of the three branches."""
    gates = {_compressed: args.g_cmp, _selected: args.g_slc, _window: args.g_swa}
    gates = {branch: gate for branch, gate in gates.items() if gate is not None}
    return (_sum(args, gates or {_selected: None}),)


def apply_native_sparse_attention(args) -> tuple[jax.Array]:
    """The selected branch alone."""
    return (_sum(args, {_selected: None}),)


def _sum(args, gates):
    """Σ gate · branch; branches see one sequence: q [b, t, h, d], k and v with as many heads."""
    t, heads = args.query.shape[1:3]
    wide = jnp.promote_types(args.query.dtype, jnp.float32)
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (args.key, args.value))
    out = jnp.zeros((*args.query.shape[:3], v.shape[-1]), wide)
    cuts = (0, t) if args.cu_seqlens is None else np.asarray(args.cu_seqlens).tolist()
    for here in itertools.starmap(slice, itertools.pairwise(cuts)):
        for branch, gate in gates.items():
            if here.stop > here.start and out.size:
                part = branch(args, here, args.query[:, here], k[:, here], v[:, here])
                gate_here = 1 if gate is None else gate[:, here].astype(wide)[..., None]
                out = out.at[:, here].add(gate_here * part)
    return out.astype(args.query.dtype)


def _compressed(args, here, q, k, v):
    weights = _importance(args, q, k)
    return jnp.einsum("bthn,bnhe->bthe", weights, _means(v, args.block_size), precision=_EXACT)


def _importance(args, q, k):
    """Weights [b, t, h, n] over the full blocks that end at or before the query."""
    t, k = q.shape[1], _means(k, args.block_size)
    last = np.arange(1, k.shape[1] + 1) * args.block_size - 1
    # a plain sum: equal keys must give equal scores
    x = (q.astype(k.dtype)[:, :, :, None] * k.transpose(0, 2, 1, 3)[:, None]).sum(axis=-1)
    return _softmax(args.softmax_scale * x, (last <= np.arange(t)[:, None])[None, :, None])


def _means(x, size):
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.stack([x[:, i : i + size].mean(axis=1) for i in range(0, x.shape[1], size)], axis=1)


def _selected(args, here, q, k, v):
    (batch, t, heads, _), groups = q.shape, args.key.shape[2]
    position = np.arange(t)
    block, own = np.arange(-(-t // args.block_size)), (position // args.block_size)[:, None]
    counts = None if args.block_counts is None else args.block_counts[:, here, :, None]
    if args.block_indices is not None:
        lists = args.block_indices[:, here]  # [b, t, g, k]
        counts = lists.shape[-1] if counts is None else counts
        lists = jnp.where(np.arange(lists.shape[-1])[None, None, None] < counts, lists, -1)
        chosen = (lists[..., None] == block.reshape(1, 1, 1, 1, -1)).any(axis=-2)  # [b, t, g, n]
    else:
        counts = args.max_blocks if counts is None else jnp.maximum(counts, 1)
        score = _importance(args, q, k).reshape(batch, t, groups, heads // groups, -1).sum(axis=3)
        score = jnp.where((block < own)[None, :, None], jax.lax.stop_gradient(score), -1.0)
        score = jnp.where((block == own)[None, :, None], jnp.inf, score)
        order = jnp.argsort(-score, axis=-1, stable=True)
        chosen = jnp.argsort(order, axis=-1, stable=True) < counts
    seen = jnp.repeat(chosen, heads // groups, axis=2)[..., position // args.block_size]
    return _attend(args, q, k, v, seen & (position <= position[:, None])[None, :, None])


def _window(args, here, q, k, v):
    ahead = np.subtract.outer(np.arange(q.shape[1]), np.arange(q.shape[1]))
    return _attend(args, q, k, v, ((ahead >= 0) & (ahead < args.window_size))[None, :, None])


def _attend(args, q, k, v, seen):
    """Attention where `seen` [b, t, h, s], weights in the dtype of the values."""
    wide = {"precision": _EXACT, "preferred_element_type": jnp.promote_types(q.dtype, jnp.float32)}
    x = args.softmax_scale * jnp.einsum("bthd,bshd->bths", q, k, **wide)
    return jnp.einsum("bths,bshe->bthe", _softmax(x, seen).astype(v.dtype), v, **wide)


def _softmax(x, seen):
    some = jnp.any(seen, axis=-1, keepdims=True)  # the softmax of nothing is nothing, not nan
    x = jnp.where(some, jnp.where(seen, x, -jnp.inf), 0.0)
    return jnp.where(some, jax.nn.softmax(x, axis=-1), 0.0)
