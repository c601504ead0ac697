"""The arguments that kernels over cached keys share, from a call's."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._device import Target
from ejkernel.callib import next_power_of_2
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._blocks import (
    addresses,
    cached,
    logits,
    mask,
    packed,
    softmax,
    splits,
)
from ejkernel.kernels._triton.flash_attention import call as flash

_MOST = 256
_FLOATS = ("bfloat16", "float16", "float32")
_NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call, as kernels take it."""

    query: jax.Array  # [tokens, h, d]
    cache: cached.Cache
    sequences: packed.Packed
    options: cached.Options
    final: splits.Final
    width: addresses.Rows  # of queries
    num_sequences: int
    num_splits: int | None
    lse: bool  # whether it is wanted

    def inputs(self, tiles: packed.Tiles) -> dict[str, Any]:
        names = ("query", "cache", "sequences", "options", "final", "width")
        return {name: getattr(self, name) for name in names} | {"tiles": tiles}

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct | None]:
        tokens, heads, _ = self.query.shape
        lse = jax.ShapeDtypeStruct((tokens, heads), jnp.float32) if self.lse else None
        out = jax.ShapeDtypeStruct((tokens, heads, self.final.WIDTH), self.query.dtype)
        return {"out": out, "lse": lse}


def prepare(
    args: Any, query: jax.Array, cache: cached.Cache, sequences: packed.Packed, count: int
) -> Call:
    """A call over `count` sequences, from the options that all ops over cached keys have."""
    d, e = query.shape[-1], cache.value_rows.WIDTH
    left, _ = args.sliding_window
    scores = _scores(args, query.dtype)
    return Call(
        query=query,
        cache=cache,
        sequences=sequences,
        options=cached.Options(
            scores=scores,
            k_scale=_float32(args.k_scale),
            left=mask.window((left, None), None).left,
            PRECISION=_launch.dot_precision(query.dtype),
        ),
        final=splits.Final(
            sinks=_sinks(args.softmax_aux),
            v_scale=_float32(args.v_scale),
            FACTOR=scores.FACTOR,
            WIDTH=e,
            PADDED=cache.value_rows.PADDED,
        ),
        width=addresses.Rows(d, d, max(next_power_of_2(d), 16)),
        num_sequences=count,
        num_splits=args.num_splits,
        lse=args.return_lse,
    )


def _float32(scale: jax.Array | None) -> jax.Array | None:
    return None if scale is None else scale.astype(jnp.float32)


def _sinks(x: jax.Array | None) -> softmax.Sinks | None:
    if x is None:
        return None
    num = x.shape[1]
    return softmax.Sinks(x, 0 if x.shape[0] == 1 else num, num, max(next_power_of_2(num), 1))


def _scores(args: Any, dtype: Any) -> logits.Scores:
    cap, slopes = args.logits_soft_cap, args.alibi_slopes
    # the maximum of a row is found before scaling, which a factor <= 0 would turn around
    natural = cap is not None or slopes is not None or args.softmax_scale <= 0
    return logits.Scores(
        bias=None,
        slopes=slopes,
        SCALE=float(args.softmax_scale),
        CAP=None if cap is None else float(cap),
        FINE=flash.fine_cap(dtype, cap),
        FACTOR=1.0 if natural else float(args.softmax_scale),
    )


def requires(query: Any, cache: Any, value_width: int) -> str | None:
    """What kernels over cached keys cannot do."""
    d = query.shape[-1]
    if not (1 <= d <= _MOST and 1 <= value_width <= _MOST):
        return f"needs head sizes from 1 to {_MOST}; got {d} and {value_width}"
    return requires_dtypes(query, cache)


def requires_dtypes(query: Any, cache: Any) -> str | None:
    """Which dtypes they cannot take."""
    if query.dtype.name not in _FLOATS:
        return f"needs bfloat16, float16 or float32; got {query.dtype}"
    if cache.dtype != query.dtype and cache.dtype.name not in _NARROW:
        return f"needs keys of the queries' dtype or one of {', '.join(_NARROW)}; got {cache.dtype}"
    return None


def device_requires(cache: Any, target: Target) -> str | None:
    """What a device cannot do."""
    return _launch.no_float8("keys", cache.dtype, target)
