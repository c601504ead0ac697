"""`sampled_matmul`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _common, _sparse_blocks, _work_matmul

OP = "sampled_matmul"


@_spec.op_args
class SampledMatmulArgs(_spec.OpArgs):
    """Arguments of `sampled_matmul`; see the public function for their meaning."""

    lhs: Float[Array, "m k"]
    rhs: Float[Array, "k n"]
    rows: Int[Array, "nnz"]
    cols: Int[Array, "nnz"]
    block_size: int = _spec.static()


@dataclasses.dataclass(frozen=True)
class SampledMatmulConfig:
    """How to run `sampled_matmul`; what is None is chosen by the library."""

    platform: str | None = None
    backend: str | None = None
    fwd_params: None = None
    bwd_params: None = None


def canonicalize(values: dict[str, Any]) -> SampledMatmulArgs:
    """Checks a call and brings it to the one form that kernels see."""
    lhs, rhs = jnp.asarray(values["lhs"]), jnp.asarray(values["rhs"])
    _common.check_floats(OP, lhs=lhs, rhs=rhs)
    size = int(values["block_size"])
    if size < 1:
        raise ValueError(f"`{OP}`: `block_size` must be at least 1; got {size}.")
    check_values(values)
    rows, cols = (jnp.asarray(values[name], jnp.int32) for name in ("rows", "cols"))
    return SampledMatmulArgs(lhs=lhs, rhs=rhs, rows=rows, cols=cols, block_size=size)


def check_values(values: dict[str, Any]) -> None:
    """Refuses known indices beyond the product."""
    lhs, rhs, size = values["lhs"], values["rhs"], values["block_size"]
    if getattr(lhs, "ndim", 0) == getattr(rhs, "ndim", 0) == 2 and isinstance(size, int):
        shape = (lhs.shape[0], rhs.shape[1])
        _sparse_blocks.check_indices(OP, values["rows"], values["cols"], shape, size)


def examples(args: SampledMatmulArgs) -> dict[str, jax.Array]:
    shape = (args.lhs.shape[0], args.rhs.shape[1])
    rows, cols = _sparse_blocks.some_places(args.rows.shape[0], shape, args.block_size, seed=0)
    return {"rows": jnp.asarray(rows), "cols": jnp.asarray(cols)}


def twin(args: SampledMatmulArgs, block: int) -> dict[str, int]:
    """Nine blocks of a product of three by three, with the call's own remainders."""
    size = args.block_size
    m, n = args.lhs.shape[0], args.rhs.shape[1]
    return {"nnz": 9, "m": 3 * size + m % size, "n": 3 * size + n % size}


# nnz, block size, m, k, n: whole blocks, partial last ones, a block larger than the product
_SHAPES = {
    "whole": (7, 8, 40, 12, 24),
    "partial": (9, 8, 37, 5, 21),
    "small": (3, 16, 5, 7, 33),
}


def _values(shape: str, dtype: Any, key: jax.Array) -> dict[str, Any]:
    nnz, size, m, k, n = _SHAPES[shape]
    keys = jax.random.split(key, 2)
    rows, cols = _sparse_blocks.some_places(nnz, (m, n), size, seed=nnz)
    rows[1], cols[1] = rows[0], cols[0]
    return {
        "lhs": jax.random.normal(keys[0], (m, k), jnp.float32).astype(dtype),
        "rhs": jax.random.normal(keys[1], (k, n), jnp.float32).astype(dtype),
        "rows": jnp.asarray(rows),
        "cols": jnp.asarray(cols),
        "block_size": size,
    }


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    rows = {"plain": "whole", "cover00": "partial", "small": "small"}
    tags = frozenset({"core", "full"})
    return tuple(
        _spec.Case(name, functools.partial(_values, shape), tags) for name, shape in rows.items()
    )


SPEC = _spec.OpSpec(
    name=OP,
    work=_work_matmul.sampled_matmul,
    args=SampledMatmulArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.sampled_matmul:sampled_matmul",
    formula="ejkernel.kernels._xla.sampled_matmul.formula:sampled_matmul",
    differentiable=frozenset({"lhs", "rhs"}),
    outputs=lambda args: ("out",),
    output_axes={"out": ("nnz", "i", "j")},
    cases=cases,
    examples=examples,
    twin=twin,
    config=SampledMatmulConfig,
    check=check_values,
    instead="give each device the places of its own rows",
)
