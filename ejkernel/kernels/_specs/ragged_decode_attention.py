"""`ragged_decode_attention`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _common, _paged, _work_paged, page_attention
from ejkernel.ops.core.types import FwdParams


@_spec.op_args
class RaggedDecodeAttentionArgs(_spec.OpArgs):
    """Arguments of `ragged_decode_attention`; see the public function for their meaning."""

    query: Float[Array, "b h d"] = dataclasses.field(metadata={"ranks": (4,)})
    key: Shaped[Array, "b s g d"]
    value: Shaped[Array, "b s g e"]
    sequence_start: Int[Array, "b"]
    sequence_end: Int[Array, "b"]
    softmax_scale: _common.Scale = _spec.static(
        default=None, unset=page_attention.default_scale, computed=True
    )
    sliding_window: int | tuple[int | None, int | None] | None = _spec.static(
        default=None, unset=page_attention.no_window
    )
    logits_soft_cap: float | None = _spec.static(default=None)
    softmax_aux: Float[Array, "#h sinks"] | None = _spec.array(ranks=(1,))
    alibi_slopes: Float[Array, "h"] | None = None
    k_scale: Float[Array, "g"] | None = _spec.array(ranks=(0,))
    v_scale: Float[Array, "g"] | None = _spec.array(ranks=(0,))
    # only a hint: a kernel that does not split keys has nothing to honour
    num_splits: int | None = _spec.static(default=None, unset=lambda value, args: True)
    return_lse: bool = _spec.static(default=False)
    # whether the query of the call is [b, 1, h, d]; its outputs then have that axis too, and no
    # kernel sees it
    token_axis: bool = _spec.hidden(default=False, unset=lambda value, args: True)


@dataclasses.dataclass(frozen=True)
class RaggedDecodeAttentionConfig:
    """How to run `ragged_decode_attention`; what is None is chosen by the library."""

    fwd_params: FwdParams | None = None
    platform: str | None = None
    backend: str | None = None
    bwd_params: None = None


def canonicalize(values: dict[str, Any]) -> RaggedDecodeAttentionArgs:
    """Checks a call and brings it to the one form that kernels see."""
    op = "ragged_decode_attention"
    query, key, value = (jnp.asarray(values[name]) for name in ("query", "key", "value"))
    batch, _, num_kv_heads, head_dim = key.shape
    token_axis = query.ndim == 4
    if token_axis:
        if query.shape[1] != 1 or query.shape[::3] != (batch, head_dim):
            raise ValueError(
                f"`{op}`: `query` must be [{batch}, h, {head_dim}] or [{batch}, 1, h, {head_dim}], "
                f"one query a row of `key`; got {query.shape}."
            )
        query = query[:, 0]
    page_attention.check_caches(op, query, key=key, value=value)
    return RaggedDecodeAttentionArgs(
        query=query,
        key=key,
        value=value,
        sequence_start=jnp.asarray(values["sequence_start"], jnp.int32),
        sequence_end=jnp.asarray(values["sequence_end"], jnp.int32),
        token_axis=token_axis,
        **page_attention.decode_options(
            op, values, query.shape[1], num_kv_heads, head_dim, query.dtype
        ),
    )


def finish(args: RaggedDecodeAttentionArgs, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Outputs with the token axis that the query of the call has."""
    if not args.token_axis:
        return outputs
    out, *lse = outputs
    return out[:, None], *(x[..., None] for x in lse)


def check_values(values: dict[str, Any]) -> None:
    """Checks known ranges, for `EJKERNEL_DEBUG`."""
    arrays = _paged.concrete(values, "sequence_start", "sequence_end")
    if arrays is None:
        return
    (start, end), length = arrays, values["key"].shape[1]
    if (row := _paged.first((start < 0) | (end > length) | (start > end))) is not None:
        raise ValueError(
            "`ragged_decode_attention`: `sequence_start` and `sequence_end` must be ranges within "
            f"[0, {length}]; got [{start[row]}, {end[row]}) for sequence {row}."
        )


def examples(args: RaggedDecodeAttentionArgs) -> dict[str, jax.Array]:
    """Ranges between half and all of the keys."""
    batch, length = args.key.shape[:2]
    ends = np.linspace(length // 2, length, batch).astype(np.int32)
    return page_attention.example_caches(args, "key", "value") | {
        "sequence_start": jnp.asarray(ends // 8),
        "sequence_end": jnp.asarray(ends),
    }


def twin(args: RaggedDecodeAttentionArgs, block: int) -> dict[str, int]:
    """Two rows, two key heads, and a length of two blocks and the call's own remainder."""
    length, num_kv_heads = args.key.shape[1:3]
    groups = min(num_kv_heads, 2)
    heads = groups * (args.query.shape[1] // num_kv_heads)
    return {"b": 2, "g": groups, "h": heads, "s": 2 * block + length % block}


# (batch, keys, heads, kv heads, d, e)
_SHAPES = {"small": (4, 20, 4, 2, 16, 16), "odd": (3, 13, 3, 1, 8, 24)}


def _values(row: dict[str, Any], dtype: Any, key: jax.Array) -> dict[str, Any]:
    """Public arguments of one row of options; ranges are full, inner, empty and short."""
    batch, length, heads, groups, d, e = _SHAPES[row["shape"]]
    (query, k, v), options = page_attention.cache_values(
        row | {"groups": groups},
        dtype,
        key,
        heads,
        (batch, heads, d),
        (batch, length, groups, d),
        (batch, length, groups, e),
    )
    return options | {
        "query": query,
        "key": k,
        "value": v,
        "sequence_start": jnp.asarray([0, 3, 5, 1][:batch], jnp.int32),
        "sequence_end": jnp.asarray([length, 11, 5, 2][:batch], jnp.int32),
    }


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    return page_attention.case_table(_values, paged=False)


def changes() -> dict[str, dict[str, Any]]:
    return page_attention.decode_changes(_SHAPES["small"][2])


SPEC = _spec.OpSpec(
    name="ragged_decode_attention",
    work=_work_paged.ragged_decode_attention,
    args=RaggedDecodeAttentionArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.ragged_decode_attention:ragged_decode_attention",
    differentiable=frozenset(),
    outputs=page_attention.outputs,
    output_axes={"out": ("b", "h", "e"), "lse": ("b", "h")},
    cases=cases,
    padded=page_attention.PADDED,
    changes=changes,
    examples=examples,
    twin=twin,
    config=RaggedDecodeAttentionConfig,
    scalars=page_attention.SCALARS,
    publish=page_attention.publish,
    debug=check_values,
    finish=finish,
    shardable=frozenset({"b", "h", "g"}),
    aliases={"g": "h"},
)
