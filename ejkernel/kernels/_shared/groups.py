"""Which rows of a ragged product belong to which matrix, and the blocks of rows to visit.

All of it is computed on the device: group sizes may be traced.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.callib import cdiv
from ejkernel.xla_utils import search


class Groups(NamedTuple):
    """Rows [start, stop) of each matrix of `rhs`, in order; empty for one without rows."""

    start: jax.Array  # [g] int32
    stop: jax.Array  # [g] int32

    def owned(self, m: int) -> jax.Array:
        """Rows that some matrix owns, [m] bool; matrices that are neighbours own one range."""
        some = self.stop > self.start
        first = jnp.min(jnp.where(some, self.start, m))
        last = jnp.max(jnp.where(some, self.stop, 0))
        row = jnp.arange(m, dtype=jnp.int32)
        return (row >= first) & (row < last)


def of_sizes(sizes: jax.Array, offset: jax.Array | None, count: int, m: int) -> Groups:
    """Groups of `count` matrices, the first of which is number `offset` of all groups.

    Sizes that sum to more than the m rows are cut.
    """
    stops = jnp.minimum(jnp.cumsum(jnp.maximum(sizes, 0), dtype=jnp.int32), m)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), stops[:-1]])
    index = jnp.arange(count, dtype=jnp.int32) + (0 if offset is None else offset)
    known = (index >= 0) & (index < sizes.shape[0])
    index = jnp.clip(index, 0, sizes.shape[0] - 1)
    stop = stops[index]
    return Groups(jnp.where(known, starts[index], stop), stop)


def of_call(args: Any) -> Groups:
    """Groups of a call of `grouped_matmul`, counted over all rows of `flat(args.lhs, 2)`."""
    if args.lhs.ndim == 4:
        *lead, m, _ = args.lhs.shape
        start = jnp.arange(lead[0] * lead[1], dtype=jnp.int32) * m
        return Groups(start, start + m)
    m, count = args.lhs.shape[0], args.rhs.shape[0]
    return of_sizes(args.group_sizes, args.group_offset, count, m)


def flat(x: jax.Array, ndim: int) -> jax.Array:
    """An array of the batched form with batch, groups and rows as one axis."""
    return x.reshape(-1, *x.shape[1 - ndim :]) if x.ndim == 4 else x


class Visits(NamedTuple):
    """Steps of a kernel: a block of rows with one matrix. Steps from the last real one on repeat
    it with no rows, so that they fetch nothing.
    """

    group: jax.Array  # [v] int32
    block: jax.Array  # [v] int32, of rows
    low: jax.Array  # [v] int32, first row of the group in the block
    high: jax.Array  # [v] int32, row after its last; equal to `low` where it has none
    first: jax.Array  # [v] int32, 1 at the first step of a block (`by_block`) or group (`by_group`)
    last: jax.Array  # [v] int32, 1 at the last one

    def table(self) -> jax.Array:
        """[6, v], in the order of the fields."""
        return jnp.stack(self)


def _visits(
    counts: jax.Array, total: int, at: Any, groups: Groups, size: int, num_blocks: int
) -> Visits:
    """`counts` steps of each owner; `at(owner, j)` gives group and block of its step j."""
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    step = jnp.arange(total, dtype=jnp.int32)
    real = step < ends[-1]
    step = jnp.minimum(step, ends[-1] - 1)
    owner = search.count_before(ends, step)
    j = step - (ends[owner] - counts[owner])
    group, block = at(owner, j)
    block = jnp.clip(block, 0, num_blocks - 1)
    low, high = (jnp.clip(x[group] - block * size, 0, size) for x in groups)
    return Visits(
        group=group,
        block=block,
        low=low,
        high=jnp.where(real, jnp.maximum(high, low), low),
        first=(real & (j == 0)).astype(jnp.int32),
        last=(real & (j == counts[owner] - 1)).astype(jnp.int32),
    )


def by_block(groups: Groups, m: int, size: int) -> Visits:
    """Every block of rows with each group that has rows in it, or once with none."""
    num_blocks, count = cdiv(m, size), groups.start.shape[0]
    some = groups.stop > groups.start
    order = jnp.argsort(~some, stable=True).astype(jnp.int32)  # groups with rows come first
    start, stop = (jnp.where(some, x, m)[order] for x in groups)
    edge = jnp.arange(num_blocks, dtype=jnp.int32) * size
    first = search.count_before(stop, edge)
    after = search.count_before(start, jnp.minimum(edge + size, m), inclusive=False)
    counts = jnp.maximum(after - first, 1)
    at = lambda owner, j: (order[jnp.minimum(first[owner] + j, count - 1)], owner)
    return _visits(counts, num_blocks + count, at, groups, size, num_blocks)


def by_group(groups: Groups, m: int, size: int) -> Visits:
    """Every group with each block of rows that it has rows in, or once with none."""
    num_blocks, count = cdiv(m, size), groups.start.shape[0]
    begin = groups.start // size
    spanned = (groups.stop - 1) // size - begin + 1
    counts = jnp.where(groups.stop > groups.start, spanned, 1)
    at = lambda owner, j: (owner, begin[owner] + j)
    return _visits(counts, num_blocks + count, at, groups, size, num_blocks)
