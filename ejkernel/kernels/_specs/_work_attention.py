"""Work and benchmark shapes of dense attention; the count of pairs knows masks of blocks too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _work
from ejkernel.kernels._specs._work import BACKWARD, CPU, DEVICE, OPTIONS

_ROWS_AT_ONCE = 1024
_IDS = ("attention_mask", "q_segment_ids", "q_positions", "kv_positions", "sparsity_mask")
GRADIENTS = frozenset({"query", "key", "value", "bias", "softmax_aux"})


def visible_pairs(args: Any) -> int:
    """Pairs of a query and a key that masks leave, summed over rows and query heads."""
    batch, t, heads, _ = args.query.shape
    s = args.key.shape[1]
    cuts = (getattr(args, "cum_seqlens_q", None), getattr(args, "cum_seqlens_k", None))
    known = tuple(_spec.known(x) for x in cuts)
    given = [getattr(args, name, None) for name in _IDS]
    if any(_spec.known(x) is not None for x in given):
        return _listed_pairs(args, batch, t, s, heads)
    moved = (*cuts, getattr(args, "q_positions", None), getattr(args, "kv_positions", None))
    if known[0] is not None and known[1] is not None:
        lengths = zip(np.diff(known[0]).tolist(), np.diff(known[1]).tolist(), strict=True)
        return heads * sum(_work.window_pairs(q, k, args.sliding_window) for q, k in lengths)
    if any(x is not None for x in moved):  # nobody knows where the tokens are
        return heads * batch * t * s
    return heads * batch * _work.window_pairs(t, s, args.sliding_window)


def _listed_pairs(args: Any, batch: int, t: int, s: int, heads: int) -> int:
    """Visible pairs where ids, positions or masks are concrete: a few query rows at a time."""
    q_pos, k_pos, q_seq, k_seq = _positions(args, batch, t, s)
    left, right = args.sliding_window
    ids = [_spec.known(getattr(args, n, None)) for n in ("q_segment_ids", "kv_segment_ids")]
    masks = [_spec.known(getattr(args, n, None)) for n in ("attention_mask", "sparsity_mask")]
    total = 0
    for start in range(0, t, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        q = q_pos[:, rows, None]
        seen = (q_seq[:, rows, None] == k_seq[:, None]) & (q_seq[:, rows, None] >= 0)
        if left is not None:
            seen &= q - left <= k_pos[:, None]
        if right is not None:
            seen &= k_pos[:, None] <= q + right
        if ids[0] is not None and ids[1] is not None:
            seen &= (ids[0][:, rows, None] == ids[1][:, None]) & (ids[0][:, rows, None] >= 0)
        seen = seen[:, None]  # [b, 1 or h, rows, s]
        if masks[0] is not None:
            dense = masks[0] != 0
            seen = seen & (dense[:, :, rows] if dense.shape[2] > 1 else dense)
        if masks[1] is not None:
            size = args.block_size
            block_rows = np.arange(t)[rows] // size
            seen = seen & masks[1][:, :, block_rows][..., np.arange(s) // size]
        total += int(seen.sum()) * (heads if seen.shape[1] == 1 else 1) * (batch // len(seen))
    return total


def _positions(args: Any, batch: int, t: int, s: int) -> tuple[np.ndarray, ...]:
    """Positions [b, t] and [b, s], and the number of each token's packed sequence, or -1."""
    q_pos = np.broadcast_to(np.arange(t) + s - t, (batch, t)).copy()
    k_pos = np.broadcast_to(np.arange(s), (batch, s)).copy()
    q_seq, k_seq = np.zeros((batch, t), np.int64), np.zeros((batch, s), np.int64)
    cuts = [_spec.known(getattr(args, f"cum_seqlens_{x}", None)) for x in "qk"]
    if cuts[0] is not None and cuts[1] is not None:
        q_seq[:], k_seq[:] = -1, -1
        for n in range(len(cuts[0]) - 1):
            row = n if batch > 1 else 0
            lengths = [int(c[n + 1] - c[n]) for c in cuts]
            starts = [0, 0] if batch > 1 else [int(c[n]) for c in cuts]
            queries, keys = (slice(a, a + x) for a, x in zip(starts, lengths, strict=True))
            q_seq[row, queries], k_seq[row, keys] = n, n
            q_pos[row, queries] = np.arange(lengths[0]) + lengths[1] - lengths[0]
            k_pos[row, keys] = np.arange(lengths[1])
    for name, place in (("q_positions", q_pos), ("kv_positions", k_pos)):
        if (given := _spec.known(getattr(args, name, None))) is not None:
            place[:] = given
    return q_pos, k_pos, q_seq, k_seq


def products(pairs: int, d: int, e: int, direction: str) -> int:
    """Two products forward, scores and values; five backward, one of them the scores again."""
    return 2 * pairs * (3 * d + 2 * e if direction == BACKWARD else d + e)


def flops(args: Any, direction: str) -> int:
    """Of the products over visible pairs."""
    d, e = args.query.shape[-1], args.value.shape[-1]
    return products(visible_pairs(args), d, e, direction)


def outputs(args: Any) -> int:
    """Bytes of the output, and of lse, which training keeps."""
    batch, t, heads, _ = args.query.shape
    shape = jax.ShapeDtypeStruct((batch, t, heads, args.value.shape[-1]), args.query.dtype)
    lse = jax.ShapeDtypeStruct((batch, heads, t), jnp.float32)
    return _work.size_of(shape, lse if args.return_lse else None)


traffic = _work.streamed(outputs, GRADIENTS, saved=True)


def _attention_traffic(args: Any, direction: str) -> int:
    batch, t, heads, _ = args.query.shape
    weights = batch * heads * t * args.key.shape[1] * args.query.dtype.itemsize
    return traffic(args, direction) + weights


def _mla_flops(args: Any, direction: str) -> int:
    """The lesser of two ways: keys and values of all heads are made, or queries are projected."""
    (batch, t, heads, _), (s, latent) = args.query.shape, args.key_value.shape[1:]
    (_, groups, d), e = args.w_kc.shape, args.w_vc.shape[-1]
    rope = 0 if args.b_k is None else args.b_k.shape[-1]
    pairs, times = visible_pairs(_MLAView(args)), 2 if direction == BACKWARD else 1
    projected = 2 * times * batch * s * latent * groups * (d + e)
    projected += products(pairs, d + rope, e, direction)
    absorbed = 2 * times * batch * t * heads * latent * (d + e)
    absorbed += products(pairs, latent + rope, latent, direction)
    return min(projected, absorbed)


class _MLAView:
    """Latent attention with the fields that the count of pairs reads."""

    def __init__(self, args: Any):
        self.query, self.key = args.query, args.key_value
        for name in ("sliding_window", "cum_seqlens_q", "cum_seqlens_k"):
            setattr(self, name, getattr(args, name))
        for name in ("attention_mask", "q_segment_ids", "kv_segment_ids"):
            setattr(self, name, getattr(args, name))


def _mla_outputs(args: Any) -> int:
    batch, t, heads, _ = args.query.shape
    return _work.size_of(
        jax.ShapeDtypeStruct((batch, t, heads, args.w_vc.shape[-1]), args.query.dtype)
    )


# Benchmark shapes: batch, queries, heads, key heads, head size, then options


def qkv(
    dtype: Any, key: jax.Array, b: int, t: int, h: int, g: int, d: int, options: Any
) -> dict[str, Any]:
    shapes = {"query": (b, t, h, d), "key": (b, t, g, d), "value": (b, t, g, d)}
    made = _work.normals(dtype, key, shapes)
    return made | (options if isinstance(options, dict) else options(h, t))


def _documents(h: int, t: int) -> dict[str, Any]:
    """Eight documents of equal length in one row."""
    ids = jnp.repeat(jnp.arange(8, dtype=jnp.int32), t // 8)[None]
    return {"causal": True, "q_segment_ids": ids, "kv_segment_ids": ids}


def _sinks(h: int, t: int) -> dict[str, Any]:
    return {"causal": True, "softmax_aux": jnp.ones((h, 1))}


_CAUSAL: dict[str, Any] = {"causal": True}
_FULL: dict[str, Any] = {}
_OPTION = f"{DEVICE} {OPTIONS}"
_LONG = (1, 16384, 16, 16, 128)
FLASH = (
    ("B1 S256 H8 d64 causal", CPU, (1, 256, 8, 8, 64, _CAUSAL)),
    ("B1 S1024 H8 d64 causal", CPU, (1, 1024, 8, 8, 64, _CAUSAL)),
    ("B1 S1024 H8 d64 full", CPU, (1, 1024, 8, 8, 64, _FULL)),
    ("B1 S1024 H8/2 d64 causal", CPU, (1, 1024, 8, 2, 64, _CAUSAL)),
    ("B4 S4096 H16 d128 causal", DEVICE, (4, 4096, 16, 16, 128, _CAUSAL)),
    ("B4 S4096 H16 d128 full", DEVICE, (4, 4096, 16, 16, 128, _FULL)),
    ("B4 S4096 H32 d64 causal", DEVICE, (4, 4096, 32, 32, 64, _CAUSAL)),
    ("B4 S4096 H32/8 d128 causal", DEVICE, (4, 4096, 32, 8, 128, _CAUSAL)),
    ("B1 S16384 H16 d128 causal", DEVICE, (*_LONG, _CAUSAL)),
    ("B16 S1024 H16 d128 causal", DEVICE, (16, 1024, 16, 16, 128, _CAUSAL)),
    ("B1 S16384 H16 d128 window 1024", _OPTION, (*_LONG, _CAUSAL | {"sliding_window": (1024, 0)})),
    ("B1 S16384 H16 d128 sinks", _OPTION, (*_LONG, _sinks)),
    ("B1 S16384 H16 d128 soft cap 30", _OPTION, (*_LONG, _CAUSAL | {"logits_soft_cap": 30.0})),
    ("B1 S16384 H16 d128 8 documents", _OPTION, (*_LONG, _documents)),
    ("B8 S2048 H16 d128 causal", _OPTION, (8, 2048, 16, 16, 128, _CAUSAL)),
    ("B1 S16384 H16 d128 deterministic", _OPTION, (*_LONG, _CAUSAL | {"deterministic": True})),
)
_PLAIN = (
    ("B1 S512 H8 d64 causal", CPU, (1, 512, 8, 8, 64, _CAUSAL)),
    ("B1 S2048 H16 d128 causal", DEVICE, (1, 2048, 16, 16, 128, _CAUSAL)),
)
_RING = (
    ("B1 S1024 H4 d64 causal", CPU, (1, 1024, 4, 4, 64, _CAUSAL)),
    ("B1 S16384 H16 d128 causal", DEVICE, (*_LONG, _CAUSAL)),
)


def latents(
    dtype: Any, key: jax.Array, b: int, t: int, s: int, h: int, d: int, e: int, r: int, l: int
) -> dict[str, Any]:
    shapes = {"query": (b, t, h, d), "key_value": (b, s, l), "w_kc": (l, h, d), "w_vc": (l, h, e)}
    made = _work.normals(dtype, key, shapes | {"b_q": (b, t, h, r), "b_k": (b, s, r)})
    made |= {n: made[n] * jnp.asarray(l**-0.5, made[n].dtype) for n in ("w_kc", "w_vc")}
    return made | {"causal": True}


_MLA = (
    ("B1 S512 H8 96/64 latent 256", CPU, (1, 512, 512, 8, 64, 64, 32, 256)),
    ("decode B4 S2048 H16 192/128", CPU, (4, 1, 2048, 16, 128, 128, 64, 512)),
    ("B4 S4096 H16 192/128 latent 512", DEVICE, (4, 4096, 4096, 16, 128, 128, 64, 512)),
)


_MLA_GRADIENTS = frozenset({"query", "key_value", "w_kc", "w_vc", "b_q", "b_k", "bias"})

flash_attention = _spec.Work(flops, traffic, _work.table(qkv, FLASH))
attention = _spec.Work(flops, _attention_traffic, _work.table(qkv, _PLAIN))
ring_attention = _spec.Work(flops, traffic, _work.table(qkv, _RING))
mla_attention = _spec.Work(
    _mla_flops, _work.streamed(_mla_outputs, _MLA_GRADIENTS, saved=True), _work.table(latents, _MLA)
)
