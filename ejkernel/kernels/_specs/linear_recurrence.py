"""`linear_recurrence`: its arguments, their checks and canonical form."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ejkernel.kernels import _spec, _types
from ejkernel.kernels._specs import _common, _linear_cases, _work_linear
from ejkernel.ops.core.types import BwdParams, FwdParams


def default_scale(scale: float | None, args: Any) -> bool:
    return scale in (None, _common.default_scale(args.query.shape[-1]))


@_spec.op_args
class LinearRecurrenceArgs(_spec.OpArgs):
    """Arguments of `linear_recurrence`.

    `n` is the batch, or the number of packed sequences; `h` is the largest of the three numbers of
    heads `hq`, `hk` and `hv`.
    """

    query: Float[Array, "b t hq d"]
    key: Float[Array, "b t hk d"]
    value: Float[Array, "b t hv e"]
    g: Float[Array, "b t h"] | None = None
    gk: Float[Array, "b t h d"] | None = None
    gv: Float[Array, "b t h e"] | None = None
    g_gamma: Float[Array, "h"] | None = None
    softmax_scale: _common.Scale = _spec.static(default=None, unset=default_scale, computed=True)
    initial_state: Float[Array, "n h d e"] | None = None
    reverse: bool = _spec.static(default=False)
    cu_seqlens: Int[Array, "n1"] | None = None
    return_state: bool = _spec.static(default=False)


@dataclasses.dataclass(frozen=True)
class LinearRecurrenceConfig:
    """How to run `linear_recurrence`; what is None is chosen by the library."""

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
    platform: str | None = None
    backend: str | None = None


def num_heads(args: Any) -> int:
    """Heads of the states and of the output."""
    return max(args.query.shape[2], args.key.shape[2], args.value.shape[2])


def _check_heads(call: dict[str, Any]) -> None:
    """Queries, keys and values may share heads; gates and states have the largest number."""
    counts = {name: call[name].shape[2] for name in ("query", "key", "value")}
    heads = max(counts.values())
    for name, count in counts.items():
        if count == 0 or heads % count:
            raise ValueError(
                f"`linear_recurrence`: the {count} heads of `{name}` must divide {heads}, the most "
                f"that `query`, `key` and `value` have; got {counts}."
            )
    axes = {"g": 2, "gk": 2, "gv": 2, "g_gamma": 0, "initial_state": 1}
    for name, axis in axes.items():
        if call[name] is not None and call[name].shape[axis] != heads:
            raise ValueError(
                f"`linear_recurrence`: `{name}` must have {heads} heads, the most that `query`, "
                f"`key` and `value` have; got {call[name].shape}."
            )


def common(op: str, call: dict[str, Any]) -> dict[str, Any]:
    """The checked arguments that all linear ops have."""
    query, key, value = (jnp.asarray(call[name]) for name in ("query", "key", "value"))
    _common.check_floats(op, query=query, key=key, value=value)
    batch, _, _, d = query.shape
    cu_seqlens, state = call["cu_seqlens"], call["initial_state"]
    rows, of = batch, "rows of the batch"
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(
                f"`{op}`: `cu_seqlens` needs sequences packed into a batch of 1; got batch {batch}."
            )
        if cu_seqlens.shape[0] < 1:
            raise ValueError(f"`{op}`: `cu_seqlens` must have at least one entry; got none.")
        rows, of = cu_seqlens.shape[0] - 1, "sequences of `cu_seqlens`"
    if state is not None and state.shape[0] != rows:
        raise ValueError(
            f"`{op}`: `initial_state` must have one state for each of the {rows} {of}; got "
            f"{state.shape}."
        )
    return {
        "query": query,
        "key": key,
        "value": value,
        "softmax_scale": _common.canonical_scale(op, call["softmax_scale"], d, query.dtype),
        "initial_state": as_array(state),
        "reverse": bool(call["reverse"]),
        "cu_seqlens": as_array(cu_seqlens, jnp.int32),
        "return_state": bool(call["return_state"]),
    }


def as_array(value: Any, dtype: Any = None) -> jax.Array | None:
    return None if value is None else jnp.asarray(value, dtype)


def canonicalize(values: dict[str, Any]) -> LinearRecurrenceArgs:
    """Checks a call and brings it to the one form that kernels see."""
    _check_heads(values)
    gates = {name: as_array(values[name]) for name in ("g", "gk", "gv", "g_gamma")}
    return LinearRecurrenceArgs(**common("linear_recurrence", values), **gates)


def examples(args: Any) -> dict[str, jax.Array]:
    """Gates below zero, as models have them, and sequences of one length."""
    made = {}
    for index, name in enumerate(("g", "gk", "gv", "g_gamma")):
        if (gate := getattr(args, name, None)) is not None:
            noise = jax.random.normal(jax.random.key(31 + index), gate.shape)
            made[name] = jax.nn.log_sigmoid(noise + 2.0)
    if args.cu_seqlens is not None:
        count = args.cu_seqlens.shape[0]
        made["cu_seqlens"] = jnp.asarray(np.linspace(0, args.query.shape[1], count), jnp.int32)
    return made


def twin(args: Any, block: int) -> dict[str, int]:
    """One row, two groups of heads, two blocks of 64 tokens and the call's own remainder."""
    t, block = args.query.shape[1], max(block, 64)
    heads = {"hq": args.query.shape[2], "hk": args.key.shape[2], "hv": args.value.shape[2]}
    groups = math.gcd(*heads.values())
    heads |= {"h": num_heads(args), "g": heads["hk"]}
    sizes = {axis: count // groups * min(groups, 2) for axis, count in heads.items()}
    sizes |= {"b": 1, "t": 2 * block + t % block}
    # states stand for rows or, packed, for sequences: those keep their number
    return sizes if args.cu_seqlens is not None else sizes | {"n": 1}


def check_values(values: dict[str, Any]) -> None:
    """Checks concrete lengths, for `EJKERNEL_DEBUG`; traced ones pass."""
    array = values.get("cu_seqlens")
    if array is None or isinstance(array, jax.core.Tracer):
        return
    host, t = np.asarray(array), values["query"].shape[1]
    if (np.diff(host) < 0).any() or (host.size and (host[0] < 0 or host[-1] > t)):
        raise ValueError(
            f"`cu_seqlens` must not decrease and must stay within the {t} tokens of `query`; got "
            f"{_types.brief(host)}."
        )


def localize(args: Any, offsets: dict[str, jax.Array]) -> Any:
    """Packed sequences are one row: there is no batch to split."""
    if args.cu_seqlens is not None and "b" in offsets:
        raise ValueError("`cu_seqlens` packs all sequences into one row: split heads instead.")
    return args


# what the ops of this family share
FAMILY: dict[str, Any] = {
    "outputs": lambda args: ("out", "state") if args.return_state else ("out",),
    # returned states are split as the batch is; packed sequences are not split
    "output_axes": {"out": ("b", "t", "h", "e"), "state": ("b", "h", "d", "e")},
    "examples": examples,
    "twin": twin,
    "debug": check_values,
    "shardable": frozenset({"b", "h", "g", "hq", "hk", "hv", "n"}),
    "aliases": {"g": "h", "hq": "h", "hk": "h", "hv": "h", "n": "b"},
    "localize": localize,
    "instead": "split the batch or the heads: a recurrence needs all tokens in one place",
}

SPEC = _spec.OpSpec(
    name="linear_recurrence",
    work=_work_linear.linear_recurrence,
    args=LinearRecurrenceArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.linear_recurrence:linear_recurrence",
    formula="ejkernel.kernels._xla.linear_recurrence.formula:linear_recurrence",
    differentiable=frozenset(
        {"query", "key", "value", "g", "gk", "gv", "g_gamma", "initial_state", "softmax_scale"}
    ),
    residuals=(),  # a backward computes the states between its own chunks again
    cases=_linear_cases.linear_recurrence,
    padded=("packed", "packed_reverse"),
    changes=_linear_cases.linear_recurrence_changes,
    config=LinearRecurrenceConfig,
    **FAMILY,
)
