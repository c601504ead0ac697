"""The listed blocks of a call: which come next in a row or a column, and loops over them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._xla._blocks import loops
from ejkernel.kernels._xla._blocks.logits import Blocks, Pairs, Tile


class ListedPairs(Pairs):
    """Pairs of a call whose tiles are the blocks of a mask.

    A mask that differs from head to head makes every query head a group of its own; `share` of
    them then read one key head.
    """

    def __init__(self, args: Any, blocks: Blocks):
        batch, s, num_kv_heads, d = args.key.shape
        per_head = args.sparsity_mask.shape[1] > 1
        self.share = args.query.shape[2] // num_kv_heads if per_head else 1
        grouped = jax.ShapeDtypeStruct((batch, s, num_kv_heads * self.share, d), args.key.dtype)
        super().__init__(dataclasses.replace(args, key=grouped), blocks)
        # a block that is listed and that no other mask empties; [b or 1, h or 1, nq, nk]
        listed = args.sparsity_mask & jnp.asarray(self.seen)[:, None]
        if listed.shape[0] > 1:
            listed = listed.reshape(-1, blocks.b, *listed.shape[1:]).any(axis=1)
        self.listed = listed
        # every pair of a listed block is seen: nothing to hide, and no garbage to keep out
        self.whole = not self.ids and self.mask is None and args.sliding_window == (None, None)

    def q_block(self, x: jax.Array, at: Tile) -> jax.Array:
        return _cut(x, (at.b, at.g, 0, at.i), (*self.blocks[:2], self.repeat, self.blocks.q))

    def k_block(self, x: jax.Array, at: Tile) -> jax.Array:
        return _cut(x, (at.b, at.g // self.share, at.j), (*self.blocks[:2], self.blocks.k))

    def key_lists(self) -> jax.Array:
        """For each block of queries, the next listed block of keys; see `over`."""
        return _following(self.listed)

    def query_lists(self) -> jax.Array:
        """For each block of keys, the next block of queries that lists it."""
        return _following(self.listed.swapaxes(2, 3))


def _cut(x: jax.Array, index: tuple[Any, ...], sizes: tuple[int, ...]) -> jax.Array:
    """A block of the leading axes, in one slice: a chain of them copies more."""
    rest = x.ndim - len(index)
    starts = [jnp.int32(i * n) for i, n in zip(index, sizes, strict=True)] + [jnp.int32(0)] * rest
    return jax.lax.dynamic_slice(x, starts, (*sizes, *x.shape[len(index) :]))


def _following(listed: jax.Array) -> jax.Array:
    """[.., n] -> [.., n + 1]: the first listed index at or after each, n when there is none."""
    count = listed.shape[-1]
    index = jnp.where(listed, jnp.arange(count, dtype=jnp.int32), jnp.int32(count))
    index = jnp.pad(index, [(0, 0)] * (listed.ndim - 1) + [(0, 1)], constant_values=count)
    return jax.lax.cummin(index, axis=listed.ndim - 1, reverse=True)


def over(
    lists: jax.Array, at: tuple[Any, Any, Any], step: Callable[[Any, Any], Any], state: Any
) -> Any:
    """Folds `step(i, state)` over the list of one row: batch rows, heads, block."""
    b, g, row = at
    lists = loops.take(loops.take(lists, b, 1, 0), g, 1, 1)
    lists = loops.take(lists, row, 1, 2)[0, 0, 0]
    end = lists.shape[0] - 1

    def body(carry: Any) -> Any:
        i, state = carry
        return lists[i + 1], step(i, state)

    return jax.lax.while_loop(lambda carry: carry[0] < end, body, (lists[0], state))[1]
