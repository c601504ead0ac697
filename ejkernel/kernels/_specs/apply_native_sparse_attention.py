"""`apply_native_sparse_attention`: its arguments, their checks and canonical form, its cases."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _common, _work_sparse
from ejkernel.kernels._specs import native_sparse_attention as nsa
from ejkernel.ops.core.types import BwdParams, FwdParams

OP = "apply_native_sparse_attention"


@_spec.op_args
class ApplyNativeSparseAttentionArgs(_spec.OpArgs):
    """Arguments of `apply_native_sparse_attention`; see the public function for their meaning."""

    query: Float[Array, "b t h d"]
    key: Float[Array, "b t g d"]
    value: Float[Array, "b t g e"]
    block_indices: Int[Array, "b t g k"]
    # canonical: an array or None; an int has shortened the lists
    block_counts: int | Int[Array, "b t g"] | None = None
    block_size: int = _spec.static(default=64)
    softmax_scale: _common.Scale = _spec.static(
        default=None, unset=nsa.default_scale, computed=True
    )
    cu_seqlens: Int[Array, "n1"] | None = None


@dataclasses.dataclass(frozen=True)
class ApplyNativeSparseAttentionConfig:
    """How to run `apply_native_sparse_attention`; what is None is chosen by the library."""

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
    platform: str | None = None
    backend: str | None = None


def canonicalize(values: dict[str, Any]) -> ApplyNativeSparseAttentionArgs:
    """Checks a call and brings it to the one form that kernels see."""
    made = nsa.common(OP, values)
    count = made.pop("_count")
    if count is not None:
        made["block_indices"] = made["block_indices"][..., :count]
    return ApplyNativeSparseAttentionArgs(**made)


# (batch, tokens, heads, kv heads, d, e, block size, blocks of a list)
_SHAPES = {"plain": (1, 21, 4, 2, 8, 12, 4, 3), "rows": (2, 19, 3, 1, 12, 8, 5, 4)}


def _values(row: dict[str, Any], dtype: Any, key: jax.Array) -> dict[str, Any]:
    batch, t, heads, groups, d, e, size, k = _SHAPES[row.get("shape", "plain")]
    keys = jax.random.split(key, 5)
    shapes = {"query": (heads, d), "key": (groups, d), "value": (groups, e)}
    values: dict[str, Any] = {
        name: jax.random.normal(one, (batch, t, *shape), jnp.float32).astype(dtype)
        for one, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    values |= {"block_size": row.get("size", size), "block_counts": row.get("counts")}
    values["block_indices"] = nsa.lists_of(keys[3], (batch, t, groups), size, k)
    if row.get("counts") == "array":
        values["block_counts"] = jax.random.randint(keys[4], (batch, t, groups), 0, k + 1)
    if "scale" in row:
        values["softmax_scale"] = row["scale"]
    if row.get("packed"):
        values["cu_seqlens"] = jnp.asarray(nsa.PACKED, jnp.int32)
    return values


_ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rows": {"shape": "rows", "counts": 2},
    "packed_counts": {"packed": True, "counts": "array"},
    "one_block": {"size": 64},
    "cover00": {"shape": "rows", "counts": "array", "scale": 0.5},
}


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    tags = frozenset({"core", "full"})
    return tuple(
        _spec.Case(name, functools.partial(_values, row), tags) for name, row in _ROWS.items()
    )


def changes() -> dict[str, dict[str, Any]]:
    """For each option, arguments that set it on the plain case; tests look for the effect."""
    _, t, _, groups, _, _, size, _ = _SHAPES["plain"]
    return {
        "block_counts": {"block_counts": jnp.full((1, t, groups), 2)},
        "block_size": {"block_size": size},
        "softmax_scale": {"softmax_scale": 1.5},
        "cu_seqlens": {"cu_seqlens": jnp.asarray(nsa.PACKED, jnp.int32)},
    }


SPEC = _spec.OpSpec(
    name=OP,
    work=_work_sparse.apply_native_sparse_attention,
    args=ApplyNativeSparseAttentionArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.native_sparse_attention:apply_native_sparse_attention",
    formula="ejkernel.kernels._xla.apply_native_sparse_attention.formula:"
    "apply_native_sparse_attention",
    differentiable=frozenset({"query", "key", "value", "softmax_scale"}),
    residuals=nsa.residuals_of(("out", "lse", "selected"), "the op", lambda args: True),
    cases=cases,
    padded=("packed_counts",),
    changes=changes,
    config=ApplyNativeSparseAttentionConfig,
    check=functools.partial(nsa.check_lists, op=OP),
    debug=functools.partial(nsa.check_values, op=OP),
    **nsa.FAMILY,
)
