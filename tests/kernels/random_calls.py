"""Random valid calls of every op: shapes, dtypes and options from one seed."""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import kernel_registry
from ejkernel.kernels._specs import recurrent as recurrent_spec
from ejkernel.types import block_mask


class Draw:
    """Choices by name, each with random numbers of its own.

    A name in `plain` takes its first and simplest value, and no other choice changes: whoever finds
    a failing seed can put one name after another into `plain` and see which ones matter. `data`
    changes the numbers in the arrays alone.
    """

    def __init__(self, seed: int, plain: Any = (), data: int = 0, dtype: str | None = None):
        self.seed, self.plain, self.data = seed, frozenset(plain), data
        self.chosen: dict[str, Any] = {}
        self.dtype = dtype or self.pick("dtype", "float32", "float32", "bfloat16", "float16")

    def rng(self, name: str, data: int = 0) -> np.random.Generator:
        return np.random.default_rng([self.seed, data, zlib.crc32(name.encode())])

    def pick(self, name: str, *options: Any) -> Any:
        index = 0 if name in self.plain else int(self.rng(name).integers(len(options)))
        self.chosen[name] = options[index]
        return options[index]

    def rarely(self, name: str) -> bool:
        return self.pick(name, *(False,) * 5, True)

    def normal(self, name: str, *shape: int, size: float = 1.0, dtype: Any = None) -> Any:
        numbers = size * self.rng(name, self.data + 1).standard_normal(shape)
        return jnp.asarray(numbers.astype(np.float32)).astype(dtype or self.dtype)

    def integers(self, name: str, low: Any, high: Any, shape: Any, dtype: Any = np.int32) -> Any:
        return self.rng(name).integers(low, high, shape).astype(dtype)

    def cuts(self, name: str, count: int, total: int) -> np.ndarray:
        """Offsets of `count` sequences in `total` tokens: some empty, perhaps tokens of none."""
        end = self.pick(f"{name} end", total, total, max(total - 3, 0), total // 2)
        inner = np.sort(self.integers(name, 0, end + 1, max(count - 1, 0)))
        return np.asarray([0, *inner, end][: count + 1], np.int32)


def _heads(draw: Draw) -> tuple[int, int]:
    groups, repeat = draw.pick("groups", 1, 2, 3), draw.pick("repeat", 1, 2, 3, 5)
    return (groups * repeat, groups) if groups * repeat <= 6 else (groups, groups)


def _widths(draw: Draw) -> tuple[int, int]:
    d = draw.pick("d", 16, 8, 1, 5, 24, 32, 40)
    return d, draw.pick("e", d, d, 8, 3, 48)


LENGTHS = (17, 1, 2, 7, 16, 31, 32, 33, 48, 65)


def _length(draw: Draw, name: str) -> int:
    return 0 if draw.pick(f"no {name}", *(False,) * 20, True) else draw.pick(name, *LENGTHS)


def _scale(draw: Draw) -> dict[str, Any]:
    scale = draw.pick("scale", None, None, 0.3, -0.2, 1, "array")
    if scale is None:
        return {}
    return {"softmax_scale": jnp.asarray(0.4, jnp.float32) if scale == "array" else scale}


WINDOWS = (None, None, 0, 1, 7, (0, -1), (-1, 0), (3, 2), (-1, 4), (20, -1), 1000, (0, 0))


def _scores(draw: Draw, heads: int) -> dict[str, Any]:
    """Options of scores that all attention has."""
    made: dict[str, Any] = {
        "logits_soft_cap": draw.pick("cap", None, None, None, 5.0, 0.7),
        "sliding_window": draw.pick("window", *WINDOWS),
        "return_lse": draw.pick("lse", False, True),
    } | _scale(draw)
    sinks, count = draw.pick("sinks", None, None, "all", "1d", "head"), draw.pick("number", 1, 2, 3)
    if sinks == "1d" and count == heads:
        sinks = "all"
    if sinks:
        shape = {"all": (1, count), "1d": (count,), "head": (heads, count)}[sinks]
        made["softmax_aux"] = draw.normal("softmax_aux", *shape)
    return made


def _slopes(draw: Draw, heads: int) -> dict[str, Any]:
    if not draw.pick("alibi", False, False, True):
        return {}
    return {"alibi_slopes": draw.normal("slopes", heads, size=0.5, dtype="float32")}


def _against(draw: Draw, name: str, full: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to another."""
    return tuple(draw.pick(f"{name} axis {i}", 1, n, n) for i, n in enumerate(full))


def _masks(draw: Draw, b: int, h: int, t: int, s: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if kind := draw.pick("mask", None, None, None, "bool", "int"):
        rng = draw.rng("attention_mask")
        shape = _against(draw, "mask", (b, h, t, s))
        mask = rng.random(shape) < draw.pick("share", 0.8, 0.5, 0.1)
        made["attention_mask"] = jnp.asarray(mask if kind == "bool" else 2 * mask.astype(np.int32))
    if kind := draw.pick("bias", None, None, "plain", "hides"):
        bias = draw.normal("bias", *_against(draw, "bias", (b, h, t, s)))
        if kind == "hides":
            hidden = draw.rng("hidden").random(bias.shape) < 0.2
            bias = jnp.where(jnp.asarray(hidden), jnp.asarray(-jnp.inf, bias.dtype), bias)
        made["bias"] = bias
    return made


def _segments(draw: Draw, b: int, t: int, s: int) -> dict[str, Any]:
    kind = draw.pick("segments", "sorted", "any")
    made = {}
    for name, length in (("q_segment_ids", t), ("kv_segment_ids", s)):
        ids = draw.integers(name, -1, 3, (b, length))
        made[name] = jnp.asarray(np.sort(ids, axis=1)[:, ::-1] if kind == "sorted" else ids)
    if t == s and draw.rarely("one side"):
        del made["kv_segment_ids"]
    return made


def _lengths(draw: Draw, b: int, t: int, s: int) -> dict[str, Any]:
    if b != 1:
        q, k = (draw.integers(f"{n} lengths", 0, m + 1, b) for n, m in (("q", t), ("k", s)))
        made = {"cum_seqlens_q": np.cumsum([0, *q]), "cum_seqlens_k": np.cumsum([0, *k])}
    else:
        count = draw.pick("sequences", 2, 1, 3, 5, 0)
        made = {
            "cum_seqlens_q": draw.cuts("q", count, t),
            "cum_seqlens_k": draw.cuts("k", count, s),
        }
    return {name: jnp.asarray(x, jnp.int32) for name, x in made.items()}


def _dropout(draw: Draw) -> dict[str, Any]:
    prob = draw.pick("dropout", 0.0, 0.0, 0.0, 0.3, 0.9)
    seeds = (3, 2**63 + 5, np.uint32(7), np.int32(-4), np.asarray([5, 6], np.uint32))
    return {"dropout_prob": prob, "dropout_seed": draw.pick("seed", *seeds)} if prob else {}


def flash_attention(draw: Draw, packed: bool = True) -> dict[str, Any]:
    b = draw.pick("b", 1, 1, 2, 3) if not draw.rarely("no batch") else draw.pick("b0", 1, 0)
    t, s = _length(draw, "t"), _length(draw, "s")
    s = t if draw.pick("square", True, False) else s
    (heads, groups), (d, e) = _heads(draw), _widths(draw)
    values: dict[str, Any] = {
        "query": draw.normal("query", b, t, heads, d),
        "key": draw.normal("key", b, s, groups, d),
        "value": draw.normal("value", b, s, groups, e),
        "causal": draw.pick("causal", False, True),
    }
    values |= _scores(draw, heads) | _slopes(draw, heads) | _masks(draw, b, heads, t, s)
    values |= _dropout(draw)
    lengths = draw.pick("lengths", None, None, "cuts", "ids", "both")
    if lengths in ("cuts", "both") and packed:
        values |= _lengths(draw, b, t, s)
    if lengths in ("ids", "both"):
        values |= _segments(draw, b, t, s)
    return values


def attention(draw: Draw) -> dict[str, Any]:
    values = flash_attention(draw)
    del values["return_lse"]
    return values


def ring_attention(draw: Draw) -> dict[str, Any]:
    return flash_attention(draw, packed=False)


def mla_attention(draw: Draw) -> dict[str, Any]:
    values = flash_attention(draw)
    b, t, heads, d = values["query"].shape
    _, s, groups, e = values["value"].shape
    latent, rope = draw.pick("latent", 16, 12, 5, 33), draw.pick("rope", 4, 6, 1, 16)
    del values["key"], values["value"]
    values |= {
        "key_value": draw.normal("key_value", b, s, latent),
        "w_kc": draw.normal("w_kc", latent, groups, d, size=latent**-0.5),
        "w_vc": draw.normal("w_vc", latent, groups, e, size=latent**-0.5),
    }
    where = draw.pick("rope in", None, "query", "heads", "shared")
    if where:
        values["b_k"] = draw.normal("b_k", b, s, rope)
    if where == "query":
        values["query"] = draw.normal("query", b, t, heads, d + rope)
    elif where:
        values["b_q"] = draw.normal("b_q", b, t, *((heads,) if where == "heads" else ()), rope)
    return values


def blocksparse_attention(draw: Draw) -> dict[str, Any]:
    b, t = draw.pick("b", 1, 2), draw.pick("t", *LENGTHS)
    s = t if draw.pick("square", True, False) else draw.pick("s", *LENGTHS)
    (heads, groups), (d, e) = _heads(draw), _widths(draw)
    size = draw.pick("block", 16, 8, 5, 1, 32, 64)
    size = max(size, max(t, s) // 12)
    values: dict[str, Any] = {
        "query": draw.normal("query", b, t, heads, d),
        "key": draw.normal("key", b, s, groups, d),
        "value": draw.normal("value", b, s, groups, e),
        "causal": draw.pick("causal", False, True),
        "block_size": size,
    }
    values |= _scores(draw, heads) | _masks(draw, b, heads, t, s)
    if draw.pick("ids", False, False, True):
        values |= _segments(draw, b, t, s)
    kind = draw.pick("blocks", "mask", "mask", "int", "builder")
    if kind == "builder":
        builders = (
            block_mask.local(1),
            block_mask.causal() & block_mask.random(2, seed=3),
            block_mask.bigbird(1, 1, 1, seed=5),
            block_mask.strided(2),
            block_mask.global_(1) | block_mask.local(0),
        )
        return values | {"mask_builder": draw.pick("builder", *builders)}
    lead = draw.pick("lead", (), (heads,), (b, 1), (b, heads), (1, 1))
    shape = (*lead, -(-t // size), -(-s // size))
    mask = draw.rng("sparsity_mask").random(shape) < draw.pick("filled", 1.0, 0.5, 0.2, 0.0)
    values["sparsity_mask"] = jnp.asarray(mask if kind == "mask" else mask.astype(np.int32))
    return values


def _caches(draw: Draw, groups: int, *arrays: Any) -> tuple[list[Any], dict[str, Any]]:
    """Cached keys and values in the dtype of queries, or in a narrow one with scales."""
    narrow = draw.pick("cache", None, None, "int8", "float8_e4m3fn", "float8_e5m2")
    scales: dict[str, Any] = {}
    for name in ("k_scale", "v_scale"):
        kind = draw.pick(name, None, "number", "heads")
        factor = 30.0 if narrow == "int8" else 1.0
        if kind or narrow == "int8":
            each = np.linspace(0.5, 1.5, groups).astype(np.float32) / factor
            scales[name] = jnp.asarray(each) if kind == "heads" else float(1.2 / factor)
    if narrow is None:
        return list(arrays), scales
    factor = 30.0 if narrow == "int8" else 1.0
    wide = (np.asarray(x, np.float32) * factor for x in arrays)
    return [jnp.asarray(np.clip(x, -120, 120)).astype(narrow) for x in wide], scales


def _decoding(draw: Draw, heads: int) -> dict[str, Any]:
    made = _scores(draw, heads) | _slopes(draw, heads)
    return made | {"num_splits": draw.pick("splits", None, None, 1, 2, 5)}


def _tables(draw: Draw, rows: int, blocks: int, pages: int) -> np.ndarray:
    tables = draw.integers("tables", 0, pages, (rows, blocks))
    if draw.rarely("bad pages"):
        bad = draw.rng("which").random(tables.shape) < 0.2
        some = draw.integers("bad", 0, 4, tables.shape)
        tables = np.where(bad, np.asarray([-1, pages, 2**31 - 1, -(2**31)])[some], tables)
    return tables.astype(np.int32)


def page_attention(draw: Draw) -> dict[str, Any]:
    b = draw.pick("b", 2, 1, 3, 5)
    (heads, groups), (d, e) = _heads(draw), _widths(draw)
    size, blocks = draw.pick("size", 16, 1, 3, 4, 32, 130), draw.pick("blocks", 3, 1, 2, 6)
    pages = draw.pick("pages", 8, 1, 3, 20)
    shapes = (pages, groups, size, d), (pages, groups, size, e)
    k, v = (draw.normal(n, *x) for n, x in zip(("k", "v"), shapes, strict=True))
    (k, v), scales = _caches(draw, groups, k, v)
    lens = draw.integers("lens", 0, blocks * size + 1, b)
    if draw.rarely("too long"):
        lens[0] = blocks * size + 5
    if draw.pick("full", False, False, True):
        lens[-1] = blocks * size
    return {
        "query": draw.normal("query", b, heads, d),
        "key_cache": k,
        "value_cache": v,
        "context_lens": jnp.asarray(lens),
        "block_tables": jnp.asarray(_tables(draw, b, blocks, pages)),
    } | (_decoding(draw, heads) | scales)


def ragged_decode_attention(draw: Draw) -> dict[str, Any]:
    b, s = draw.pick("b", 2, 1, 3, 5), draw.pick("s", *LENGTHS, 130)
    (heads, groups), (d, e) = _heads(draw), _widths(draw)
    k, v = (draw.normal(n, b, s, groups, x) for n, x in (("k", d), ("v", e)))
    (k, v), scales = _caches(draw, groups, k, v)
    ends = draw.integers("ends", 0, s + 1, b)
    starts = (ends * draw.rng("starts").random(b)).astype(np.int32)
    if draw.pick("from 0", False, True):
        starts = 0 * starts
    if draw.rarely("outside"):
        starts[0], ends[-1] = -3, s + 4
    token = (1,) if draw.rarely("token axis") else ()
    return {
        "query": draw.normal("query", b, *token, heads, d),
        "key": k,
        "value": v,
        "sequence_start": jnp.asarray(starts),
        "sequence_end": jnp.asarray(ends),
    } | (_decoding(draw, heads) | scales)


def _ragged(draw: Draw, size: int, blocks: int) -> dict[str, Any]:
    """Lengths of sequences: decodes, prefills, nothing; not all of them count."""
    count = draw.pick("sequences", 3, 1, 2, 5)
    room = blocks * size
    queries = draw.integers("queries", 0, 1 + draw.pick("most queries", 9, 1, 2, 20), count)
    if draw.pick("decodes", False, True):
        queries[: draw.pick("some", 1, 2, 3)] = 1
    lens = draw.integers("lens", np.minimum(queries, room), room + 1, count)
    if draw.rarely("surplus"):
        lens[-1] = min(queries[-1] // 2, room)
    starts = np.cumsum([0, *queries]).astype(np.int32)
    number = count - 1 if draw.rarely("fewer") else count
    extra = draw.pick("extra", 0, 2)
    return {
        "count": count,
        "tokens": int(starts[-1]) + extra,
        "lens": lens,
        "starts": starts,
        "number": number,
    }


def ragged_page_attention(draw: Draw) -> dict[str, Any]:
    (heads, groups), d = _heads(draw), _widths(draw)[0]
    size, blocks = draw.pick("size", 16, 1, 3, 4, 32, 130), draw.pick("blocks", 3, 1, 2, 6)
    pages = draw.pick("pages", 8, 1, 3, 20)
    ids = _ragged(draw, size, blocks)
    (kv,), scales = _caches(draw, groups, draw.normal("kv", pages, size, 2 * groups, d))
    return {
        "queries": draw.normal("queries", ids["tokens"], heads, d),
        "kv_pages": kv,
        "context_lens": jnp.asarray(ids["lens"]),
        "block_tables": jnp.asarray(_tables(draw, ids["count"], blocks, pages)),
        "query_start_loc": jnp.asarray(ids["starts"]),
        "num_seqs": ids["number"],
    } | (_decoding(draw, heads) | scales)


def ragged_page_attention_v3(draw: Draw) -> dict[str, Any]:
    """Pages of their own for each sequence, so that no two tokens have one place."""
    values = ragged_page_attention(draw)
    tokens, count = values["queries"].shape[0], values["context_lens"].shape[0]
    _, size, double, d = values["kv_pages"].shape
    blocks = values["block_tables"].shape[1]
    pages = count * blocks + 1
    (kv,), _ = _caches(draw, double // 2, draw.normal("kv", pages, size, double, d))
    tables = draw.rng("order").permutation(pages)[: count * blocks].reshape(count, blocks)
    number = values.pop("num_seqs")
    queries = np.diff(np.asarray(values["query_start_loc"]))
    lens = np.maximum(np.asarray(values.pop("context_lens")), np.minimum(queries, blocks * size))
    return values | {
        "keys": draw.normal("keys", tokens, double // 2, d),
        "values": draw.normal("values", tokens, double // 2, d),
        "kv_pages": kv,
        "block_tables": jnp.asarray(tables, jnp.int32),
        "kv_lens": jnp.asarray(lens),
        "distribution": jnp.asarray([0, 0, number], jnp.int32),
    }


def mla_page_attention(draw: Draw) -> dict[str, Any]:
    heads = draw.pick("heads", 2, 1, 3, 5, 16)
    latent, rope = draw.pick("latent", 16, 12, 5, 33), draw.pick("rope", 4, 6, 1, 16)
    size, blocks = draw.pick("size", 16, 1, 3, 4, 32, 130), draw.pick("blocks", 3, 1, 2, 6)
    pages = draw.pick("pages", 8, 1, 3, 20)
    ids = _ragged(draw, size, blocks)
    (kv,), scales = _caches(draw, 1, draw.normal("kv", pages, size, latent + rope))
    scales.pop("v_scale", None)
    return (
        {"softmax_scale": 0.3}
        | {
            "q_nope": draw.normal("q_nope", ids["tokens"], heads, latent),
            "q_pe": draw.normal("q_pe", ids["tokens"], heads, rope),
            "kv_pages": kv,
            "context_lens": jnp.asarray(ids["lens"]),
            "block_tables": jnp.asarray(_tables(draw, ids["count"], blocks, pages)),
            "query_start_loc": jnp.asarray(ids["starts"]),
            "num_seqs": ids["number"],
        }
        | (_decoding(draw, heads) | scales)
    )


def _slots(draw: Draw, room: int) -> np.ndarray:
    count = draw.pick("tokens", 5, 0, 1, 9)
    slots = draw.rng("slots").permutation(room)[:count].astype(np.int32)
    if draw.pick("skipped", False, True):
        bad = draw.rng("which").random(slots.shape) < 0.4
        some = draw.integers("bad", 0, 4, slots.shape)
        slots = np.where(bad, np.asarray([-1, -1, room, -7])[some], slots).astype(np.int32)
    return slots


def _cache_dtype(draw: Draw) -> str:
    return draw.pick("cache", draw.dtype, draw.dtype, "int8", "float8_e4m3fn")


def update_paged_cache(draw: Draw) -> dict[str, Any]:
    pages, size = draw.pick("pages", 3, 1, 5), draw.pick("size", 4, 1, 3, 16)
    groups, (d, e), dtype = draw.pick("groups", 2, 1, 3), _widths(draw), _cache_dtype(draw)
    slots = _slots(draw, pages * size)
    return {
        "key_cache": draw.normal("k", pages, groups, size, d, size=9.0, dtype=dtype),
        "value_cache": draw.normal("v", pages, groups, size, e, size=9.0, dtype=dtype),
        "keys": draw.normal("keys", len(slots), groups, d, size=9.0, dtype=dtype),
        "values": draw.normal("values", len(slots), groups, e, size=9.0, dtype=dtype),
        "slot_mapping": jnp.asarray(slots),
    }


def update_kv_pages(draw: Draw) -> dict[str, Any]:
    values = update_paged_cache(draw)
    pages, groups, size, d = values["key_cache"].shape
    dtype, count = values["keys"].dtype, values["keys"].shape[0]
    del values["key_cache"], values["value_cache"]
    return values | {
        "kv_pages": draw.normal("kv", pages, size, 2 * groups, d, size=9.0, dtype=dtype),
        "values": draw.normal("values", count, groups, d, size=9.0, dtype=dtype),
    }


def update_latent_pages(draw: Draw) -> dict[str, Any]:
    pages, size = draw.pick("pages", 3, 1, 5), draw.pick("size", 4, 1, 3, 16)
    latent, rope = draw.pick("latent", 16, 12, 5, 33), draw.pick("rope", 4, 6, 1, 16)
    slots, dtype = _slots(draw, pages * size), _cache_dtype(draw)
    return {
        "kv_pages": draw.normal("kv", pages, size, latent + rope, size=9.0, dtype=dtype),
        "latents": draw.normal("latents", len(slots), latent, size=9.0, dtype=dtype),
        "ropes": draw.normal("ropes", len(slots), rope, size=9.0, dtype=dtype),
        "slot_mapping": jnp.asarray(slots),
    }


def _sparse(draw: Draw) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Queries, keys and values of native sparse attention; batch, tokens, groups, block size."""
    packed = draw.pick("packed", False, True)
    b = 1 if packed else draw.pick("b", 1, 2)
    t = draw.pick("t", 17, 1, 2, 7, 16, 33, 48)
    (heads, groups), (d, e) = _heads(draw), _widths(draw)
    size = draw.pick("block", 4, 1, 5, 16, 64)
    values: dict[str, Any] = {
        "query": draw.normal("query", b, t, heads, d),
        "key": draw.normal("key", b, t, groups, d),
        "value": draw.normal("value", b, t, groups, e),
        "block_size": size,
    } | _scale(draw)
    if packed:
        count = draw.pick("sequences", 2, 1, 3, 5)
        values["cu_seqlens"] = jnp.asarray(draw.cuts("cuts", count, t))
    return values, (b, t, groups, size)


def _lists(draw: Draw, values: dict[str, Any], sizes: tuple[int, ...]) -> Any:
    b, t, groups, size = sizes
    k = draw.pick("entries", 3, 1, 2, 6)
    cuts = values.get("cu_seqlens")
    longest = t if cuts is None else int(np.diff(np.asarray(cuts)).max(initial=0))
    lists = draw.integers("lists", -1, max(-(-longest // size), 1), (b, t, groups, k))
    return jnp.asarray(lists if longest else np.full_like(lists, -1))


def native_sparse_attention(draw: Draw) -> dict[str, Any]:
    values, (b, t, groups, size) = _sparse(draw)
    heads = values["query"].shape[2]
    gates = draw.pick(
        "gates", (), ("g_slc",), ("g_cmp",), ("g_swa",), ("g_cmp", "g_slc"),
        ("g_cmp", "g_slc", "g_swa"),
    )  # fmt: skip
    for name in gates:
        values[name] = draw.normal(name, b, t, heads)
    values["window_size"] = draw.pick("window", 6, 1, 3, 100) if "g_swa" in gates else 0
    choice = draw.pick("choice", "number", "counts", "lists", "lists and counts")
    values["block_counts"] = draw.pick("count", 2, 1, 3, 16)
    if "lists" in choice:
        values["block_indices"] = _lists(draw, values, (b, t, groups, size))
        values["block_counts"] = 16
    if "counts" in choice:
        values["block_counts"] = jnp.asarray(draw.integers("counts", 1, 5, (b, t, groups)))
    return values


def apply_native_sparse_attention(draw: Draw) -> dict[str, Any]:
    values, sizes = _sparse(draw)
    values["block_indices"] = _lists(draw, values, sizes)
    counts = draw.pick("counts", None, "number", "array")
    if counts == "number":
        values["block_counts"] = draw.pick("count", 2, 1, 16)
    if counts == "array":
        values["block_counts"] = jnp.asarray(draw.integers("array", 0, 5, sizes[:3]))
    return values


def _gate(draw: Draw, name: str, *shape: int) -> Any:
    numbers = np.asarray(draw.normal(name, *shape, dtype="float32"))
    gate = -np.log1p(np.exp(-(numbers + draw.pick("gates are near", 2.0, 0.0, 6.0))))
    if draw.rarely("strong gates"):
        gate = np.where(draw.rng(name + " strong").random(shape) < 0.2, -30.0, gate)
    return jnp.asarray(gate).astype(draw.dtype)


def _linear(draw: Draw, heads: tuple[int, int, int]) -> tuple[dict[str, Any], tuple[int, ...]]:
    packed = draw.pick("packed", False, True)
    b = 1 if packed else draw.pick("b", 1, 2)
    t, (d, e) = _length(draw, "t"), _widths(draw)
    most = max(heads)
    values: dict[str, Any] = {
        "query": draw.normal("query", b, t, heads[0], d),
        "key": draw.normal("key", b, t, heads[1], d),
        "value": draw.normal("value", b, t, heads[2], e),
        "reverse": draw.pick("reverse", False, True),
        "return_state": draw.pick("state out", False, True),
    } | _scale(draw)
    rows = b
    if packed:
        rows = draw.pick("sequences", 2, 1, 3, 5, 0)
        values["cu_seqlens"] = jnp.asarray(draw.cuts("cuts", rows, t))
    if draw.pick("state in", False, True):
        values["initial_state"] = draw.normal("initial_state", rows, most, d, e)
    return values, (b, t, most, d, e)


def linear_recurrence(draw: Draw) -> dict[str, Any]:
    heads = draw.pick("heads", (2, 2, 2), (4, 2, 2), (2, 1, 4), (1, 1, 1), (3, 1, 1), (2, 4, 2))
    values, (b, t, h, d, e) = _linear(draw, heads)
    shapes = {"g": (b, t, h), "gk": (b, t, h, d), "gv": (b, t, h, e)}
    kinds = (), ("g",), ("gk",), ("gv",), ("g", "gk"), ("gk", "gv"), ("g", "gk", "gv"), ("g", "gv")
    for name in draw.pick("gates", *kinds):
        values[name] = _gate(draw, name, *shapes[name])
    if draw.pick("gamma", False, True):
        values["g_gamma"] = -jnp.abs(draw.normal("g_gamma", h, size=0.3))
    return values


def gla(draw: Draw) -> dict[str, Any]:
    heads, groups = _heads(draw)
    values, (b, t, h, d, _) = _linear(draw, (heads, groups, groups))
    if draw.pick("gate", False, True):
        values["g"] = _gate(draw, "g", b, t, h, d)
    if draw.pick("gamma", False, True):
        values["g_gamma"] = -jnp.abs(draw.normal("g_gamma", h, size=0.3))
    return values


def lightning_attention(draw: Draw) -> dict[str, Any]:
    heads, groups = _heads(draw)
    values, (_, _, h, _, _) = _linear(draw, (heads, groups, groups))
    if draw.pick("gamma", False, True):
        return values | {"g_gamma": -jnp.abs(draw.normal("g_gamma", h, size=0.3))}
    return values | {"layer_idx": draw.pick("layer", 3, 0, 7), "num_layers": 8}


def _swish(x: Any) -> Any:
    return x / (1 + jnp.exp(-x))


def recurrent(draw: Draw) -> dict[str, Any]:
    b, t = draw.pick("b", 2, 1, 3, 17), draw.pick("t", 5, 1, 2, 9, 16, 0)
    i, d = draw.pick("i", 8, 1, 5, 16, 33), draw.pick("d", 8, 1, 5, 16, 33)
    cell, way = draw.pick("cell", "lstm", "gru", "rnn"), draw.pick("way", "on", "back", "both")
    m, both = recurrent_spec.GATES[cell] * d, way == "both"
    shapes: dict[str, tuple[int, ...]] = {"w_ih": (m, i), "w_hh": (m, d)}
    biases = draw.pick("biases", ("b_ih", "b_hh"), (), ("b_ih",), ("b_hh",))
    shapes |= dict.fromkeys(biases, (m,))
    weights = {
        name + end: draw.normal(name + end, *shape, size=0.5)
        for end in (("", "_reverse") if both else ("",))
        for name, shape in shapes.items()
    }
    state = ((2,) if both else ()) + (b, d)
    states = tuple(draw.normal(name, *state) for name in ("h", "c"))
    values: dict[str, Any] = {
        "inputs": draw.normal("inputs", b, t, i),
        "hidden": states if cell == "lstm" else states[0],
        "weights": weights,
        "cell_type": cell,
        "bidirectional": both,
        "reverse": way == "back",
        "activation": draw.pick("activation", "tanh", "softsign", "sigmoid", "identity", _swish),
    }
    if draw.rarely("no state"):
        values["hidden"] = None
    if cell != "rnn":
        values["gate_activation"] = draw.pick("gates", "sigmoid", "sigmoid", "softsign", "tanh")
    if draw.pick("lengths", False, True):
        values["lengths"] = jnp.asarray(draw.integers("of rows", 0, t + 1, b))
    return values


def mean_pooling(draw: Draw) -> dict[str, Any]:
    kind = draw.pick("kind", "plain", "mask", "packed")
    b = 1 if kind == "packed" else draw.pick("b", 2, 1, 3, 0)
    t, width = _length(draw, "t"), draw.pick("d", 6, 1, 16, 33, 130)
    heads = draw.pick("heads", (), (1,), (3,))
    values: dict[str, Any] = {
        "inputs": draw.normal("inputs", b, t, *heads, width),
        "chunk_size": draw.pick("chunk", None, 1, 4, 5, 16, 64, 10**6),
    }
    if kind == "mask":
        mask = draw.rng("mask").random((b, t)) < draw.pick("share", 0.7, 0.1, 1.0)
        dtype = draw.pick("mask dtype", "bool", "int32", "float32")
        values["mask"] = jnp.asarray(mask).astype(dtype)
    if kind == "packed":
        count = draw.pick("sequences", 2, 1, 3, 7, 0)
        values["cu_seqlens"] = jnp.asarray(draw.cuts("cuts", count, t))
    return values


def grouped_matmul(draw: Draw) -> dict[str, Any]:
    m, k, n = (draw.pick(a, 17, 1, 8, 16, 33, 64, 0) for a in "mkn")
    k, transposed = max(k, 1), draw.pick("transpose_rhs", False, True)
    groups = draw.pick("groups", 3, 1, 2, 7)
    matrix = (n, k) if transposed else (k, n)
    preferred = draw.pick("preferred", None, None, "float32", "bfloat16")
    values: dict[str, Any] = {"transpose_rhs": transposed, "preferred_element_type": preferred}
    other = draw.pick("rhs dtype", draw.dtype, draw.dtype, "float32")
    if draw.rarely("batched"):
        b = draw.pick("b", 2, 1)
        lhs, rhs = draw.normal("lhs", b, groups, m, k), draw.normal("rhs", b, groups, *matrix)
        return values | {"lhs": lhs, "rhs": rhs}
    cuts = draw.cuts("groups", groups, m)
    values |= {"lhs": draw.normal("lhs", m, k), "group_sizes": jnp.asarray(np.diff(cuts))}
    if draw.rarely("too many rows"):
        values["group_sizes"] = values["group_sizes"] + 3
    local = groups
    if draw.pick("offset", False, True):
        local = draw.pick("here", groups, max(groups - 1, 1), max(groups - 2, 1))
        values["group_offset"] = draw.pick("at", 0, groups - local, (groups - local) // 2)
    values["rhs"] = draw.normal("rhs", local, *matrix, dtype=other)
    if draw.pick("existing", False, True):
        dtype = preferred or jnp.promote_types(draw.dtype, other)
        values["existing_out"] = draw.normal("existing_out", m, n, dtype=dtype)
    return values


def _places(draw: Draw, shape: tuple[int, int], size: int) -> dict[str, Any]:
    count = draw.pick("nnz", 4, 0, 1, 9) if min(shape) else 0
    rows, cols = (
        draw.integers(name, 0, max(-(-length // size), 1), count)
        for name, length in zip(("rows", "cols"), shape, strict=True)
    )
    return {"rows": jnp.asarray(rows), "cols": jnp.asarray(cols)}


def sparse_matmul(draw: Draw) -> dict[str, Any]:
    m, k, n = (draw.pick(a, 17, 1, 8, 16, 33, 0) for a in "mkn")
    size = draw.pick("size", 8, 1, 5, 16)
    places = _places(draw, (m, k), size)
    blocks = draw.normal("blocks", len(places["rows"]), size, size)
    return places | {"blocks": blocks, "dense": draw.normal("dense", k, n), "shape": (m, k)}


def sampled_matmul(draw: Draw) -> dict[str, Any]:
    m, k, n = (draw.pick(a, 17, 1, 8, 16, 33, 0) for a in "mkn")
    size = draw.pick("size", 8, 1, 5, 16)
    lhs, rhs = draw.normal("lhs", m, k), draw.normal("rhs", k, n)
    return _places(draw, (m, n), size) | {"lhs": lhs, "rhs": rhs, "block_size": size}


def merge_attention_states(draw: Draw) -> dict[str, Any]:
    b, t, h, e = (draw.pick(a, 2, 1, 3, 0) for a in "bthe")
    values = {}
    for side in "ab":
        values[f"out_{side}"] = draw.normal(f"out_{side}", b, t, h, e)
        lse = draw.normal(f"lse_{side}", b, h, t, size=3.0, dtype="float32")
        empty = draw.rng(side).random((b, h, t)) < draw.pick(f"empty {side}", 0.0, 0.3, 1.0)
        values[f"lse_{side}"] = jnp.where(jnp.asarray(empty), -jnp.inf, lse)
    return values


MAKERS: dict[str, Callable[[Draw], dict[str, Any]]] = {
    op: globals()[op] for op in kernel_registry.ops()
}


@dataclasses.dataclass(frozen=True)
class RandomCall:
    """A call made from a seed, with the choices that led to it."""

    values: dict[str, Any]
    args: Any
    chosen: dict[str, Any]


def make(op: str, seed: int, plain: Any = (), data: int = 0, dtype: Any = None) -> RandomCall:
    """The random call of a seed, checked as the public function checks it."""
    spec, draw = kernel_registry.spec(op), Draw(seed, plain, data, dtype)
    values = MAKERS[op](draw)
    full = spec.complete(values)
    spec.check_values(full, debug=False)
    return RandomCall(values, spec.canonicalize(spec.unpack(full)), draw.chosen)


def shrunk(op: str, seed: int, fails: Callable[[RandomCall], bool]) -> dict[str, Any]:
    """The choices that a failing call needs in order to fail; all others are plain."""
    plain: set[str] = set()
    for name in make(op, seed).chosen:
        if fails(make(op, seed, plain | {name})):
            plain.add(name)
    return {n: x for n, x in make(op, seed, plain).chosen.items() if n not in plain}
