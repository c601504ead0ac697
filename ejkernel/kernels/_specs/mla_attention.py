"""`mla_attention`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer, Shaped

from ejkernel.kernels import _cases, _derived, _spec
from ejkernel.kernels._specs import (
    _attention_cases,
    _common,
    _projected,
    _work_attention,
    flash_attention,
)
from ejkernel.kernels._specs._common import MASK_HINT, Window
from ejkernel.ops.core.types import BwdParams, FwdParams

_OP = "mla_attention"


def _no_window(window: Window, args: Any) -> bool:
    return window in (None, (None, 0 if args.causal else None))


def _default_scale(scale: float | None, args: Any) -> bool:
    width = args.query.shape[-1] + (0 if args.b_q is None else args.b_q.shape[-1])
    return scale in (None, _common.default_scale(width))


@_spec.op_args
class MLAAttentionArgs(_spec.OpArgs):
    """Arguments of `mla_attention`; the canonical query has no rope part, which is in `b_q`."""

    query: Float[Array, "b t h dq"]
    key_value: Float[Array, "b s l"]
    w_kc: Float[Array, "l g d"]
    w_vc: Float[Array, "l g e"]
    b_q: Float[Array, "b t #h r"] | None = _spec.array(ranks=(3,))
    b_k: Float[Array, "b s r"] | None = None
    attention_mask: Shaped[Array, "#b #h #t #s"] | None = _spec.array(hint=MASK_HINT)
    bias: Float[Array, "#b #h #t #s"] | None = _spec.array(hint=MASK_HINT)
    causal: bool = _spec.static(default=False)
    softmax_scale: _common.Scale = _spec.static(default=None, unset=_default_scale, computed=True)
    dropout_prob: float = _spec.static(default=0.0)
    dropout_seed: Integer[Array, "words"] | None = _spec.array(ranks=(0,))
    sliding_window: int | tuple[int | None, int | None] | None = _spec.static(
        default=None, unset=_no_window
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
    # batch and head of the local block in the call as the user wrote it
    dropout_offset: Integer[Array, "two"] | None = _spec.internal()


@dataclasses.dataclass(frozen=True)
class MLAAttentionConfig:
    """How to run `mla_attention`; what is None is chosen by the library."""

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
    platform: str | None = None
    backend: str | None = None


def canonicalize(values: dict[str, Any]) -> MLAAttentionArgs:
    """Checks a call and brings it to the one form that kernels see."""
    call = values
    names = ("query", "key_value", "w_kc", "w_vc", "b_q", "b_k")
    arrays = {name: _as_array(call[name]) for name in names}
    _common.check_floats(_OP, **{n: x for n, x in arrays.items() if x is not None})
    query, b_q = _split(**{name: arrays[name] for name in ("query", "w_kc", "b_q", "b_k")})
    batch, t, num_q_heads, width = query.shape
    s, num_kv_heads = arrays["key_value"].shape[1], arrays["w_kc"].shape[1]
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"`{_OP}`: the {num_q_heads} heads of `query` must be a multiple of the "
            f"{num_kv_heads} heads of `w_kc`."
        )
    causal, mask = bool(call["causal"]), call["attention_mask"]
    prob, seed = _common.canonical_dropout(_OP, call["dropout_prob"], call["dropout_seed"])
    q_ids, kv_ids = _common.pair_up(_OP, call, ("q_segment_ids", "kv_segment_ids"), t, s)
    cum_q, cum_k = _common.pair_up(_OP, call, ("cum_seqlens_q", "cum_seqlens_k"), t, s)
    _common.check_cum_seqlens(_OP, batch, cum_q, cum_k)
    width += 0 if b_q is None else b_q.shape[-1]
    return MLAAttentionArgs(
        **arrays | {"query": query, "b_q": b_q},
        attention_mask=flash_attention.as_mask(_OP, mask),
        bias=_as_array(call["bias"]),
        causal=causal,
        softmax_scale=_common.canonical_scale(_OP, call["softmax_scale"], width, query.dtype),
        dropout_prob=prob,
        dropout_seed=seed,
        sliding_window=_common.canonical_window(_OP, call["sliding_window"], causal),
        logits_soft_cap=_common.canonical_cap(_OP, call["logits_soft_cap"]),
        cum_seqlens_q=_as_array(cum_q, jnp.int32),
        cum_seqlens_k=_as_array(cum_k, jnp.int32),
        softmax_aux=_common.canonical_sinks(_OP, call["softmax_aux"], num_q_heads),
        q_segment_ids=_as_array(q_ids, jnp.int32),
        kv_segment_ids=_as_array(kv_ids, jnp.int32),
        alibi_slopes=_as_array(call["alibi_slopes"]),
        return_lse=bool(call["return_lse"]),
        deterministic=bool(call["deterministic"]),
    )


def _as_array(value: Any, dtype: Any = None) -> Any:
    return None if value is None else jnp.asarray(value, dtype)


def _split(query: Any, w_kc: Any, b_q: Any, b_k: Any) -> tuple[jax.Array, jax.Array | None]:
    """The query without rope part, and that part as [b, t, h or 1, r]."""
    width, nope = query.shape[-1], w_kc.shape[-1]
    if b_k is None and b_q is not None:
        raise ValueError(
            f"`{_OP}`: `b_q` must come with `b_k`, the rope part of the keys; got `b_q` "
            f"{b_q.shape} alone. Pass `b_k` [b, s, {b_q.shape[-1]}]."
        )
    rope = 0 if b_k is None else b_k.shape[-1]
    expected = nope + (rope if b_q is None else 0)
    if width != expected:
        what = f"{nope} of `w_kc`" + (f" and {rope} of `b_k`" if expected != nope else "")
        out = " Pass its rope part as `b_q`, or at its end." if rope else ""
        raise ValueError(
            f"`{_OP}`: `query` must have head size {expected}, {what}; got {width}.{out}"
        )
    if b_k is None:
        return query, None
    if b_q is None:
        return query[..., :nope], query[..., nope:]
    b_q = b_q[:, :, None] if b_q.ndim == 3 else b_q
    batch, t, num_q_heads, _ = query.shape
    if b_q.shape not in ((batch, t, 1, rope), (batch, t, num_q_heads, rope)):
        raise ValueError(
            f"`{_OP}`: `b_q` must be [{batch}, {t}, {num_q_heads}, {rope}], or [{batch}, {t}, "
            f"{rope}] for all heads; got {b_q.shape}."
        )
    return query, b_q


def check_values(values: dict[str, Any]) -> None:
    """Checks concrete lengths, for `EJKERNEL_DEBUG`; traced ones pass."""
    try:
        flash_attention.check_values(values | {"key": values["key_value"]})
    except ValueError as error:
        text = str(error).replace("flash_attention", _OP).replace("`key`", "`key_value`")
        raise ValueError(text) from None


def examples(args: MLAAttentionArgs) -> dict[str, jax.Array]:
    """Masks, ids and lengths of `flash_attention`; weights that keep the size of a latent."""
    view = flash_attention.FlashAttentionArgs(
        query=args.query,
        key=args.key_value,
        value=args.key_value,
        **{name: getattr(args, name) for name in ("attention_mask", "cum_seqlens_q")},
        cum_seqlens_k=args.cum_seqlens_k,
    )
    made = flash_attention.examples(view)
    for index, name in enumerate(("w_kc", "w_vc")):
        shape = getattr(args, name).shape
        normal = jax.random.normal(jax.random.key(31 + index), shape, jnp.float32)
        made[name] = normal * max(shape[0], 1) ** -0.5
    return made


def twin(args: MLAAttentionArgs, block: int) -> dict[str, int]:
    """One row, two key heads, and lengths of two blocks and the call's own remainder."""
    (batch, t, num_q_heads), (s, num_kv_heads) = (
        args.query.shape[:3],
        (args.key_value.shape[1], args.w_kc.shape[1]),
    )
    groups = min(num_kv_heads, 2)
    rows = batch > 1 and args.cum_seqlens_q is not None
    return {
        "b": 1,
        "g": groups,
        "h": groups * (num_q_heads // num_kv_heads),
        "t": 2 * block + t % block,
        "s": 2 * block + s % block,
        "n1": 2 if rows else 4,
    }


_LATENT, _ROPE = 12, 6
_OPTIONS = _attention_cases.OPTIONS | {"rope": (None, "query", "heads", "shared")}


def _values(row: dict[str, Any], dtype: Any, key: jax.Array) -> dict[str, Any]:
    """A call of `flash_attention` with keys and values made of a latent."""
    values = _attention_cases.case_values(row, dtype, key)
    batch, t, heads, d = values["query"].shape
    _, s, groups, e = values["value"].shape
    del values["key"], values["value"]
    keys = iter(jax.random.split(jax.random.fold_in(key, 1), 6))

    def normal(*shape: int, size: float = 1.0) -> jax.Array:
        return (size * jax.random.normal(next(keys), shape, jnp.float32)).astype(dtype)

    values |= {
        "key_value": normal(batch, s, _LATENT),
        "w_kc": normal(_LATENT, groups, d, size=_LATENT**-0.5),
        "w_vc": normal(_LATENT, groups, e, size=_LATENT**-0.5),
    }
    if row["rope"] is not None:
        values["b_k"] = normal(batch, s, _ROPE)
    if row["rope"] == "query":
        values["query"] = normal(batch, t, heads, d + _ROPE)
    elif row["rope"] is not None:
        middle = (heads,) if row["rope"] == "heads" else ()
        values["b_q"] = normal(batch, t, *middle, _ROPE)
    return values


_NAMED = {
    "plain": {},
    "causal": {"causal": True, "return_lse": True, "rope": "query"},
    "causal_window_sinks": _attention_cases.NAMED["causal_window_sinks"] | {"rope": "heads"},
    "packed_causal_dropout": _attention_cases.NAMED["packed_causal_dropout"] | {"rope": "shared"},
    "segments_window_bias": _attention_cases.NAMED["segments_window_bias"] | {"rope": "query"},
}
_CORE_ROWS = 5


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    """Named rows first, then a pairwise cover; the head of the table is the core."""
    plain = {name: values[0] for name, values in _OPTIONS.items()}
    rows = [(name, plain | row) for name, row in _NAMED.items()]
    cover = _cases.pairwise(_OPTIONS, seed=5)
    cover.sort(key=lambda row: sum(row[name] == plain[name] for name in row))
    rows += [(f"cover{i:02d}", row) for i, row in enumerate(cover)]
    core = len(_NAMED) + _CORE_ROWS
    tags = [{"core", "full"} if i < core else {"full"} for i in range(len(rows))]
    rows += [(name, plain | row) for name, row in _attention_cases.PADDED.items()]
    tags += [{"padding"} for _ in _attention_cases.PADDED]
    return tuple(
        _spec.Case(name, functools.partial(_values, row), frozenset(own))
        for (name, row), own in zip(rows, tags, strict=True)
    )


def changes() -> dict[str, dict[str, Any]]:
    """For each option, arguments that set it on the plain case."""
    plain = {name: values[0] for name, values in _OPTIONS.items()}

    def rope(kind: str, *names: str) -> dict[str, Any]:
        values = _values(plain | {"rope": kind}, jnp.float32, jax.random.key(5))
        return {name: values[name] for name in names}

    return _attention_cases.changes() | {
        "b_q": rope("heads", "b_q", "b_k"),
        "b_k": rope("query", "query", "b_k"),
    }


def localize(args: MLAAttentionArgs, offsets: dict[str, jax.Array]) -> MLAAttentionArgs:
    """The local block's arguments in a shard_map: dropout indices and row lengths stay global."""
    return flash_attention.localize(args, offsets)  # type: ignore[arg-type, return-value]


SPEC = _spec.OpSpec(
    name=_OP,
    work=_work_attention.mla_attention,
    args=MLAAttentionArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.mla_attention:mla_attention",
    formula="ejkernel.kernels._xla.mla_attention.formula:mla_attention",
    # the kernels of this op itself make no key or value of a head, or of one block at a time
    lowers_to=_derived.Lowering(
        flash_attention.SPEC,
        _projected.project,
        made=_projected.MADE,
        pull=_projected.pull,
        beside=True,
        defers=_projected.defers,
    ),
    differentiable=frozenset(
        {"query", "key_value", "w_kc", "w_vc", "b_q", "b_k", "bias", "softmax_aux", "softmax_scale"}
    ),
    outputs=lambda args: ("out", "lse") if args.return_lse else ("out",),
    output_axes={"out": ("b", "t", "h", "e"), "lse": ("b", "h", "t")},
    residuals=(_common.LSE,),
    cases=cases,
    padded=tuple(_attention_cases.PADDED),
    changes=changes,
    examples=examples,
    twin=twin,
    config=MLAAttentionConfig,
    scalars={"dropout_seed": functools.partial(_common.seed_array, "mla_attention")},
    publish=flash_attention.publish,
    debug=check_values,
    shardable=frozenset({"b", "h", "g"}),
    aliases={"g": "h"},
    localize=localize,
)
