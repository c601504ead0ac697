"""`merge_attention_states`: its arguments, their checks, and its cases."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _common, _work_matmul


@_spec.op_args
class MergeAttentionStatesArgs(_spec.OpArgs):
    """Arguments of `merge_attention_states`."""

    out_a: Float[Array, "b t h e"]
    lse_a: Float[Array, "b h t"]
    out_b: Float[Array, "b t h e"]
    lse_b: Float[Array, "b h t"]


@dataclasses.dataclass(frozen=True)
class MergeAttentionStatesConfig:
    """How to run `merge_attention_states`; there is nothing to tune."""

    platform: str | None = None
    backend: str | None = None
    fwd_params: None = None
    bwd_params: None = None


def canonicalize(values: dict[str, Any]) -> MergeAttentionStatesArgs:
    op = "merge_attention_states"
    made = {name: jnp.asarray(value) for name, value in values.items()}
    _common.check_floats(op, out_a=made["out_a"], out_b=made["out_b"])
    for name in ("lse_a", "lse_b"):
        if made[name].dtype.itemsize < 4:
            raise TypeError(
                f"`{op}`: `{name}` must be float32 or float64, or weights near 1 are lost; "
                f"got {made[name].dtype}."
            )
    return MergeAttentionStatesArgs(**made)


def twin(args: MergeAttentionStatesArgs, block: int) -> dict[str, int]:
    """One row, two heads, and two blocks of tokens with the call's own remainder."""
    return {"b": 1, "h": 2, "t": 2 * block + args.out_a.shape[1] % block}


def _values(empty: str, dtype: Any, key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 4)
    out_a, out_b = (jax.random.normal(k, (2, 7, 3, 5)).astype(dtype) for k in keys[:2])
    lse_a, lse_b = (3 * jax.random.normal(k, (2, 3, 7)) for k in keys[2:])
    if "a" in empty:
        lse_a = lse_a.at[:, :, ::2].set(-jnp.inf)
    if "b" in empty:
        lse_b = lse_b.at[:, :, ::3].set(-jnp.inf)
    return {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}


def _cases() -> tuple[_spec.Case, ...]:
    both = frozenset({"core", "full"})
    return tuple(
        _spec.Case(name, lambda dtype, key, empty=empty: _values(empty, dtype, key), both)
        for name, empty in (("plain", ""), ("one_empty", "a"), ("both_empty", "ab"))
    )


SPEC = _spec.OpSpec(
    name="merge_attention_states",
    work=_work_matmul.merge_attention_states,
    args=MergeAttentionStatesArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.merge_attention_states:merge_attention_states",
    differentiable=frozenset({"out_a", "lse_a", "out_b", "lse_b"}),
    outputs=lambda args: ("out", "lse"),
    output_axes={"out": ("b", "t", "h", "e"), "lse": ("b", "h", "t")},
    cases=_cases,
    twin=twin,
    config=MergeAttentionStatesConfig,
    shardable=frozenset({"b", "h", "t"}),
)
