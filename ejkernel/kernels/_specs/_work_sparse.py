"""Work and benchmark shapes of attention over chosen blocks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _work, _work_attention
from ejkernel.kernels._specs._work import BACKWARD, CPU, DEVICE
from ejkernel.kernels._specs._work_attention import products, qkv


def _sparse_lengths(args: Any) -> list[tuple[int, int]]:
    """Start and length of every sequence in the token axis."""
    t = args.query.shape[1]
    if (cuts := _spec.known(args.cu_seqlens)) is None:
        return [(0, t)]
    return list(zip(cuts[:-1].tolist(), np.diff(cuts).tolist(), strict=True))


def selected_pairs(args: Any) -> int:
    """Pairs of the selected branch, summed over rows and query heads."""
    (batch, _, heads, _), groups, size = args.query.shape, args.key.shape[2], args.block_size
    counts, lists = _spec.known(args.block_counts), _spec.known(args.block_indices)
    shape = getattr(args.block_indices, "shape", None)
    most = shape[-1] if shape else args.max_blocks
    total = 0
    for start, length in _sparse_lengths(args):
        here, position = slice(start, start + length), np.arange(length)
        own = position // size
        if lists is not None:
            allowed = most if counts is None else counts[:, here, :, None]
            valid = np.arange(most) < allowed
            blocks = np.where(valid, lists[:, here], -1)  # [b, t, g, k]
            total += _keys_in_lists(blocks, position, size)
            continue
        room = (own + 1)[None, :, None]
        chosen = np.minimum(room, most if counts is None else np.maximum(counts[:, here], 1))
        seen = (chosen - 1) * size + (position % size + 1)[None, :, None]
        total += int(np.broadcast_to(seen, (batch, length, groups)).sum())
    return total * (heads // groups)


def _keys_in_lists(blocks: np.ndarray, position: np.ndarray, size: int) -> int:
    """Keys at or before each position in its list of blocks; a block counts once."""
    ordered = np.sort(blocks, axis=-1)
    new = np.ones(ordered.shape, bool)
    new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    there = position[None, :, None, None]
    keys = np.clip(there - ordered * size + 1, 0, size)
    return int((keys * (new & (ordered >= 0))).sum())


def _compressed_pairs(args: Any) -> int:
    batch, _, heads, _ = args.query.shape
    whole = (
        ((np.arange(length) + 1) // args.block_size).sum() for _, length in _sparse_lengths(args)
    )
    return batch * heads * int(sum(whole))


def _nsa_flops(args: Any, direction: str) -> int:
    """The branches that have gates; choosing blocks costs the scores of the compressed keys."""
    (batch, _, heads, d), e = args.query.shape, args.value.shape[-1]
    gated = [name for name in ("g_cmp", "g_slc", "g_swa") if getattr(args, name) is not None]
    total = 0
    if "g_cmp" in gated:
        total += products(_compressed_pairs(args), d, e, direction)
    if not gated or "g_slc" in gated:
        total += products(selected_pairs(args), d, e, direction)
        scored = "g_cmp" not in gated and args.block_indices is None and direction != BACKWARD
        total += 2 * _compressed_pairs(args) * d if scored else 0
    if "g_swa" in gated:
        near = (args.window_size - 1, 0)
        pairs = sum(_work.window_pairs(n, n, near) for _, n in _sparse_lengths(args))
        total += products(batch * heads * pairs, d, e, direction)
    return total


def _selected_flops(args: Any, direction: str) -> int:
    return products(selected_pairs(args), args.query.shape[-1], args.value.shape[-1], direction)


def _sparse_outputs(args: Any) -> int:
    shape = (*args.query.shape[:3], args.value.shape[-1])
    return _work.size_of(jax.ShapeDtypeStruct(shape, args.query.dtype))


def _blocks(
    dtype: Any, key: jax.Array, b: int, t: int, h: int, d: int, size: int
) -> dict[str, Any]:
    """An eighth of the blocks, chosen at random for each row of blocks."""
    count = t // size
    rng = np.random.default_rng(0)
    mask = rng.random((count, count)).argsort(axis=1) < max(count // 8, 1)
    made = qkv(dtype, key, b, t, h, h, d, {})
    return made | {"sparsity_mask": jnp.asarray(mask), "block_size": size}


_BLOCKSPARSE = (
    ("B1 S2048 H8 d64, 1/8 of blocks of 64", CPU, (1, 2048, 8, 64, 64)),
    ("B1 S16384 H16 d128, 1/8 of blocks of 128", DEVICE, (1, 16384, 16, 128, 128)),
)


def _nsa(
    dtype: Any, key: jax.Array, t: int, h: int, g: int, d: int, count: int, gates: bool
) -> dict[str, Any]:
    made = qkv(dtype, key, 1, t, h, g, d, {"block_counts": count, "block_size": 64})
    if gates:
        keys = jax.random.split(jax.random.fold_in(key, 1), 2)
        for name, k in zip(("g_cmp", "g_slc"), keys, strict=True):
            made[name] = jax.nn.sigmoid(jax.random.normal(k, (1, t, h))).astype(dtype)
    return made


_NSA = (
    ("T2048 H16/1 d64, 16 of 64", CPU, (2048, 16, 1, 64, 16, False)),
    ("T8192 H64/4 d128, 16 of 64, compressed and selected", DEVICE, (8192, 64, 4, 128, 16, True)),
    ("T8192 H64/4 d128, 16 of 64, selected", DEVICE, (8192, 64, 4, 128, 16, False)),
)


def _lists(
    dtype: Any, key: jax.Array, t: int, h: int, g: int, d: int, count: int
) -> dict[str, Any]:
    """Lists with the own block, the first one, and others before it."""
    rng, own = np.random.default_rng(0), np.arange(t)[None, :, None, None] // 64
    lists = rng.integers(0, own + 1, (1, t, g, count))
    lists[..., :1], lists[..., 1:2] = own, 0
    made = qkv(dtype, key, 1, t, h, g, d, {"block_size": 64})
    return made | {"block_indices": jnp.asarray(lists, jnp.int32)}


_APPLY = (
    ("T2048 H16/1 d64, 16 of 64", CPU, (2048, 16, 1, 64, 16)),
    ("T8192 H64/4 d128, 16 of 64", DEVICE, (8192, 64, 4, 128, 16)),
)


_GRADIENTS = _work_attention.GRADIENTS | {"g_cmp", "g_slc", "g_swa"}
_traffic = _work.streamed(_sparse_outputs, _GRADIENTS, saved=True)

blocksparse_attention = _spec.Work(
    _work_attention.flops, _work_attention.traffic, _work.table(_blocks, _BLOCKSPARSE)
)
native_sparse_attention = _spec.Work(_nsa_flops, _traffic, _work.table(_nsa, _NSA))
apply_native_sparse_attention = _spec.Work(_selected_flops, _traffic, _work.table(_lists, _APPLY))
