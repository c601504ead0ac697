"""`mean_pooling`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from ejkernel.kernels import _spec, _types
from ejkernel.kernels._specs import _common, _work_matmul
from ejkernel.ops.core.sharding import Layout

OP = "mean_pooling"
_HEADS = {"ranks": (4,), "hint": " Or [b, t, h, d], with heads."}


@_spec.op_args
class MeanPoolingArgs(_spec.OpArgs):
    """Arguments of `mean_pooling`; see the public function for their meaning."""

    inputs: Float[Array, "b t d"] | Float[Array, "b t h d"] = dataclasses.field(metadata=_HEADS)
    mask: Shaped[Array, "b t"] | None = None
    cu_seqlens: Int[Array, "n1"] | None = None
    chunk_size: int | None = _spec.static(default=None)


@dataclasses.dataclass(frozen=True)
class MeanPoolingConfig:
    """How to run `mean_pooling`; what is None is chosen by the library."""

    platform: str | None = None
    backend: str | None = None
    fwd_params: None = None
    bwd_params: None = None


def canonicalize(values: dict[str, Any]) -> MeanPoolingArgs:
    """Checks a call and brings it to the one form that kernels see."""
    inputs, mask, cu_seqlens = jnp.asarray(values["inputs"]), values["mask"], values["cu_seqlens"]
    _common.check_floats(OP, inputs=inputs)
    if inputs.ndim not in (3, 4):
        raise ValueError(f"`{OP}`: `inputs` must be [b, t, d] or [b, t, h, d]; got {inputs.shape}.")
    if mask is not None and mask.shape != inputs.shape[:2]:
        raise ValueError(f"`{OP}`: `mask` must be {inputs.shape[:2]}, [b, t]; got {mask.shape}.")
    if cu_seqlens is not None:
        _check_packed(inputs, mask, cu_seqlens)
    chunk_size = values["chunk_size"]
    if chunk_size is not None and (isinstance(chunk_size, bool) or chunk_size < 1):
        raise ValueError(f"`{OP}`: `chunk_size` must be an int >= 1; got {chunk_size!r}.")
    return MeanPoolingArgs(
        inputs=inputs,
        # of any dtype: unlike that of attention it is never added to anything
        mask=None if mask is None else jnp.asarray(mask).astype(bool),
        cu_seqlens=None if cu_seqlens is None else jnp.asarray(cu_seqlens, jnp.int32),
        chunk_size=None if chunk_size is None else int(chunk_size),
    )


def _check_packed(inputs: jax.Array, mask: Any, cu_seqlens: Any) -> None:
    if mask is not None:
        raise ValueError(
            f"`{OP}`: `mask` and `cu_seqlens` cannot be given together; leave the tokens that do "
            "not count out of the sequences."
        )
    if inputs.shape[0] != 1:
        raise ValueError(
            f"`{OP}`: `cu_seqlens` packs sequences into one row, so the batch must be 1; got "
            f"`inputs` {inputs.shape}."
        )
    if cu_seqlens.shape[0] < 1:
        raise ValueError(f"`{OP}`: `cu_seqlens` must have n + 1 entries; got none.")


def check_values(values: dict[str, Any]) -> None:
    """Checks known lengths, for `EJKERNEL_DEBUG`."""
    cuts, length = _spec.known(values["cu_seqlens"]), values["inputs"].shape[1]
    if cuts is not None and ((np.diff(cuts) < 0).any() or cuts.max(initial=0) > length):
        raise ValueError(
            f"`{OP}`: `cu_seqlens` must not decrease, from 0 to at most the {length} tokens of "
            f"`inputs`; got {_types.brief(cuts)}."
        )


def examples(args: MeanPoolingArgs) -> dict[str, jax.Array]:
    """Most tokens count; sequences of one length."""
    batch, t = args.inputs.shape[:2]
    made: dict[str, jax.Array] = {
        "mask": jax.random.bernoulli(jax.random.key(3), 0.9, (batch, t)),
    }
    if args.cu_seqlens is not None:
        made["cu_seqlens"] = jnp.asarray(np.linspace(0, t, args.cu_seqlens.shape[0]), jnp.int32)
    return made


def twin(args: MeanPoolingArgs, block: int) -> dict[str, int]:
    """Two rows and heads, three sequences, and three chunks with the call's own remainder."""
    t = args.inputs.shape[1]
    size = block if args.chunk_size is None else min(args.chunk_size, max(t, 1))
    return {"b": 2, "h": 2, "n1": 4, "t": 3 * size + t % size}


_PACKED = (0, 5, 5, 6, 17, 21, 21)  # of 23 tokens: empty, single, and two tokens left over


def _values(row: dict[str, Any], dtype: Any, key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 2)
    shape = row.get("shape", (2, 23, 6))
    values: dict[str, Any] = {
        "inputs": jax.random.normal(keys[0], shape, jnp.float32).astype(dtype),
        "chunk_size": row.get("chunk"),
    }
    if row.get("mask"):
        mask = jax.random.bernoulli(keys[1], 0.6, shape[:2])
        values["mask"] = mask.at[-1].set(False).at[-1, : row["mask"]].set(True)
    if row.get("packed"):
        values["cu_seqlens"] = jnp.asarray(_PACKED, jnp.int32)
    return values


_ROWS: dict[str, dict[str, Any]] = {
    "plain": {"shape": (1, 23, 6)},
    "mask_heads": {"mask": 3, "shape": (3, 9, 2, 5)},
    "chunks_heads": {"chunk": 5, "shape": (2, 23, 3, 4)},
    "long_chunk": {"chunk": 64},
    "packed": {"packed": True, "shape": (1, 23, 6)},
    "packed_chunks": {"packed": True, "chunk": 4, "shape": (1, 23, 2, 3)},
    # the last row's later chunks have no token
    "cover00": {"mask": 4, "chunk": 5},
}


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    tags = frozenset({"core", "full"})
    return tuple(
        _spec.Case(name, functools.partial(_values, row), tags) for name, row in _ROWS.items()
    )


def changes() -> dict[str, dict[str, Any]]:
    """For each option, arguments that set it on the plain case; tests look for the effect."""
    return {
        "mask": {"mask": jnp.arange(23)[None] % 3 != 0},
        "cu_seqlens": {"cu_seqlens": jnp.asarray(_PACKED, jnp.int32)},
        "chunk_size": {"chunk_size": 4},
    }


class MeanPoolingSpec(_spec.OpSpec):
    """Inputs with heads have one axis more, chunks and sequences other rows."""

    def layout(self, args: MeanPoolingArgs) -> Layout:
        rest = ("h", "d") if args.inputs.ndim == 4 else ("d",)
        if args.cu_seqlens is not None:
            rows: tuple[str, ...] = ("n",)
        else:
            rows = ("b",) if args.chunk_size is None else ("b", "c")
        return Layout(
            arrays={"inputs": ("b", "t", *rest), "mask": ("b", "t"), "cu_seqlens": ("n1",)},
            outputs=((*rows, *rest),),
            shardable=frozenset("hd" if args.cu_seqlens is not None else "bhd"),
            aliases={},
            localize=self.localize,
            instead=self.instead,
        )


SPEC = MeanPoolingSpec(
    name=OP,
    work=_work_matmul.mean_pooling,
    args=MeanPoolingArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.mean_pooling:mean_pooling",
    formula="ejkernel.kernels._xla.mean_pooling.fwd:formula",
    differentiable=frozenset({"inputs"}),
    outputs=lambda args: ("out",),
    output_axes={"out": ("b", "d")},
    cases=cases,
    padded=("mask_heads", "packed", "packed_chunks"),
    changes=changes,
    examples=examples,
    twin=twin,
    config=MeanPoolingConfig,
    debug=check_values,
)
