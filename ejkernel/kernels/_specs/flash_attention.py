"""`flash_attention`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, Shaped

from ejkernel.kernels import _spec, _types
from ejkernel.kernels._specs import _attention_cases, _common, _work_attention
from ejkernel.kernels._specs._common import MASK_HINT, Window
from ejkernel.ops.core.types import BwdParams, FwdParams
from ejkernel.types import MaskInfo
from ejkernel.xla_utils import segments


def no_window(window: Window, args: Any) -> bool:
    return window in (None, (None, 0 if args.causal else None))


def default_scale(scale: float | None, args: Any) -> bool:
    return scale in (None, _common.default_scale(args.query.shape[-1]))


@_spec.op_args
class FlashAttentionArgs(_spec.OpArgs):
    """Arguments of `flash_attention`; see the public function for their meaning."""

    query: Float[Array, "b t h d"]
    key: Float[Array, "b s g d"]
    value: Float[Array, "b s g e"]
    attention_mask: Shaped[Array, "#b #h #t #s"] | None = _spec.array(hint=MASK_HINT)
    bias: Float[Array, "#b #h #t #s"] | None = _spec.array(hint=MASK_HINT)
    causal: bool = _spec.static(default=False)
    softmax_scale: _common.Scale = _spec.static(default=None, unset=default_scale, computed=True)
    dropout_prob: float = _spec.static(default=0.0)
    dropout_seed: Integer[Array, "words"] | None = _spec.array(ranks=(0,))
    sliding_window: int | tuple[int | None, int | None] | None = _spec.static(
        default=None, unset=no_window
    )
    logits_soft_cap: float | None = _spec.static(default=None)
    cum_seqlens_q: Int[Array, "n1"] | None = None
    cum_seqlens_k: Int[Array, "n1"] | None = None
    softmax_aux: Float[Array, "#h sinks"] | None = _spec.array(ranks=(1,))
    q_segment_ids: Int[Array, "b t"] | None = None
    kv_segment_ids: Int[Array, "b s"] | None = None
    alibi_slopes: Float[Array, "h"] | None = None
    return_lse: bool = _spec.static(default=False)
    deterministic: bool = _spec.static(default=False)
    q_positions: Int[Array, "#b t"] | None = _spec.internal()
    kv_positions: Int[Array, "#b s"] | None = _spec.internal()
    # batch and head of the local block in the call as the user wrote it
    dropout_offset: Integer[Array, "two"] | None = _spec.internal()


@dataclasses.dataclass(frozen=True)
class FlashAttentionConfig:
    """How to run `flash_attention`; what is None is chosen by the library."""

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
    platform: str | None = None
    backend: str | None = None


def canonicalize(values: dict[str, Any], op: str = "flash_attention") -> FlashAttentionArgs:
    """Checks an unpacked call and brings it to the one form that kernels see."""
    call = values
    query, key, value = (jnp.asarray(call[name]) for name in ("query", "key", "value"))
    batch, t, num_q_heads, head_dim = query.shape
    _, s, num_kv_heads, _ = key.shape
    _common.check_floats(op, query=query, key=key, value=value)
    _common.check_heads(op, num_q_heads, num_kv_heads)
    causal = bool(call["causal"])
    prob, seed = _common.canonical_dropout(op, call["dropout_prob"], call["dropout_seed"])
    q_ids, kv_ids = _common.pair_up(op, call, ("q_segment_ids", "kv_segment_ids"), t, s)
    cum_q, cum_k = _common.pair_up(op, call, ("cum_seqlens_q", "cum_seqlens_k"), t, s)
    _common.check_cum_seqlens(op, batch, cum_q, cum_k)
    window = _common.canonical_window(op, call["sliding_window"], causal)
    for name in ("q_positions", "kv_positions"):
        check_positions(op, name, call.get(name))
    return FlashAttentionArgs(
        query=query,
        key=key,
        value=value,
        attention_mask=as_mask(op, call["attention_mask"]),
        bias=as_array(call["bias"]),
        causal=causal,
        softmax_scale=_common.canonical_scale(op, call["softmax_scale"], head_dim, query.dtype),
        dropout_prob=prob,
        dropout_seed=seed,
        sliding_window=_common.narrower(window, call.get("_window", (None, None))),
        logits_soft_cap=_common.canonical_cap(op, call["logits_soft_cap"]),
        cum_seqlens_q=as_array(cum_q, jnp.int32),
        cum_seqlens_k=as_array(cum_k, jnp.int32),
        softmax_aux=_common.canonical_sinks(op, call["softmax_aux"], num_q_heads),
        q_segment_ids=as_array(q_ids, jnp.int32),
        kv_segment_ids=as_array(kv_ids, jnp.int32),
        alibi_slopes=as_array(call["alibi_slopes"]),
        return_lse=bool(call.get("return_lse", False)),
        deterministic=bool(call.get("deterministic", False)),
        q_positions=as_array(call.get("q_positions"), jnp.int32),
        kv_positions=as_array(call.get("kv_positions"), jnp.int32),
    )


MOST_POSITION = 2**29  # so that the limits of a window, added to a position, fit into 32 bits


def check_positions(op: str, name: str, positions: Any) -> None:
    """Refuses known positions whose differences kernels cannot compute in 32 bits."""
    host = _spec.known(positions)
    if host is None or not host.size or max(host.max(), -host.min()) < MOST_POSITION:
        return
    far = host.max() if host.max() >= MOST_POSITION else host.min()
    raise ValueError(
        f"`{op}`: `mask_info.{name}` must be between -2^29 and 2^29; got {far}. Only differences "
        "of positions matter: subtract the same number from those of queries and keys."
    )


def check_mask_info(values: dict[str, Any]) -> None:
    """Checks the positions of a call whose arrays are known before it is traced."""
    info = values.get("mask_info")
    for name in ("q_positions", "kv_positions"):
        check_positions("flash_attention", name, getattr(info, name, None))


def as_array(value: Any, dtype: Any = None) -> jax.Array | None:
    return None if value is None else jnp.asarray(value, dtype)


def as_mask(op: str, mask: Any) -> jax.Array | None:
    return None if mask is None else segments.as_bool_mask(op, "attention_mask", mask)


def unpack(values: dict[str, Any], op: str = "flash_attention") -> dict[str, Any]:
    """Merges `mask_info` into the other arguments; what is given twice is refused."""
    call = dict(values)
    info = call.pop("mask_info", None)
    if info is None:
        return call
    if not isinstance(info, MaskInfo):
        raise TypeError(f"`{op}`: `mask_info` must be a MaskInfo; got {type(info).__name__}.")
    batch = call["query"].shape[0]
    cum_q, cum_k = _cum_seqlens(op, info, call)
    merged = {
        "q_segment_ids": _rows(info.q_segment_ids, batch),
        "kv_segment_ids": _rows(info.kv_segment_ids, batch),
        "cum_seqlens_q": cum_q,
        "cum_seqlens_k": cum_k,
    }
    for pair in (("q_segment_ids", "kv_segment_ids"), ("cum_seqlens_q", "cum_seqlens_k")):
        inside = any(merged[name] is not None for name in pair)
        if inside and any(call[name] is not None for name in pair):
            raise ValueError(f"`{op}`: `{pair[0]}` is given twice, in `mask_info` and by itself.")
        if inside:
            call.update({name: merged[name] for name in pair})
    if info.attention_mask is not None:
        call["attention_mask"] = _both(op, info.attention_mask, call["attention_mask"])
    call["causal"] = call["causal"] or info.causal
    call["_window"] = _common.canonical_window(op, info.sliding_window, causal=False)
    call["q_positions"], call["kv_positions"] = info.q_positions, info.kv_positions
    return call


def _rows(ids: Any, batch: int) -> Any:
    """Ids of one row serve all rows."""
    if ids is None or ids.ndim != 2 or ids.shape[0] != 1:
        return ids
    return jnp.broadcast_to(ids, (batch, ids.shape[1]))


def _both(op: str, a: Any, b: Any) -> Any:
    if b is None:
        return a
    a, b = as_mask(op, a), as_mask(op, b)
    try:
        return a & b
    except (TypeError, ValueError):
        raise ValueError(
            f"`{op}`: `attention_mask` {jnp.shape(b)} and that of `mask_info`, {jnp.shape(a)}, do "
            "not broadcast together."
        ) from None


def _cum_seqlens(op: str, info: MaskInfo, call: dict[str, Any]) -> tuple[Any, Any]:
    """Cumulative lengths from either form; a side without lengths is whole."""
    if info.q_lengths is None and info.kv_lengths is None:
        return info.cum_seqlens_q, info.cum_seqlens_k
    if info.cum_seqlens_q is not None or info.cum_seqlens_k is not None:
        raise ValueError(f"`{op}`: `mask_info` has both lengths and cum_seqlens.")
    made = []
    for name, lengths, data in (("q", info.q_lengths, "query"), ("kv", info.kv_lengths, "key")):
        batch, size = call[data].shape[:2]
        if lengths is not None and lengths.shape != (batch,):
            raise ValueError(
                f"`{op}`: `mask_info.{name}_lengths` must be [{batch}], one a row of `{data}`; "
                f"got {lengths.shape}."
            )
        lengths = jnp.full(batch, size) if lengths is None else lengths
        made.append(segments.lengths_to_cu_seqlens(lengths))
    return made[0], made[1]


def publish(args: FlashAttentionArgs) -> dict[str, Any]:
    """Canonical arguments as the public function takes them: -1 for no limit of a window."""
    window = tuple(-1 if w is None else w for w in args.sliding_window)
    return args.arrays() | args.statics() | {"sliding_window": window}


def check_values(values: dict[str, Any]) -> None:
    """Checks known lengths, for `EJKERNEL_DEBUG`."""
    for name, data in (("cum_seqlens_q", "query"), ("cum_seqlens_k", "key")):
        if (host := _spec.known(values.get(name))) is None:
            continue
        batch, length = values[data].shape[:2]
        steps = np.diff(host)
        if (steps < 0).any():
            raise ValueError(
                f"`flash_attention`: `{name}` must not decrease; entry {int(np.argmin(steps)) + 1} "
                f"does: {_types.brief(host)}."
            )
        longest = int(host[-1]) if batch == 1 else int(steps.max(initial=0))
        if longest > length or host[0] < 0:
            raise ValueError(
                f"`flash_attention`: `{name}` reaches beyond the {length} tokens of `{data}`: "
                f"{_types.brief(host)}."
            )


def examples(args: FlashAttentionArgs) -> dict[str, jax.Array]:
    """Masks, ids, lengths and positions as models have them: a few sequences, most pairs seen."""
    (batch, t), s = args.query.shape[:2], args.key.shape[1]
    made: dict[str, jax.Array] = {
        "dropout_seed": jnp.asarray([17, 4], jnp.uint32),
        "dropout_offset": jnp.zeros(2, jnp.uint32),
    }
    if args.attention_mask is not None:
        shape = args.attention_mask.shape
        made["attention_mask"] = jax.random.bernoulli(jax.random.key(3), 0.9, shape)
    for name, length in (("q", t), ("kv", s)):
        index = jnp.arange(length, dtype=jnp.int32)
        made[f"{name}_segment_ids"] = jnp.broadcast_to(index * 4 // max(length, 1), (batch, length))
        positions = getattr(args, f"{name}_positions")
        if positions is not None:
            made[f"{name}_positions"] = jnp.broadcast_to(index, positions.shape)
    for name, length in (("cum_seqlens_q", t), ("cum_seqlens_k", s)):
        if (array := getattr(args, name)) is not None:
            count = array.shape[0] - 1
            total = length if batch == 1 else batch * length * 3 // 4
            made[name] = jnp.asarray(np.linspace(0, total, count + 1), jnp.int32)
    return made


_SMALL_BLOCK = 128


def twin(args: FlashAttentionArgs, block: int) -> dict[str, int]:
    """One row, two key heads, and lengths of two blocks and the call's own remainder.

    Of small blocks, all heads: they cost little, and code may have been compiled for their number.
    """
    t, num_q_heads = args.query.shape[1:3]
    s, num_kv_heads = args.key.shape[1:3]
    groups = min(num_kv_heads, 2) if block > _SMALL_BLOCK else num_kv_heads
    rows = args.query.shape[0] > 1 and args.cum_seqlens_q is not None
    return {
        "b": 1,
        "g": groups,
        "h": groups * (num_q_heads // num_kv_heads),
        "t": 2 * block + t % block,
        "s": 2 * block + s % block,
        "n1": 2 if rows else 4,
    }


def localize(args: FlashAttentionArgs, offsets: dict[str, jax.Array]) -> FlashAttentionArgs:
    """The local block's arguments in a shard_map: dropout indices and row lengths stay global."""
    changes: dict[str, Any] = {}
    if args.dropout_seed is not None:
        offset = jnp.stack([jnp.asarray(offsets.get(axis, 0), jnp.int32) for axis in "bh"])
        changes["dropout_offset"] = offset.astype(jnp.uint32)
    if args.cum_seqlens_q is not None and "b" in offsets:
        batch = args.query.shape[0]
        for name in ("cum_seqlens_q", "cum_seqlens_k"):
            rows = jax.lax.dynamic_slice_in_dim(getattr(args, name), offsets["b"], batch + 1)
            changes[name] = rows - rows[0]  # one local row reads as one packed sequence
    return dataclasses.replace(args, **changes)


SPEC = _spec.OpSpec(
    name="flash_attention",
    work=_work_attention.flash_attention,
    args=FlashAttentionArgs,
    canonicalize=canonicalize,
    unpack=unpack,
    reference="ejkernel.kernels._reference.flash_attention:flash_attention",
    formula="ejkernel.kernels._xla.flash_attention.formula:flash_attention",
    magnitudes="ejkernel.kernels._reference.flash_attention:gradient_magnitudes",
    differentiable=frozenset({"query", "key", "value", "bias", "softmax_aux", "softmax_scale"}),
    outputs=lambda args: ("out", "lse") if args.return_lse else ("out",),
    output_axes={"out": ("b", "t", "h", "e"), "lse": ("b", "h", "t")},
    residuals=(_common.LSE,),
    cases=_attention_cases.cases,
    padded=tuple(_attention_cases.PADDED),
    changes=_attention_cases.changes,
    examples=examples,
    twin=twin,
    config=FlashAttentionConfig,
    scalars={"dropout_seed": functools.partial(_common.seed_array, "flash_attention")},
    publish=publish,
    check=check_mask_info,
    debug=check_values,
    shardable=frozenset({"b", "h", "g"}),
    aliases={"g": "h"},
    localize=localize,
    instead="use `ring_attention` to split tokens over devices",
)
