"""Work and benchmark shapes of decoding, of paged attention and of cache updates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _work
from ejkernel.kernels._specs._work import CPU, DEVICE


def _seen(first: np.ndarray, length: np.ndarray, queries: np.ndarray, window: Any) -> tuple:
    """Visible pairs, and keys that are read, of each sequence.

    A sequence has keys `first` to `length` - 1, and its last `queries` positions are queries.
    """
    left = (window or (None, None))[0]
    pairs, keys = np.zeros_like(length), np.zeros_like(length)
    for i, (begin, end, count) in enumerate(zip(first, length, queries, strict=True)):
        count = min(count, end - begin)  # a query without a position sees nothing
        position = np.arange(end - count, end)
        start = np.full_like(position, begin)
        if left is not None:
            start = np.maximum(start, position - left)
        pairs[i] = (position - start + 1).sum()
        keys[i] = end - start.min(initial=end)
    return int(pairs.sum()), int(keys.sum())


def _decoded(args: Any) -> tuple[int, int]:
    """Pairs a head, and keys, of one query a sequence over pages."""
    room = args.block_tables.shape[1] * args.key_cache.shape[2]
    lens = _spec.known(args.context_lens)
    lens = np.full(args.query.shape[0], room) if lens is None else np.clip(lens, 0, room)
    return _seen(np.zeros_like(lens), lens, np.minimum(lens, 1), args.sliding_window)


def _page_flops(args: Any, direction: str) -> int:
    heads, d = args.query.shape[1:]
    return 2 * heads * _decoded(args)[0] * (d + args.value_cache.shape[-1])


def _page_traffic(args: Any, direction: str) -> int:
    _, groups, _, d = args.key_cache.shape
    e, (batch, heads, _) = args.value_cache.shape[-1], args.query.shape
    keys = _decoded(args)[1] * groups * (d + e) * args.key_cache.dtype.itemsize
    out = jax.ShapeDtypeStruct((batch, heads, e), args.query.dtype)
    return keys + _work.size_of(args.query, args.context_lens, args.block_tables, out)


def _contiguous(args: Any) -> tuple[int, int]:
    """Pairs a head, and keys, of one query a row of contiguous keys."""
    batch, s = args.key.shape[:2]
    ends = [_spec.known(x) for x in (args.sequence_start, args.sequence_end)]
    first = np.zeros(batch, int) if ends[0] is None else np.clip(ends[0], 0, s)
    last = np.full(batch, s) if ends[1] is None else np.clip(ends[1], first, s)
    return _seen(first, last, np.minimum(last - first, 1), args.sliding_window)


def _decode_flops(args: Any, direction: str) -> int:
    heads, d = args.query.shape[-2:]
    return 2 * heads * _contiguous(args)[0] * (d + args.value.shape[-1])


def _decode_traffic(args: Any, direction: str) -> int:
    _, _, groups, d = args.key.shape
    e = args.value.shape[-1]
    keys = _contiguous(args)[1] * groups * (d + e) * args.key.dtype.itemsize
    out = jax.ShapeDtypeStruct((*args.query.shape[:-1], e), args.query.dtype)
    return keys + _work.size_of(args.query, args.sequence_start, args.sequence_end, out)


def _mixed(args: Any) -> tuple[int, int]:
    """Pairs a head, and keys, of sequences that own ranges of the queries."""
    count, blocks = args.block_tables.shape
    lens = args.context_lens if hasattr(args, "context_lens") else args.kv_lens
    given = [_spec.known(x) for x in (lens, args.query_start_loc)]
    tokens = next(iter(args.arrays().values())).shape[0]
    if given[0] is None or given[1] is None:  # equal shares of the queries, and full tables
        queries = np.diff(np.linspace(0, tokens, count + 1).astype(int))
        lengths = np.full(count, blocks * args.kv_pages.shape[1])
    else:
        valid = np.arange(count) < _sequences(args, count)
        queries = np.where(valid, np.diff(np.minimum(given[1], tokens)), 0)
        lengths = np.where(valid & (queries > 0), given[0], 0)
    return _seen(np.zeros_like(lengths), lengths, queries, args.sliding_window)


def _sequences(args: Any, count: int) -> int:
    """How many sequences count."""
    if hasattr(args, "distribution"):
        known = _spec.known(args.distribution)
        return count if known is None else int(known[2])
    known = _spec.known(args.num_seqs)
    return count if known is None else int(known.reshape(-1)[0])


def _ragged_flops(args: Any, direction: str) -> int:
    _, heads, d = args.queries.shape
    return 4 * heads * _mixed(args)[0] * d


def _ragged_traffic(args: Any, direction: str) -> int:
    _, _, double, d = args.kv_pages.shape
    keys = _mixed(args)[1] * double * d * args.kv_pages.dtype.itemsize
    ids = (args.block_tables, args.query_start_loc)
    return keys + 2 * _work.size_of(args.queries) + _work.size_of(*ids)


def _v3_traffic(args: Any, direction: str) -> int:
    """Also reads this step's keys and values once, and writes them to their pages."""
    return _ragged_traffic(args, direction) + 2 * _work.size_of(args.keys, args.values)


def _latent_flops(args: Any, direction: str) -> int:
    heads, latent = args.q_nope.shape[1:]
    return 2 * heads * _mixed(args)[0] * (2 * latent + args.q_pe.shape[-1])


def _latent_traffic(args: Any, direction: str) -> int:
    keys = _mixed(args)[1] * args.kv_pages.shape[-1] * args.kv_pages.dtype.itemsize
    queries = _work.size_of(args.q_nope, args.q_pe, args.q_nope)
    return keys + queries + _work.size_of(args.block_tables, args.query_start_loc)


def _no_flops(args: Any, direction: str) -> int:
    return 0


def _update_traffic(*names: str) -> Any:
    """Tokens are read once and written once; those without a slot are not written."""

    def traffic(args: Any, direction: str) -> int:
        slots = _spec.known(args.slot_mapping)
        tokens = args.slot_mapping.shape[0]
        written = tokens if slots is None else int((slots >= 0).sum())
        size = _work.size_of(*(getattr(args, name) for name in names))
        return size // max(tokens, 1) * 2 * written + _work.size_of(args.slot_mapping)

    return traffic


# Benchmark shapes


def _tables(batch: int, blocks: int) -> jax.Array:
    """Every page once, in random order."""
    order = np.random.default_rng(0).permutation(batch * blocks)
    return jnp.asarray(order.reshape(batch, blocks), jnp.int32)


def page(
    dtype: Any, key: jax.Array, b: int, s: int, h: int, g: int, d: int, size: int
) -> dict[str, Any]:
    cache = (b * s // size, g, size, d)
    shapes = {"query": (b, h, d), "key_cache": cache, "value_cache": cache}
    made = _work.normals(dtype, key, shapes)
    lens = jnp.full(b, s, jnp.int32)
    return made | {"context_lens": lens, "block_tables": _tables(b, s // size)}


_PAGE = (
    ("B8 S4096 H8/2 d64 page 16", CPU, (8, 4096, 8, 2, 64, 16)),
    ("B8 S4096 H8 d64 page 128", CPU, (8, 4096, 8, 8, 64, 128)),
    ("B64 S4096 H32/8 d128 page 128", DEVICE, (64, 4096, 32, 8, 128, 128)),
    ("B64 S4096 H32/8 d128 page 16", DEVICE, (64, 4096, 32, 8, 128, 16)),
    ("B64 S32768 H32/8 d128 page 128", DEVICE, (64, 32768, 32, 8, 128, 128)),
    ("B64 S32768 H32/8 d128 page 16", DEVICE, (64, 32768, 32, 8, 128, 16)),
)


def decode(dtype: Any, key: jax.Array, b: int, s: int, h: int, g: int, d: int) -> dict[str, Any]:
    shapes = {"query": (b, h, d), "key": (b, s, g, d), "value": (b, s, g, d)}
    made = _work.normals(dtype, key, shapes)
    ends = {"sequence_start": jnp.zeros(b, jnp.int32), "sequence_end": jnp.full(b, s, jnp.int32)}
    return made | ends


_DECODE = (
    ("B8 S4096 H8/2 d64", CPU, (8, 4096, 8, 2, 64)),
    ("B64 S4096 H32/8 d128", DEVICE, (64, 4096, 32, 8, 128)),
    ("B64 S32768 H32/8 d128", DEVICE, (64, 32768, 32, 8, 128)),
)


def _mixed_ids(steps: tuple[int, ...], s: int, size: int) -> dict[str, Any]:
    """Sequences with these numbers of queries, each at the end of a context of `s`."""
    count = len(steps)
    return {
        "block_tables": _tables(count, s // size),
        "query_start_loc": jnp.asarray(np.cumsum((0, *steps)), jnp.int32),
        "lens": jnp.full(count, s, jnp.int32),
    }


def ragged(
    dtype: Any, key: jax.Array, steps: tuple[int, ...], s: int, h: int, g: int, d: int, size: int
) -> dict[str, Any]:
    shapes = {"queries": (sum(steps), h, d), "kv_pages": (len(steps) * s // size, size, 2 * g, d)}
    ids = _mixed_ids(steps, s, size)
    ids["context_lens"] = ids.pop("lens")
    return _work.normals(dtype, key, shapes) | ids | {"num_seqs": len(steps)}


_SMALL_MIX, _MIX = (1,) * 6 + (128,) * 2, (1,) * 60 + (1024,) * 4
_RAGGED = (
    ("8 decodes S4096 H8/2 d64 page 16", CPU, ((1,) * 8, 4096, 8, 2, 64, 16)),
    ("6 decodes and 2 prefills of 128, S1024", CPU, (_SMALL_MIX, 1024, 8, 2, 64, 16)),
    ("64 decodes S4096 H32/8 d128 page 16", DEVICE, ((1,) * 64, 4096, 32, 8, 128, 16)),
    ("60 decodes and 4 prefills of 1024, S4096", DEVICE, (_MIX, 4096, 32, 8, 128, 16)),
)


def _v3(
    dtype: Any, key: jax.Array, steps: tuple[int, ...], s: int, h: int, g: int, d: int, size: int
) -> dict[str, Any]:
    tokens, pages = sum(steps), len(steps) * s // size
    shapes = {"queries": (tokens, h, d), "keys": (tokens, g, d), "values": (tokens, g, d)}
    made = _work.normals(dtype, key, shapes | {"kv_pages": (pages, size, 2 * g, d)})
    ids = _mixed_ids(steps, s, size)
    ids["kv_lens"] = ids.pop("lens")
    decodes = steps.count(1)
    distribution = jnp.asarray([decodes, decodes, len(steps)], jnp.int32)
    return made | ids | {"distribution": distribution}


def latent_pages(
    dtype: Any, key: jax.Array, batch: int, s: int, h: int, l: int, r: int, size: int
) -> dict[str, Any]:
    pages = (batch * s // size, size, l + r)
    shapes = {"q_nope": (batch, h, l), "q_pe": (batch, h, r), "kv_pages": pages}
    ids = _mixed_ids((1,) * batch, s, size)
    ids["context_lens"] = ids.pop("lens")
    made = _work.normals(dtype, key, shapes) | ids
    return made | {"num_seqs": batch, "softmax_scale": (l + r) ** -0.5}


_LATENT = (
    ("B4 S2048 H16 576/512 page 16", CPU, (4, 2048, 16, 512, 64, 16)),
    ("B64 S4096 H16 576/512 page 64", DEVICE, (64, 4096, 16, 512, 64, 64)),
    ("B64 S4096 H128 576/512 page 64", DEVICE, (64, 4096, 128, 512, 64, 64)),
)


def _update(
    dtype: Any,
    key: jax.Array,
    caches: dict[str, Any],
    tokens: dict[str, Any],
    count: int,
    room: int,
) -> dict[str, Any]:
    slots = np.random.default_rng(0).permutation(room)[:count]
    made = _work.normals(dtype, key, caches | {n: (count, *rest) for n, rest in tokens.items()})
    return made | {"slot_mapping": jnp.asarray(slots, jnp.int32)}


def _updates(caches: Any, tokens: Any) -> Any:
    """Rows of small and large caches; pages, page size, key heads, head size, tokens."""
    rows = (
        ("256 tokens into 512 pages of 16", CPU, (512, 16, 2, 64, 256)),
        ("8192 tokens into 16384 pages of 16", DEVICE, (16384, 16, 8, 128, 8192)),
    )

    def values(dtype: Any, key: jax.Array, p: int, w: int, g: int, d: int, n: int) -> Any:
        new = {name: (n, *rest) for name, rest in tokens(g, d).items()}
        made = _work.normals(dtype, key, caches(p, w, g, d) | new)
        slots = np.random.default_rng(0).permutation(p * w)[:n]
        return made | {"slot_mapping": jnp.asarray(slots, jnp.int32)}

    return _work.table(values, rows)


page_attention = _spec.Work(_page_flops, _page_traffic, _work.table(page, _PAGE))
ragged_decode_attention = _spec.Work(_decode_flops, _decode_traffic, _work.table(decode, _DECODE))
ragged_page_attention = _spec.Work(_ragged_flops, _ragged_traffic, _work.table(ragged, _RAGGED))
ragged_page_attention_v3 = _spec.Work(_ragged_flops, _v3_traffic, _work.table(_v3, _RAGGED))
mla_page_attention = _spec.Work(_latent_flops, _latent_traffic, _work.table(latent_pages, _LATENT))
update_paged_cache = _spec.Work(
    _no_flops,
    _update_traffic("keys", "values"),
    _updates(
        lambda p, w, g, d: {"key_cache": (p, g, w, d), "value_cache": (p, g, w, d)},
        lambda g, d: {"keys": (g, d), "values": (g, d)},
    ),
)
update_kv_pages = _spec.Work(
    _no_flops,
    _update_traffic("keys", "values"),
    _updates(
        lambda p, w, g, d: {"kv_pages": (p, w, 2 * g, d)},
        lambda g, d: {"keys": (g, d), "values": (g, d)},
    ),
)
update_latent_pages = _spec.Work(
    _no_flops,
    _update_traffic("latents", "ropes"),
    _updates(
        lambda p, w, g, d: {"kv_pages": (p, w, 4 * d + d)},
        lambda g, d: {"latents": (4 * d,), "ropes": (d,)},
    ),
)
