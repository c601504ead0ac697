"""Which rows of which group each block of a grouped matmul holds."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.xla_utils import search


class Plan(NamedTuple):
    """Blocks of rows in order, none with rows of two groups; those from `count` on are empty."""

    group: jax.Array  # [blocks], index into rhs
    start: jax.Array  # [blocks], first row
    stop: jax.Array  # [blocks], row after the last
    count: jax.Array  # blocks with rows
    computed: jax.Array  # [m], rows that a group of rhs owns


def make(args: Any, block_m: int) -> Plan:
    """The plan of a ragged call; sizes that sum to more than the rows are cut."""
    m, num_local = args.lhs.shape[0], args.rhs.shape[0]
    stops = jnp.minimum(jnp.cumsum(jnp.maximum(args.group_sizes, 0), dtype=jnp.int32), m)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), stops[:-1]])
    group = jnp.arange(stops.shape[0], dtype=jnp.int32)
    if args.group_offset is not None:
        group = group - args.group_offset
    local = (group >= 0) & (group < num_local)
    sizes = jnp.where(local, stops - starts, 0)
    last_block = jnp.cumsum(-(-sizes // block_m), dtype=jnp.int32)  # after the group's last
    blocks = jnp.arange(-(-m // block_m) + num_local, dtype=jnp.int32)
    owner = search.count_before(last_block, blocks)
    owner = jnp.minimum(owner, stops.shape[0] - 1)
    before = last_block[owner] + sizes[owner] // -block_m  # blocks of the groups before
    start = starts[owner] + (blocks - before) * block_m
    real = blocks < last_block[-1]
    # local groups are neighbours, so their rows are one range
    first = jnp.min(jnp.where(sizes > 0, starts, m))
    last = jnp.max(jnp.where(sizes > 0, stops, 0))
    row = jnp.arange(m, dtype=jnp.int32)
    return Plan(
        group=jnp.clip(group[owner], 0, num_local - 1),
        start=jnp.where(real, start, m),
        stop=jnp.where(real, jnp.minimum(start + block_m, stops[owner]), m),
        count=last_block[-1],
        computed=(row >= first) & (row < last),
    )
