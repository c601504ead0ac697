"""Checks and canonical forms that attention-like ops share."""

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ejkernel.errors import EjkernelWarning
from ejkernel.kernels import _spec
from ejkernel.xla_utils import dtypes

Window = tuple[int | None, int | None]

MASK_HINT = (
    " Write `mask[:, None, None, :]` for key padding [B, S], `mask[None, None]` for [T, S] "
    "and `mask[:, None]` for [B, T, S]."
)
_INT32_MAX = 2**31 - 1
_FLOATS = ("bfloat16", "float16", "float32", "float64")


def rows_of_queries(args: Any) -> tuple[int, int, int]:
    """[b, h, t] of a call."""
    batch, t, heads, _ = args.query.shape
    return batch, heads, t


LSE = _spec.Residual(
    "lse",
    "The natural logarithm of the sum of the exponentials of a query's scores, sinks included; "
    "-inf for a query that sees no key.",
    rows_of_queries,
    axes=("b", "h", "t"),
)


def check_floats(op: str, **arrays: jax.Array) -> None:
    """All arrays must have one dtype that the op computes in."""
    (first, leader), *others = arrays.items()
    if str(leader.dtype) not in _FLOATS:
        raise TypeError(
            f"`{op}`: `{first}` must be one of {', '.join(_FLOATS)}; got {leader.dtype}."
        )
    for name, array in others:
        if array.dtype != leader.dtype:
            raise TypeError(
                f"`{op}`: `{name}` must have the dtype of `{first}`, {leader.dtype}; got "
                f"{array.dtype}. Cast with `{name}.astype({first}.dtype)`."
            )


def check_heads(
    op: str, num_q_heads: int, num_kv_heads: int, names: tuple[str, str] = ("`query`", "`key`")
) -> None:
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"`{op}`: the {num_q_heads} heads of {names[0]} must be a multiple of the "
            f"{num_kv_heads} heads of {names[1]}."
        )


def int32_array(op: str, name: str, value: Any) -> Any:
    """A Python int as an array, so that a new value compiles nothing; the rest passes."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if not -_INT32_MAX <= value <= _INT32_MAX:
        raise ValueError(f"`{op}`: `{name}` must fit into 32 bits with a sign; got {value}.")
    return np.asarray(value, np.int32)


# a number is part of the program; an array is data of the call, and differentiable
Scale = float | Float[Array, ""] | None


def canonical_scale(op: str, scale: Any, head_dim: int, dtype: Any) -> Any:
    """A float, or an array in the dtype in which scores of a query's `dtype` are computed."""
    if scale is None:
        return default_scale(head_dim)
    if isinstance(scale, jax.Array | np.ndarray):
        if scale.shape != () or not jnp.issubdtype(scale.dtype, jnp.floating):
            raise ValueError(
                f"`{op}`: `softmax_scale` must be a number, or a floating array of shape (); got "
                f"{scale.dtype}{list(scale.shape)}. Multiply `query` by a scale that differs from "
                "token to token or from head to head."
            )
        return jnp.asarray(scale, dtypes.wide(dtype))
    if not math.isfinite(scale):
        raise ValueError(f"`{op}`: `softmax_scale` must be finite; got {scale}.")
    return float(scale)


def default_scale(head_dim: int) -> float:
    return max(head_dim, 1) ** -0.5


def canonical_window(op: str, window: Any, causal: bool) -> Window:
    """A pair (left, right) with None for no limit; an int means both, causal closes the right."""
    if window is None:
        left = right = None
    else:
        pair = window if isinstance(window, tuple | list) else (window, window)
        bad = len(pair) != 2 or any(isinstance(w, bool) for w in pair)
        if bad or any(w is not None and (int(w) != w or w < -1) for w in pair):
            raise ValueError(
                f"`{op}`: `sliding_window` must be an int >= 0 or a pair of ints >= 0, with -1 for "
                f"no limit on that side; got {window!r}."
            )
        if not isinstance(window, tuple | list) and window < 0:
            raise ValueError(f"`{op}`: `sliding_window` must be >= 0 as an int; got {window}.")
        # a limit beyond every 32-bit position is none
        left, right = (None if w in (None, -1) or w >= _INT32_MAX else int(w) for w in pair)
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def narrower(a: Window, b: Window) -> Window:
    """The window of pairs that lie in both."""
    left, right = (
        min((w for w in side if w is not None), default=None) for side in zip(a, b, strict=True)
    )
    return left, right


def canonical_cap(op: str, cap: float | None) -> float | None:
    if cap is None:
        return None
    if isinstance(cap, bool) or not (math.isfinite(cap) and cap > 0):
        raise ValueError(f"`{op}`: `logits_soft_cap` must be positive and finite; got {cap}.")
    return float(cap)


def canonical_sinks(op: str, sinks: Any, num_q_heads: int) -> jax.Array | None:
    """Sinks as [1, n] (shared) or [heads, n]."""
    if sinks is None:
        return None
    if sinks.ndim == 1:
        if sinks.shape[0] == num_q_heads > 1:
            raise ValueError(
                f"`{op}`: `softmax_aux` of shape {sinks.shape} with {num_q_heads} query heads is "
                "ambiguous: write `softmax_aux[:, None]` for one sink per head or "
                "`softmax_aux[None]` for sinks shared by all heads."
            )
        return jnp.asarray(sinks)[None]
    if sinks.shape[0] not in (1, num_q_heads):
        raise ValueError(
            f"`{op}`: `softmax_aux` must be [num_sinks], [1, num_sinks] or [{num_q_heads}, "
            f"num_sinks]; got {sinks.shape}."
        )
    return jnp.asarray(sinks)


def seed_array(op: str, seed: Any) -> Any:
    """The words (low, high) of a Python seed; arrays pass."""
    if isinstance(seed, np.integer) and seed < 0:
        return np.asarray(seed)  # a signed scalar is reinterpreted, like an array
    if isinstance(seed, bool | float | complex):
        raise TypeError(
            f"`{op}`: `dropout_seed` must be an int, or an integer array: a scalar or uint32[2]; "
            f"got {seed!r}."
        )
    if not isinstance(seed, int | np.integer):
        return seed
    seed = int(seed)
    if not 0 <= seed < 2**64:
        raise ValueError(
            f"`{op}`: `dropout_seed` must be in [0, 2**64) as a Python int; got {seed}."
        )
    return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)


def canonical_dropout(op: str, prob: float, seed: Any) -> tuple[float, jax.Array | None]:
    """Probability and seed words; no seed when nothing is dropped."""
    if not 0.0 <= prob < 1.0:
        raise ValueError(f"`{op}`: `dropout_prob` must be in [0, 1); got {prob}.")
    if prob == 0.0:
        return 0.0, None
    if seed is None:
        warnings.warn(
            f"`{op}`: dropout without `dropout_seed` uses seed 0 in every call; pass a new seed "
            "each step.",
            EjkernelWarning,
            stacklevel=2,
        )
        return float(prob), jnp.zeros(2, jnp.uint32)
    if not hasattr(seed, "dtype") or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(
            f"`{op}`: `dropout_seed` must be an int, or an integer array: a scalar or uint32[2]; "
            f"got {getattr(seed, 'dtype', seed)!r}."
        )
    seed = jnp.asarray(seed)
    if seed.shape == ():
        return float(prob), jnp.stack([seed.astype(jnp.uint32), jnp.uint32(0)])
    if seed.shape != (2,) or seed.dtype != jnp.uint32:
        raise ValueError(
            f"`{op}`: `dropout_seed` must be a scalar or uint32[2] (low, high); "
            f"got {seed.dtype}{list(seed.shape)}."
        )
    return float(prob), seed


def pair_up(
    op: str, call: dict[str, Any], names: tuple[str, str], t: int, s: int
) -> tuple[Any, Any]:
    """One of two arrays stands for both when queries and keys have one length."""
    q, k = call[names[0]], call[names[1]]
    if (q is None) == (k is None):
        return q, k
    given, missing = names if k is None else names[::-1]
    if t != s:
        raise ValueError(
            f"`{op}`: `{given}` without `{missing}` needs equal lengths; got {t} queries and {s} "
            f"keys. Pass `{missing}` too."
        )
    return (q, q) if k is None else (k, k)


def check_cum_seqlens(op: str, batch: int, q: Any, k: Any) -> None:
    """[B+1] for a batch of rows; any length for sequences packed into one row."""
    for name, array in (("cum_seqlens_q", q), ("cum_seqlens_k", k)):
        if array is not None and batch != 1 and array.shape[0] != batch + 1:
            raise ValueError(
                f"`{op}`: `{name}` must have batch + 1 = {batch + 1} entries, or the batch must be "
                f"1 (packed sequences); got {array.shape[0]} entries and batch {batch}."
            )
        if array is not None and array.shape[0] < 1:
            raise ValueError(f"`{op}`: `{name}` must have at least one entry; got {array.shape}.")
    if q is not None and q.shape != k.shape:
        raise ValueError(
            f"`{op}`: `cum_seqlens_q` and `cum_seqlens_k` must have one length; got "
            f"{q.shape} and {k.shape}."
        )
