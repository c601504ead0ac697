"""The case table of attention: a pairwise cover of its options, and the edges that bite."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _cases, _spec

# (batch, t, s, heads, kv heads, d, e): odd lengths, grouped heads, d != e
_SHAPES = {
    "square": (2, 40, 40, 4, 2, 16, 16),
    "long_keys": (1, 19, 50, 3, 1, 8, 24),
    "long_queries": (2, 45, 33, 2, 2, 32, 16),
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "shape": tuple(_SHAPES),
    "causal": (False, True),
    "window": (None, 7, (9, -1), (3, 2)),
    "mask": (None, "full", "key_padding"),
    "bias": (None, "full", "shared"),
    "lengths": (None, "rows", "segments"),
    "sinks": (None, "shared", "per_head"),
    "cap": (None, 5.0),
    "alibi": (False, True),
    "dropout": (0.0, 0.3),
    "return_lse": (False, True),
}


def case_values(row: dict[str, Any], dtype: Any, key: jax.Array) -> dict[str, Any]:
    """Public arguments of one row of options; every array from a key of its own."""
    batch, t, s, heads, kv_heads, d, e = _SHAPES[row["shape"]]
    keys = iter(jax.random.split(key, 12))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

    values: dict[str, Any] = {
        "query": normal(batch, t, heads, d),
        "key": normal(batch, s, kv_heads, d),
        "value": normal(batch, s, kv_heads, e),
        "causal": row["causal"],
        "sliding_window": row["window"],
        "logits_soft_cap": row["cap"],
        "return_lse": row["return_lse"],
    }
    if "scale" in row:
        values["softmax_scale"] = row["scale"]
    if row["mask"] == "full":
        values["attention_mask"] = jax.random.bernoulli(next(keys), 0.8, (batch, 1, t, s))
    elif row["mask"] == "key_padding":
        values["attention_mask"] = jnp.arange(s)[None, None, None] < s - 5
    if row["bias"] == "full":
        values["bias"] = normal(batch, heads, t, s)
    elif row["bias"] == "shared":
        values["bias"] = normal(1, heads, 1, s)
    if row["lengths"] == "rows":
        values |= _row_lengths(batch, t, s)
    elif row["lengths"] == "segments":
        values["q_segment_ids"] = jnp.asarray(segment_rows(batch, t))
        values["kv_segment_ids"] = jnp.asarray(segment_rows(batch, s))
    if row["sinks"] is not None:
        values["softmax_aux"] = normal(heads if row["sinks"] == "per_head" else 1, 2)
    if row["alibi"]:
        values["alibi_slopes"] = 2.0 ** -(1.0 + jnp.arange(heads, dtype=jnp.float32))
    if row["dropout"]:
        values |= {"dropout_prob": row["dropout"], "dropout_seed": 2**40 + 17}
    return values


def _row_lengths(batch: int, t: int, s: int) -> dict[str, Any]:
    """Per-row lengths for a batch; packed sequences, one of them empty, for a single row."""
    if batch == 1:
        q, k = [0, t // 3, t // 3, t - 2, t - 2], [0, s // 4, s // 2, s - 1, s - 1]
    else:
        q, k = np.cumsum([0, t - 6, t]), np.cumsum([0, s, s - 9])
    return {"cum_seqlens_q": jnp.asarray(q, jnp.int32), "cum_seqlens_k": jnp.asarray(k, jnp.int32)}


def segment_rows(batch: int, length: int) -> np.ndarray:
    """Three segments and negative padding, cut differently in each row."""
    ids = np.full((batch, length), -1, np.int32)
    for row in range(batch):
        first, second = length // 3 + row, length - length // 4
        ids[row, : length - 3] = 2
        ids[row, :second] = 1
        ids[row, :first] = 0
    return ids


_PLAIN = {name: values[0] for name, values in OPTIONS.items()}
NAMED = {
    "plain": {},
    "causal": {"causal": True, "return_lse": True},
    "causal_window_sinks": {"causal": True, "window": 7, "sinks": "per_head", "scale": 0.3},
    "packed_causal_dropout": {
        "shape": "long_keys",
        "lengths": "rows",
        "causal": True,
        "dropout": 0.3,
    },
    "segments_window_bias": {"lengths": "segments", "window": (3, 2), "bias": "full"},
}
# without a mask besides, which may hide what is no padding; with lse, which depends on every query
PADDED = {
    "padded_rows": {"lengths": "rows", "return_lse": True},
    "padded_segments": {"lengths": "segments", "return_lse": True},
}
_CORE_ROWS = 7


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    """Named triples first, then the cover; the head of the table is the core."""
    rows = [(name, _PLAIN | row) for name, row in NAMED.items()]
    cover = _cases.pairwise(OPTIONS, seed=3)
    # the richest rows make the core: most options at once
    cover.sort(key=lambda row: sum(row[name] == _PLAIN[name] for name in row))
    rows += [(f"cover{i:02d}", row) for i, row in enumerate(cover)]
    made = []
    for index, (name, row) in enumerate(rows):
        core = index < len(NAMED) + _CORE_ROWS
        tags = frozenset({"core", "full"} if core else {"full"})
        made.append(_spec.Case(name, functools.partial(case_values, row), tags))
    for name, row in PADDED.items():
        values = functools.partial(case_values, _PLAIN | row)
        made.append(_spec.Case(name, values, frozenset({"padding"})))
    return tuple(made)


def changes() -> dict[str, Any]:
    """For each option, arguments that set it on the plain case; tests look for the effect."""
    batch, t, s, heads, *_ = _SHAPES["square"]
    keys = iter(jax.random.split(jax.random.key(23), 8))
    ids = {"q_segment_ids": jnp.asarray(segment_rows(batch, t))}
    return {
        "attention_mask": {"attention_mask": jnp.arange(s)[None, None, None] % 3 != 0},
        "bias": {"bias": jax.random.normal(next(keys), (batch, heads, t, s))},
        "causal": {"causal": True},
        "softmax_scale": {"softmax_scale": 0.7},
        "dropout_prob": {"dropout_prob": 0.4, "dropout_seed": 3},
        "dropout_seed": {"dropout_prob": 0.4, "dropout_seed": 4},
        "sliding_window": {"sliding_window": (5, 2)},
        "logits_soft_cap": {"logits_soft_cap": 0.5},
        "cum_seqlens_q": _row_lengths(batch, t, s),
        "cum_seqlens_k": {
            "cum_seqlens_q": jnp.asarray([0, t, 2 * t]),
            "cum_seqlens_k": jnp.asarray([0, s - 3, 2 * s - 9]),
        },
        "softmax_aux": {"softmax_aux": jnp.asarray([[1.0, 2.0, 0.5]])},
        "q_segment_ids": ids,
        "kv_segment_ids": ids | {"kv_segment_ids": jnp.asarray(segment_rows(batch, s)[::-1])},
        "alibi_slopes": {"alibi_slopes": jnp.linspace(0.1, 0.5, heads)},
        "return_lse": {"return_lse": True},
        # nothing to see in the numbers of a kernel that is deterministic anyway
        "deterministic": {"deterministic": True},
    }
