"""Work and benchmark shapes of grouped and sparse products, of means and of merged states."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _work
from ejkernel.kernels._specs._work import BACKWARD, CHECK, CPU, DEVICE
from ejkernel.xla_utils import dtypes


def _twice_backward(count: int, direction: str) -> int:
    """A product has two in its backward, one for each operand."""
    return count * (2 if direction == BACKWARD else 1)


def _group_rows(args: Any) -> int:
    """Rows that belong to a matrix which is here."""
    sizes = _spec.known(args.group_sizes)
    if sizes is None:
        return args.lhs.shape[0]
    offset = 0 if args.group_offset is None else _spec.known(args.group_offset)
    first = 0 if offset is None else int(offset)
    ends = np.minimum(np.cumsum(sizes), args.lhs.shape[0])
    rows = np.diff(ends, prepend=0)
    return int(rows[first : first + args.rhs.shape[0]].sum())


def _columns(args: Any) -> int:
    return args.rhs.shape[-2 if args.transpose_rhs else -1]


def _grouped_flops(args: Any, direction: str) -> int:
    rows = math.prod(args.lhs.shape[:-1]) if args.lhs.ndim == 4 else _group_rows(args)
    return _twice_backward(2 * rows * args.lhs.shape[-1] * _columns(args), direction)


def _grouped_outputs(args: Any) -> int:
    dtype = args.preferred_element_type or dtypes.common(args.lhs.dtype, args.rhs.dtype)
    return _work.size_of(jax.ShapeDtypeStruct((*args.lhs.shape[:-1], _columns(args)), dtype))


def grouped(dtype: Any, key: jax.Array, m: int, k: int, n: int, g: int) -> dict[str, Any]:
    """Groups of uneven sizes that use up all rows; matrices of unit gain."""
    made = _work.normals(dtype, key, {"lhs": (m, k), "rhs": (g, k, n)})
    made["rhs"] = made["rhs"] * jnp.asarray(k**-0.5, dtype)
    sizes = np.random.default_rng(0).multinomial(m, np.full(g, 1 / g))
    return made | {"group_sizes": jnp.asarray(sizes, jnp.int32)}


_GROUPED = (
    ("M4096 E64 256x256", CPU, (4096, 256, 256, 64)),
    ("M32768 E8 4096x4096", DEVICE, (32768, 4096, 4096, 8)),
    ("M8192 E8 4096x4096", DEVICE, (8192, 4096, 4096, 8)),
    ("M65536 E64 4096x4096", DEVICE, (65536, 4096, 4096, 64)),
)


def _sparse_flops(args: Any, direction: str) -> int:
    blocks, size, _ = args.blocks.shape
    return _twice_backward(2 * blocks * size * size * args.dense.shape[1], direction)


def _sparse_outputs(args: Any) -> int:
    return _work.size_of(
        jax.ShapeDtypeStruct((args.shape[0], args.dense.shape[1]), args.dense.dtype)
    )


def _places(m: int, k: int, size: int) -> dict[str, Any]:
    """A tenth of the blocks of a matrix, in the order of rows."""
    count = (m // size) * (k // size)
    chosen = np.sort(np.random.default_rng(0).permutation(count)[: max(count // 10, 1)])
    rows, cols = np.divmod(chosen, k // size)
    return {"rows": jnp.asarray(rows, jnp.int32), "cols": jnp.asarray(cols, jnp.int32)}


def _sparse(dtype: Any, key: jax.Array, m: int, k: int, n: int, size: int) -> dict[str, Any]:
    places = _places(m, k, size)
    blocks = (places["rows"].shape[0], size, size)
    made = _work.normals(dtype, key, {"blocks": blocks, "dense": (k, n)})
    return made | places | {"shape": (m, k)}


_SPARSE = (
    ("1/10 of 2048x2048 in blocks of 64, 256 columns", CPU, (2048, 2048, 256, 64)),
    ("1/10 of 16384x16384 in blocks of 128, 4096 columns", DEVICE, (16384, 16384, 4096, 128)),
)


def _sampled_flops(args: Any, direction: str) -> int:
    size, count = args.block_size, args.rows.shape[0]
    return _twice_backward(2 * count * size * size * args.lhs.shape[1], direction)


def _sampled_outputs(args: Any) -> int:
    shape = (args.rows.shape[0], args.block_size, args.block_size)
    return _work.size_of(jax.ShapeDtypeStruct(shape, args.lhs.dtype))


def _sampled(dtype: Any, key: jax.Array, m: int, k: int, n: int, size: int) -> dict[str, Any]:
    made = _work.normals(dtype, key, {"lhs": (m, k), "rhs": (k, n)})
    return made | _places(m, n, size) | {"block_size": size}


_SAMPLED = (
    ("1/10 of 2048x2048 in blocks of 64, k=256", CPU, (2048, 256, 2048, 64)),
    ("1/10 of 16384x16384 in blocks of 128, k=4096", DEVICE, (16384, 4096, 16384, 128)),
)


# Means


def _counted(args: Any) -> int:
    """Tokens that are part of some mean."""
    batch, t = args.inputs.shape[:2]
    if (mask := _spec.known(args.mask)) is not None:
        return int((mask != 0).sum())
    return int(_work.lengths_of(args.cu_seqlens, t, batch).sum())


def _mean_flops(args: Any, direction: str) -> int:
    """An addition, or in the backward a multiplication, for every number."""
    return _counted(args) * math.prod(args.inputs.shape[2:])


def _means(args: Any) -> int:
    """Bytes of the means."""
    batch, t = args.inputs.shape[:2]
    rows = batch if args.cu_seqlens is None else args.cu_seqlens.shape[0] - 1
    if args.chunk_size is not None:
        chunks = -(-t // args.chunk_size)
        packed = t // args.chunk_size + rows
        rows = batch * chunks if args.cu_seqlens is None else packed
    return rows * math.prod(args.inputs.shape[2:]) * args.inputs.dtype.itemsize


def _mean_traffic(args: Any, direction: str) -> int:
    """Forward reads the tokens; backward reads the gradients of the means and writes theirs."""
    token = math.prod(args.inputs.shape[2:]) * args.inputs.dtype.itemsize
    tokens = _counted(args) if direction != BACKWARD else math.prod(args.inputs.shape[:2])
    return tokens * token + _means(args) + _work.size_of(args.mask, args.cu_seqlens)


def _pooled(dtype: Any, key: jax.Array, b: int, t: int, h: int, d: int, chunk: int) -> Any:
    return _work.normals(dtype, key, {"inputs": (b, t, h, d)}) | {"chunk_size": chunk}


_POOLED = (
    ("T8192 H8 d64 chunk 64", CPU, (1, 8192, 8, 64, 64)),
    ("T65536 H16 d128 chunk 64", DEVICE, (1, 65536, 16, 128, 64)),
    ("T150 H2 d16 chunk 64", CHECK, (2, 150, 2, 16, 64)),
)


def _merge_flops(args: Any, direction: str) -> int:
    """Two multiplications and an addition for every number; backward two products and two sums."""
    return math.prod(args.out_a.shape) * (6 if direction == BACKWARD else 3)


def _merged(args: Any) -> int:
    return _work.size_of(args.out_a, args.lse_a)


def _states(dtype: Any, key: jax.Array, b: int, t: int, h: int, d: int) -> dict[str, Any]:
    outs = {"out_a": (b, t, h, d), "out_b": (b, t, h, d)}
    lses = _work.normals(
        jnp.float32, jax.random.fold_in(key, 1), {"lse_a": (b, h, t), "lse_b": (b, h, t)}
    )
    return _work.normals(dtype, key, outs) | lses


_MERGED = (
    ("B1 T2048 H8 d64", CPU, (1, 2048, 8, 64)),
    ("B4 T4096 H16 d128", DEVICE, (4, 4096, 16, 128)),
)
_MERGE_GRADIENTS = frozenset({"out_a", "lse_a", "out_b", "lse_b"})

grouped_matmul = _spec.Work(
    _grouped_flops,
    _work.streamed(_grouped_outputs, frozenset({"lhs", "rhs", "existing_out"})),
    _work.table(grouped, _GROUPED),
)
sparse_matmul = _spec.Work(
    _sparse_flops,
    _work.streamed(_sparse_outputs, frozenset({"blocks", "dense"})),
    _work.table(_sparse, _SPARSE),
)
sampled_matmul = _spec.Work(
    _sampled_flops,
    _work.streamed(_sampled_outputs, frozenset({"lhs", "rhs"})),
    _work.table(_sampled, _SAMPLED),
)
mean_pooling = _spec.Work(_mean_flops, _mean_traffic, _work.table(_pooled, _POOLED))
merge_attention_states = _spec.Work(
    _merge_flops,
    _work.streamed(_merged, _MERGE_GRADIENTS, saved=True),
    _work.table(_states, _MERGED),
)
