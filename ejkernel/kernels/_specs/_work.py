"""What the counts of work and the benchmark shapes of all ops share."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _spec

BACKWARD = "backward"
# Tags of benchmark cases: shapes for a CPU, shapes for GPUs and TPUs, and calls that show what an
# option costs beside the plain call; CHECK is a small call with the options of the others, for ops
# that have no twin of a call to compare with the oracle.
CPU, DEVICE, OPTIONS, CHECK = "cpu", "device", "options", "check"


def size_of(*arrays: Any) -> int:
    """Bytes of arrays; None counts nothing."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays if x is not None)


def inputs(args: Any) -> int:
    """Bytes of all arrays of a call."""
    return size_of(*args.arrays().values())


def gradients(args: Any, names: Iterable[str]) -> int:
    """Bytes of the gradients of those arrays of a call that are named."""
    return size_of(*(x for name, x in args.arrays().items() if name in names))


def streamed(
    outputs: Callable[[Any], int], differentiable: frozenset[str], saved: bool = False
) -> Callable[[Any, str], int]:
    """Traffic of an op that reads every array once and writes its outputs once.

    Args:
      outputs: Bytes of the outputs of a call.
      differentiable: Arguments whose gradients the backward writes.
      saved: Whether the backward also reads the outputs of the forward.
    """

    def traffic(args: Any, direction: str) -> int:
        if direction != BACKWARD:
            return inputs(args) + outputs(args)
        cotangents = outputs(args) * (2 if saved else 1)
        return inputs(args) + cotangents + gradients(args, differentiable)

    return traffic


def window_rows(length_q: int, length_k: int, window: Any) -> tuple[np.ndarray, np.ndarray]:
    """First and last visible key of each query, for positions aligned at the end.

    A query that sees nothing has a last key before its first.
    """
    left, right = window or (None, None)
    position = np.arange(length_q, dtype=np.int64) + (length_k - length_q)
    first = np.zeros_like(position) if left is None else np.maximum(position - left, 0)
    last = np.full_like(position, length_k - 1)
    if right is not None:
        last = np.minimum(last, position + right)
    return first, last


def window_pairs(length_q: int, length_k: int, window: Any) -> int:
    """Visible pairs of one sequence."""
    first, last = window_rows(length_q, length_k, window)
    return int(np.maximum(last - first + 1, 0).sum())


def lengths_of(cu_seqlens: Any, tokens: int, rows: int) -> np.ndarray:
    """Lengths of the sequences of a call: packed ones where known, else whole rows."""
    cuts = _spec.known(cu_seqlens)
    return np.full(rows, tokens) if cuts is None else np.diff(cuts)


# Benchmark shapes


# Up to this many numbers are drawn by NumPy, which compiles nothing.
_FEW = 1 << 23


def normals(dtype: Any, key: jax.Array, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Independent normal arrays by name."""
    traced = isinstance(key, jax.core.Tracer)
    if traced or sum(map(math.prod, shapes.values())) > _FEW:
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.normal(k, tuple(shape), jnp.float32).astype(dtype)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())
    return {
        name: jnp.asarray(rng.standard_normal(tuple(shape), np.float32), dtype)
        for name, shape in shapes.items()
    }


def case(
    name: str, tag: str, values: Callable[..., dict[str, Any]], *sizes: Any, **more: Any
) -> _spec.Case:
    """A benchmark case: `values(dtype, key, *sizes)` makes its public arguments."""

    def make(dtype: Any, key: jax.Array) -> dict[str, Any]:
        return values(dtype, key, *sizes)

    return _spec.Case(name, make, frozenset({"bench", *tag.split()}), **more)


def table(
    values: Callable[..., dict[str, Any]], rows: Sequence[tuple[str, str, tuple[Any, ...]]]
) -> Callable[[], Sequence[_spec.Case]]:
    """Benchmark cases from rows of name, tag and sizes."""

    @functools.cache
    def cases() -> tuple[_spec.Case, ...]:
        return tuple(case(name, tag, values, *sizes) for name, tag, sizes in rows)

    return cases
