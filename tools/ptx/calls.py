"""Calls of operations that are long enough for every configuration of the tuner.

The cases of tests are shorter than one tile. Here every loop that Triton pipelines takes at least
two steps more than the deepest pipeline, and what a program holds is cut at an odd length.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import kernel_registry
from ejkernel.types import block_mask

Values = dict[str, Any]


class _Draw:
    """Random arrays of one dtype, each from a key of its own."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self._key = jnp.dtype(dtype), jax.random.key(31)

    def __call__(self, *shape: int) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        return jax.random.normal(key, shape, jnp.float32).astype(self.dtype)


def _attention(draw: _Draw, d: int = 128, e: int = 0, t: int = 330, heads: int = 1) -> Values:
    """Attention from `t` queries to as many keys."""
    return {
        "query": draw(1, t, heads, d),
        "key": draw(1, t, 1, d),
        "value": draw(1, t, 1, e or d),
        "return_lse": True,
    }


def _segments(t: int) -> Values:
    ids = jnp.asarray(np.searchsorted([t // 8, t - 7], np.arange(t), "right")[None], jnp.int32)
    return {"q_segment_ids": ids, "kv_segment_ids": ids}


def _flash(d: int, **options: Any) -> Callable[[_Draw], Values]:
    def make(draw: _Draw) -> Values:
        given = dict(options)
        t = given.pop("t", 330)
        values = _attention(draw, d, given.pop("e", 0), t, given.pop("heads", 1))
        if given.pop("segments", False):
            values |= _segments(t)
        if given.pop("bias", False):
            values["bias"] = draw(1, 1, t, t)
        if given.pop("mask", False):
            values["attention_mask"] = jax.random.bernoulli(jax.random.key(5), 0.8, (1, 1, t, t))
        if given.pop("sinks", False):
            values["softmax_aux"] = draw(1, 2)
        return values | given

    return make


_ATTENTION = {
    "d128 causal": _flash(128, causal=True),
    "d64 causal": _flash(64, causal=True, t=600),
    "d256 causal": _flash(256, causal=True, t=200),
    "d128 full": _flash(128),
    "d64 full": _flash(64, t=520),
    "d128 window": _flash(128, causal=True, sliding_window=(200, 0)),
    "d128 segments": _flash(128, causal=True, segments=True),
    "d64 segments": _flash(64, causal=True, segments=True, t=520),
    "d128 bias": _flash(128, bias=True),
    "d64 bias": _flash(64, bias=True, t=520),
    "d128 mask": _flash(128, mask=True),
    "d128 dropout": _flash(128, causal=True, dropout_prob=0.2, dropout_seed=7),
    "d64 cap sinks": _flash(64, causal=True, logits_soft_cap=20.0, sinks=True, t=520),
    "d192 e128": _flash(192, e=128, causal=True),
    "d192": _flash(192, causal=True),
    "d160 segments": _flash(160, causal=True, segments=True),
    "d96 groups": _flash(96, causal=True, heads=2, t=300),
}


def _recurrence(d: int, e: int, *gates: str, t: int = 300, **options: Any) -> Any:
    def make(draw: _Draw) -> Values:
        values = {"query": draw(1, t, 1, d), "key": draw(1, t, 1, d), "value": draw(1, t, 1, e)}
        shapes = {"g": (1, t, 1), "gk": (1, t, 1, d), "gv": (1, t, 1, e)}
        for name in gates:
            if name == "g_gamma":
                values[name] = jnp.full((1,), -0.05)
            else:
                gate = jax.nn.log_sigmoid(draw(*shapes[name]).astype(jnp.float32) + 2.0)
                values[name] = gate.astype(draw.dtype)
        if options.get("return_state"):
            values["initial_state"] = draw(1, 1, d, e)
        return values | {"softmax_scale": d**-0.5} | options

    return make


_RECURRENCE = {
    "decay d128": _recurrence(128, 128, "g_gamma"),
    "decay d256": _recurrence(256, 256, "g_gamma", t=150),
    "decay d64": _recurrence(64, 64, "g_gamma", t=700),
    "scalar d128": _recurrence(128, 128, "g", return_state=True),
    "gates d128": _recurrence(128, 128, "gk"),
    "gates d256": _recurrence(256, 256, "gk", t=150),
    "gates d64": _recurrence(64, 64, "gk", t=400, return_state=True),
    "reverse d128": _recurrence(128, 64, "g", reverse=True),
    "none d128": _recurrence(128, 128),
    "few tokens": _recurrence(128, 128, "gk", t=7),
}


def _blocksparse(d: int, size: int, **options: Any) -> Callable[[_Draw], Values]:
    def make(draw: _Draw) -> Values:
        values = _flash(d, **options)(draw) | {"block_size": size}
        values["mask_builder"] = block_mask.local(6 * 128 // size) | block_mask.random(1, seed=7)
        return values

    return make


_BLOCKSPARSE = {
    "d128 blocks of 128": _blocksparse(128, 128, causal=True),
    "d64 blocks of 128": _blocksparse(64, 128, causal=True),
    "d128 blocks of 64": _blocksparse(128, 64),
    "d64 blocks of 64": _blocksparse(64, 64),
    "d128 blocks of 32": _blocksparse(128, 32, causal=True, t=300),
    "d128 bias": _blocksparse(128, 128, bias=True),
    "d128 window": _blocksparse(128, 64, causal=True, sliding_window=(200, 0)),
}


def _sparse(
    d: int, heads: int, gates: tuple[str, ...] = (), size: int = 64, t: int = 450
) -> Callable[[_Draw], Values]:
    def make(draw: _Draw) -> Values:
        values: Values = {
            "query": draw(1, t, heads, d),
            "key": draw(1, t, 1, d),
            "value": draw(1, t, 1, d),
            "block_size": size,
            "block_counts": 6,
            "window_size": 320 if "g_swa" in gates else 0,
        }
        for name in gates:
            values[name] = jax.nn.sigmoid(draw(1, t, heads))
        return values

    return make


_ALL_GATES = ("g_cmp", "g_slc", "g_swa")
_SPARSE = {
    "d128 selected": _sparse(128, 16, t=330),
    "d64 selected": _sparse(64, 16, t=330),
    "d128 window": _sparse(128, 1, ("g_swa",)),
    "d64 window": _sparse(64, 1, ("g_swa",)),
    "d128 compressed": _sparse(128, 1, ("g_cmp",), size=4, t=1300),
    "d128 all": _sparse(128, 2, _ALL_GATES, size=32),
}


def _lists(d: int, heads: int, t: int = 330) -> Callable[[_Draw], Values]:
    def make(draw: _Draw) -> Values:
        own = jnp.arange(t)[None, :, None, None] // 64
        chosen = jnp.maximum(own - jnp.arange(6), -1)
        return {
            "query": draw(1, t, heads, d),
            "key": draw(1, t, 1, d),
            "value": draw(1, t, 1, d),
            "block_indices": chosen.astype(jnp.int32),
            "block_size": 64,
        }

    return make


_APPLIED = {"d128": _lists(128, 16), "d64": _lists(64, 4)}


def _narrowed(pages: jax.Array, cache: str | None) -> tuple[jax.Array, Values]:
    """Pages in 8 bits, and the scale that undoes it."""
    if cache is None:
        return pages, {}
    factor = 30.0 if cache == "int8" else 1.0
    return (pages * factor).astype(cache), {"k_scale": 1.0 / factor, "v_scale": 1.0 / factor}


def _tables(count: int, blocks: int) -> jax.Array:
    order = np.random.default_rng(1).permutation(count * blocks)
    return jnp.asarray(order.reshape(count, blocks), jnp.int32)


def _pages(
    d: int, heads: int = 8, size: int = 64, cache: str | None = None, **options: Any
) -> Callable[[_Draw], Values]:
    """Two sequences of up to 1408 keys, which two programs share."""

    def make(draw: _Draw) -> Values:
        blocks = 1408 // size
        keys, values = draw(2 * blocks, 1, size, d), draw(2 * blocks, 1, size, d)
        keys, scales = _narrowed(keys, cache)
        given = {
            "query": draw(2, heads, d),
            "key_cache": keys,
            "value_cache": _narrowed(values, cache)[0],
            "context_lens": jnp.asarray([1400, 65], jnp.int32),
            "block_tables": _tables(2, blocks),
            "num_splits": 2,
        }
        return given | scales | options

    return make


_NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")
_PAGES = {
    "d128": _pages(128),
    "d64": _pages(64),
    "d256": _pages(256),
    "d128 pages of 16": _pages(128, size=16, num_splits=1),
    "d128 window": _pages(128, sliding_window=1000, logits_soft_cap=20.0),
    **{f"d128 {kind}": _pages(128, cache=kind) for kind in _NARROW},
    "d64 int8": _pages(64, cache="int8"),
}


def _decoding(d: int, cache: str | None = None, **options: Any) -> Callable[[_Draw], Values]:
    def make(draw: _Draw) -> Values:
        keys, scales = _narrowed(draw(2, 1408, 1, d), cache)
        given = {
            "query": draw(2, 8, d),
            "key": keys,
            "value": _narrowed(draw(2, 1408, 1, d), cache)[0],
            "sequence_start": jnp.asarray([3, 30], jnp.int32),
            "sequence_end": jnp.asarray([1400, 65], jnp.int32),
            "num_splits": 2,
        }
        return given | scales | options

    return make


_DECODING = {
    "d128": _decoding(128),
    "d64": _decoding(64),
    "d256": _decoding(256),
    "d128 int8": _decoding(128, "int8"),
}


def _starts(tokens: int) -> Values:
    """Prefill behind some earlier keys, then one token behind many."""
    return {
        "query_start_loc": jnp.asarray([0, tokens, tokens + 1], jnp.int32),
        "context_lens": jnp.asarray([tokens + 410, 1000], jnp.int32),
        "num_seqs": 2,
        "num_splits": 2,
    }


def _ragged(
    d: int, size: int = 64, cache: str | None = None, tokens: int = 70, **options: Any
) -> Callable[[_Draw], Values]:
    def make(draw: _Draw) -> Values:
        blocks = 1024 // size
        pages, scales = _narrowed(draw(2 * blocks, size, 2, d), cache)
        given = {
            "queries": draw(tokens + 1, 4, d),
            "kv_pages": pages,
            "block_tables": _tables(2, blocks),
        }
        return given | _starts(tokens) | scales | options

    return make


_RAGGED = {
    "d128": _ragged(128),
    "d64": _ragged(64),
    "d256": _ragged(256, tokens=40),
    "d128 pages of 16": _ragged(128, size=16),
    "d128 window": _ragged(128, sliding_window=600),
    **{f"d128 {kind}": _ragged(128, cache=kind, tokens=40) for kind in _NARROW},
}


def _latent(
    heads: int, cache: str | None = None, tokens: int = 1, latent: int = 512
) -> Callable[[_Draw], Values]:
    """Two sequences over latent vectors of 512 numbers and 64 of positions."""

    def make(draw: _Draw) -> Values:
        blocks = 640 // 64
        pages, scales = _narrowed(draw(2 * blocks, 64, latent + 64), cache)
        scales.pop("v_scale", None)
        given = {
            "q_nope": draw(tokens + 1, heads, latent),
            "q_pe": draw(tokens + 1, heads, 64),
            "kv_pages": pages,
            "block_tables": _tables(2, blocks),
            "softmax_scale": 0.05,
        }
        more = _starts(tokens)
        more["context_lens"] = jnp.asarray([max(tokens, 0) + 300, 600], jnp.int32)
        return given | more | scales

    return make


_LATENT = {
    "16 heads": _latent(16),
    "32 heads": _latent(32),
    "128 heads": _latent(128),
    "128 heads prefill": _latent(128, tokens=3),
    "16 heads prefill": _latent(16, tokens=12),
    "16 heads int8": _latent(16, cache="int8"),
    "128 heads float8": _latent(128, cache="float8_e4m3fn"),
}


def _grouped(
    m: int, k: int, n: int, sizes: tuple[int, ...], **options: Any
) -> Callable[[_Draw], Values]:
    def make(draw: _Draw) -> Values:
        matrix = (n, k) if options.get("transpose_rhs") else (k, n)
        given = {
            "lhs": draw(m, k),
            "rhs": draw(len(sizes), *matrix),
            "group_sizes": jnp.asarray(sizes, jnp.int32),
        }
        return given | options

    return make


_GROUPED = {
    "many rows": _grouped(700, 448, 384, (400, 0, 290)),
    "transposed": _grouped(400, 448, 384, (390,), transpose_rhs=True),
    "some rows": _grouped(120, 448, 384, (50, 0, 69)),
    "few rows": _grouped(40, 768, 768, (3, 30, 7)),
    "odd": _grouped(300, 221, 219, (200, 99)),
}


def _pooling(width: int, t: int, **options: Any) -> Callable[[_Draw], Values]:
    return lambda draw: {"inputs": draw(2, t, width)} | options


_POOLING = {"rows": _pooling(192, 700), "chunks": _pooling(192, 700, chunk_size=100)}


def _cells(cell: str, d: int, batch: int, **options: Any) -> Callable[[_Draw], Values]:
    gates = {"lstm": 4, "gru": 3, "rnn": 1}[cell] * d

    def make(draw: _Draw) -> Values:
        state = draw(batch, d)
        return {
            "inputs": draw(batch, 3, 16),
            "hidden": (state, draw(batch, d)) if cell == "lstm" else state,
            "weights": {
                "w_ih": 0.2 * draw(gates, 16),
                "w_hh": d**-0.5 * draw(gates, d),
                "b_ih": draw(gates),
                "b_hh": draw(gates),
            },
            "cell_type": cell,
        } | options

    return make


_CELLS = {
    f"{cell} {d}": _cells(cell, d, batch)
    for cell in ("lstm", "gru", "rnn")
    for d, batch in ((64, 40), (128, 20), (800, 70))
}


def _slots(tokens: int, total: int) -> jax.Array:
    """A place of its own for each token; some have none."""
    order = np.random.default_rng(3).permutation(total)[:tokens]
    order[::7] = -1
    order[3::50] = total + 5
    return jnp.asarray(order, jnp.int32)


def _written(
    names: tuple[str, str], page: tuple[int, ...], new: tuple[tuple[int, ...], tuple[int, ...]]
) -> Callable[[_Draw], Values]:
    """Pages of 16 tokens and 301 new ones."""

    def make(draw: _Draw) -> Values:
        arrays = {name: draw(301, *shape) for name, shape in zip(names, new, strict=True)}
        return arrays | {"kv_pages": draw(24, *page), "slot_mapping": _slots(301, 24 * 16)}

    return make


def _two_caches(groups: int, d: int) -> Callable[[_Draw], Values]:
    return lambda draw: {
        "keys": draw(301, groups, d),
        "values": draw(301, groups, d),
        "key_cache": draw(24, groups, 16, d),
        "value_cache": draw(24, groups, 16, d),
        "slot_mapping": _slots(301, 24 * 16),
    }


_KEYS, _LATENTS = ("keys", "values"), ("latents", "ropes")
_KV_PAGES = {
    f"d{d}": _written(_KEYS, (16, 2 * g, d), ((g, d), (g, d)))
    for g, d in ((8, 128), (3, 64), (1, 96))
}
_LATENT_PAGES = {
    "512 and 64": _written(_LATENTS, (16, 576), ((512,), (64,))),
    "odd": _written(_LATENTS, (16, 107), ((96,), (11,))),
}
_CACHES = {"d128": _two_caches(8, 128), "d64": _two_caches(3, 64), "d96": _two_caches(1, 96)}

CALLS: dict[str, dict[str, Callable[[_Draw], Values]]] = {
    "flash_attention": _ATTENTION,
    "linear_recurrence": _RECURRENCE,
    "blocksparse_attention": _BLOCKSPARSE,
    "native_sparse_attention": _SPARSE,
    "apply_native_sparse_attention": _APPLIED,
    "page_attention": _PAGES,
    "ragged_decode_attention": _DECODING,
    "ragged_page_attention": _RAGGED,
    "mla_page_attention": _LATENT,
    "grouped_matmul": _GROUPED,
    "mean_pooling": _POOLING,
    "recurrent": _CELLS,
    "update_kv_pages": _KV_PAGES,
    "update_latent_pages": _LATENT_PAGES,
    "update_paged_cache": _CACHES,
}


def make(op: str, name: str, dtype: str) -> Any:
    """The arguments of a call."""
    spec = kernel_registry.spec(op)
    values = CALLS[op][name](_Draw(dtype))
    return spec.canonicalize(spec.unpack(spec.complete(values)))


def of_tuner(op: str, args: Any) -> Any:
    """The arguments that a tuner's configurations are asked for: as many rows as fill a GPU."""
    if op != "linear_recurrence":
        return args
    arrays = {
        name: jax.ShapeDtypeStruct((256, *x.shape[1:]), x.dtype)
        for name, x in args.arrays().items()
        if name in ("query", "key", "value")
    }
    return args.with_arrays(args.arrays() | arrays)
