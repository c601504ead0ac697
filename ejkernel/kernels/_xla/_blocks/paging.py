"""Attention over cached keys that are fetched a few at a time, with online softmax.

Rows of queries have axes b, g, r, t, d (rows, key heads, query heads of a key head, queries, head
size). A row's keys come from `fetch(i)`, so a step holds one block of keys a row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import finite, multiply, wide
from ejkernel.kernels._xla._blocks import loops, softmax


class Keys(NamedTuple):
    """One block of keys of every row."""

    key: jax.Array  # [b, g, s, d]
    value: jax.Array  # [b, g, s, e]
    position: jax.Array  # [b or 1, s]; negative is no key


def attend(
    args: Any,
    query: jax.Array,  # [b, t, h, d]
    first: jax.Array,  # [b] first position that a row may see
    last: jax.Array,  # [b, t] position of a query; it sees nothing after it
    fetch: Callable[[Any], Keys],
    steps: tuple[Any, Any],  # of `fetch`, from and to
    sizes: tuple[int, int],  # key heads, value head size
) -> tuple[jax.Array, jax.Array]:
    """Output [b, t, h, e] and lse [b, h, t]; what is not seen may be anything."""
    batch, t, num_q_heads, head_dim = query.shape
    groups, width = sizes
    repeat, dtype = num_q_heads // groups, wide(query.dtype)
    q = query.reshape(batch, t, groups, repeat, head_dim).transpose(0, 2, 3, 1, 4)
    factor = _scale(args, dtype)

    def step(i: Any, state: softmax.State) -> softmax.State:
        block = fetch(i)
        # int8 and float8 fit into every float that a query may have
        key, value = block.key.astype(q.dtype), block.value.astype(q.dtype)
        # a value that is not finite marks its logits: a weight of zero must not meet it
        spoiled = ~jnp.isfinite(value).all(axis=-1)[:, :, None, None]  # [b, g, 1, 1, s]
        x = multiply("bgrtd,bgsd->bgrts", q, key)
        x = jnp.where(spoiled, jnp.nan, x)
        distance = block.position[:, None, :] - last[:, :, None]  # [b, t, s]
        x = _shape_logits(args, x * factor, distance)
        seen = (block.position >= first[:, None])[:, None] & (distance <= 0)
        if (left := args.sliding_window[0]) is not None:
            seen = seen & (distance >= -left)
        m, weights, alpha = softmax.weigh(state.m, jnp.where(seen[:, None, None], x, -jnp.inf))
        values = multiply("bgrts,bgse->bgrte", weights.astype(q.dtype), finite(value))
        total = state.l * alpha + weights.sum(axis=-1)
        return softmax.State(m, total, state.acc * alpha[..., None] + values)

    state = softmax.init(q.shape[:-1], width, dtype)
    state = loops.fori(*steps, step, loops.vary_like(state, query))
    out, lse = softmax.finish(softmax.add_sinks(state, _sinks(args, groups, repeat, dtype)))
    if args.v_scale is not None:
        out = out * args.v_scale.astype(dtype)[None, :, None, None, None]
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, t, num_q_heads, width)
    return out.astype(query.dtype), lse.reshape(batch, num_q_heads, t)


def _scale(args: Any, dtype: Any) -> Any:
    """What products of queries and cached keys are multiplied by, [1, g, 1, 1, 1] or a number."""
    if args.k_scale is None:
        return args.softmax_scale
    return args.softmax_scale * args.k_scale.astype(dtype)[None, :, None, None, None]


def _shape_logits(args: Any, x: jax.Array, distance: jax.Array) -> jax.Array:
    """The cap, then slopes; x is [b, g, r, t, s], distance [b, t, s]."""
    cap = args.logits_soft_cap
    x = x if cap is None else cap * jnp.tanh(x / cap)
    if args.alibi_slopes is not None:
        slopes = args.alibi_slopes.astype(x.dtype).reshape(1, *x.shape[1:3], 1, 1)
        x = x + slopes * distance[:, None, None].astype(x.dtype)
    return x


def _sinks(args: Any, groups: int, repeat: int, dtype: Any) -> jax.Array | None:
    """[1 or h, n] -> [1 or g, 1 or r, n]."""
    sinks = args.softmax_aux
    if sinks is None:
        return None
    shape = (1, 1) if sinks.shape[0] == 1 else (groups, repeat)
    return sinks.astype(dtype).reshape(*shape, sinks.shape[-1])


class Pages(NamedTuple):
    """The pages that rows have in their tables, and how to walk them."""

    table: jax.Array  # [b, m]
    low: jax.Array  # [b] first page of a row that a query sees
    count: int  # pages of a row in one step
    size: int  # keys of a page

    def fetch(self, i: Any, take: Callable[[jax.Array], tuple[jax.Array, jax.Array]]) -> Keys:
        """Step i; `take(ids [b, c])` gives keys and values [b, c, g, w, d]."""
        index = self.low[:, None] + i * self.count + jnp.arange(self.count, dtype=jnp.int32)[None]
        # past the end of a table stands its last page, at a position after every query
        ids = jnp.take_along_axis(self.table, jnp.minimum(index, self.table.shape[1] - 1), axis=1)
        slot = jnp.arange(self.size, dtype=jnp.int32)[None, None]
        position = index[:, :, None] * self.size + slot
        key, value = (_join(x) for x in take(ids))
        return Keys(key, value, position.reshape(index.shape[0], self.count * self.size))

    def steps(self, last: jax.Array) -> tuple[Any, Any]:
        """Steps that reach the last key of every row; `last` is [b, t]."""
        if self.table.shape[1] <= self.count:
            return 0, min(self.table.shape[1], 1)
        high = last.max(axis=1, initial=-1) // self.size + 1
        steps = -(-(high - self.low) // self.count)
        return 0, steps.max(initial=0)


def walk(
    table: jax.Array, first: jax.Array, last: jax.Array, left: int | None, block_k: int, size: int
) -> Pages:
    """Pages of rows from the first key that a window lets a query see."""
    if left is not None:
        # a query before every key sees none, and must not pull the start of its row down
        earliest = jnp.where(last < 0, jnp.int32(2**31 - 1), last).min(axis=1, initial=2**31 - 1)
        first = jnp.maximum(first, earliest - left)
    low = jnp.minimum(first // size, max(table.shape[1] - 1, 0))
    count = max(min(block_k // size, table.shape[1]), 1)
    return Pages(table, low, count, size)


def _join(x: jax.Array) -> jax.Array:
    """[b, c, g, w, d] -> [b, g, c * w, d]."""
    batch, count, groups, size, width = x.shape
    return x.transpose(0, 2, 1, 3, 4).reshape(batch, groups, count * size, width)


def write(cache: jax.Array, slots: jax.Array, new: jax.Array, axis: int) -> jax.Array:
    """Pages with new tokens [n, …]; `axis` is that of a page's slots. Slots outside are dropped."""
    num_pages, size = cache.shape[0], max(cache.shape[axis], 1)
    # a scatter drops what lies past the end; a negative page would count from it
    page = jnp.where(slots < 0, num_pages, slots // size)
    place = (page, *(slice(None),) * (axis - 1), slots % size)
    return cache.at[place].set(new, mode="drop")


def interleave(keys: jax.Array, values: jax.Array) -> jax.Array:
    """Tokens [n, 2 g, d] with keys at even and values at odd heads."""
    tokens, groups, width = keys.shape
    return jnp.stack([keys, values], axis=2).reshape(tokens, 2 * groups, width)
