"""`sparse_matmul`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _common, _sparse_blocks, _work_matmul

OP = "sparse_matmul"


@_spec.op_args
class SparseMatmulArgs(_spec.OpArgs):
    """Arguments of `sparse_matmul`; see the public function for their meaning."""

    blocks: Float[Array, "nnz i i"]
    rows: Int[Array, "nnz"]
    cols: Int[Array, "nnz"]
    dense: Float[Array, "k n"]
    shape: tuple[int, int] = _spec.static()


@dataclasses.dataclass(frozen=True)
class SparseMatmulConfig:
    """How to run `sparse_matmul`; what is None is chosen by the library."""

    platform: str | None = None
    backend: str | None = None
    fwd_params: None = None
    bwd_params: None = None


def canonicalize(values: dict[str, Any]) -> SparseMatmulArgs:
    """Checks a call and brings it to the one form that kernels see."""
    blocks, dense = jnp.asarray(values["blocks"]), jnp.asarray(values["dense"])
    _common.check_floats(OP, blocks=blocks, dense=dense)
    m, k = (int(n) for n in values["shape"])
    if m < 0 or k != dense.shape[0]:
        raise ValueError(
            f"`{OP}`: `shape` must be (m, k) with m >= 0 and k={dense.shape[0]}, the rows of "
            f"`dense`; got {values['shape']}."
        )
    if blocks.shape[1] == 0:
        raise ValueError(f"`{OP}`: `blocks` must have at least one row each; got {blocks.shape}.")
    check_values(values)
    rows, cols = (jnp.asarray(values[name], jnp.int32) for name in ("rows", "cols"))
    return SparseMatmulArgs(blocks=blocks, rows=rows, cols=cols, dense=dense, shape=(m, k))


def check_values(values: dict[str, Any]) -> None:
    """Refuses known indices beyond the shape."""
    blocks, shape = values["blocks"], values["shape"]
    pair = isinstance(shape, tuple) and len(shape) == 2 and all(isinstance(n, int) for n in shape)
    if getattr(blocks, "ndim", 0) == 3 and pair:
        size = blocks.shape[-1]
        _sparse_blocks.check_indices(OP, values["rows"], values["cols"], shape, size)


def examples(args: SparseMatmulArgs) -> dict[str, jax.Array]:
    nnz, size, _ = args.blocks.shape
    rows, cols = _sparse_blocks.some_places(nnz, args.shape, size, seed=0)
    return {"rows": jnp.asarray(rows), "cols": jnp.asarray(cols)}


def twin(args: SparseMatmulArgs, block: int) -> dict[str, int]:
    """Nine blocks, and the rows of `dense` that `shape` has."""
    return {"nnz": 9, "k": args.shape[1]}


class SparseMatmulSpec(_spec.OpSpec):
    """Its option `shape` is a size, and small in a small call."""

    def reduced(self, args: Any, block: int) -> Any:
        """A matrix of three by three blocks, with the call's own remainders."""
        size = args.blocks.shape[1]
        rows, columns = (min(n, 3 * size + n % size) for n in args.shape)
        return super().reduced(dataclasses.replace(args, shape=(rows, columns)), block)


# nnz, block size, m, k, n: whole blocks, partial last ones, a block larger than the matrix
_SHAPES = {
    "whole": (7, 8, 40, 24, 12),
    "partial": (9, 8, 37, 21, 5),
    "small": (3, 16, 5, 33, 7),
}


def _values(shape: str, twice: bool, dtype: Any, key: jax.Array) -> dict[str, Any]:
    nnz, size, m, k, n = _SHAPES[shape]
    keys = jax.random.split(key, 2)
    rows, cols = _sparse_blocks.some_places(nnz, (m, k), size, seed=nnz)
    if twice:
        rows[1:3], cols[1:3] = rows[0], cols[0]
    return {
        "blocks": jax.random.normal(keys[0], (nnz, size, size), jnp.float32).astype(dtype),
        "rows": jnp.asarray(rows),
        "cols": jnp.asarray(cols),
        "dense": jax.random.normal(keys[1], (k, n), jnp.float32).astype(dtype),
        "shape": (m, k),
    }


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    rows = {
        "plain": ("whole", False),
        "partial": ("partial", False),
        "cover00": ("partial", True),
        "small": ("small", True),
    }
    tags = frozenset({"core", "full"})
    return tuple(
        _spec.Case(name, functools.partial(_values, *row), tags) for name, row in rows.items()
    )


SPEC = SparseMatmulSpec(
    name=OP,
    work=_work_matmul.sparse_matmul,
    args=SparseMatmulArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.sparse_matmul:sparse_matmul",
    formula="ejkernel.kernels._xla.sparse_matmul.formula:sparse_matmul",
    differentiable=frozenset({"blocks", "dense"}),
    outputs=lambda args: ("out",),
    output_axes={"out": ("m", "n")},
    cases=cases,
    examples=examples,
    twin=twin,
    config=SparseMatmulConfig,
    check=check_values,
    shardable=frozenset({"n"}),
    instead="give each device the blocks of its own rows",
)
