"""Token axes cut into chunks, of rows or of packed sequences, and the decays inside a chunk.

A decay is the product of the gates of its own steps, never a quotient of two longer products: a
weak gate after a strong one keeps all its digits, and no gate is too strong.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Chunks:
    """Where tokens [b, t, …] go in [m, b, …, c, …]: m chunks of c tokens, no chunk of two rows."""

    def __init__(
        self, t: int, size: int, at_once: int, cu_seqlens: jax.Array | None, reverse: bool
    ):
        self.t, self.size, self.reverse = t, size, reverse
        self.sequence = None  # [m], of each chunk; the number of sequences when unused
        rows = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
        needed = -(-t // size) if rows is None else t // size + rows if t and rows > 0 else 0
        self.at_once = max(min(at_once, needed), 1)
        self.count = -(-needed // self.at_once) * self.at_once
        if cu_seqlens is None or rows is None:
            return
        if not self.count:
            self.sequence = jnp.zeros(0, jnp.int32)
            return
        starts, ends = (jnp.clip(x, 0, t) for x in (cu_seqlens[:-1], cu_seqlens[1:]))
        lengths = jnp.maximum(ends - starts, 0)
        used = jnp.cumsum(-(-lengths // size))  # chunks up to each sequence
        before = used + lengths // -size
        self.sequence = jnp.searchsorted(used, jnp.arange(self.count), side="right").astype(
            jnp.int32
        )
        mine = jnp.minimum(self.sequence, rows - 1)
        self.first = jnp.arange(self.count) == before[mine]
        self.last = jnp.arange(self.count) == used[mine] - 1
        # [m * c] token of each place
        index = (jnp.arange(self.count) - before[mine])[:, None] * size + jnp.arange(size)[None]
        real = (index < lengths[mine, None]) & (self.sequence < rows)[:, None]
        index = lengths[mine, None] - 1 - index if reverse else index
        self.token = jnp.where(real, starts[mine, None] + index, t).reshape(-1)
        # [t] place of each token
        place = jnp.full(t + 1, self.count * size)
        self.place = place.at[self.token].set(jnp.arange(self.count * size))[:t]

    def cut(self, x: jax.Array) -> jax.Array:
        """[b, t, h, x] as [m, b, h, c, x], zeros where no token is."""
        batch, _, heads, width = x.shape
        if self.sequence is not None and self.count:
            x = jnp.take(x, self.token, axis=1, mode="fill", fill_value=0)
        else:
            x = jnp.flip(x, 1) if self.reverse else x
            x = x[:, : self.count * self.size]  # none of a packed row without sequences
            missing = self.count * self.size - x.shape[1]
            x = jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0)))
        x = x.reshape(batch, self.count, self.size, heads, width)
        return x.transpose(1, 0, 3, 2, 4)

    def join(self, x: jax.Array) -> jax.Array:
        """The inverse of `cut`; tokens outside every sequence give zero."""
        _, batch, heads, _, width = x.shape
        x = x.transpose(1, 0, 3, 2, 4).reshape(batch, self.count * self.size, heads, width)
        if self.sequence is None:
            x = x[:, : self.t]
            return jnp.flip(x, 1) if self.reverse else x
        if not self.count:
            return jnp.zeros((batch, self.t, heads, width), x.dtype)
        return jnp.take(x, self.place, axis=1, mode="fill", fill_value=0)


def scan(body: Callable, carry: Any, xs: Any, reverse: bool = False) -> tuple[Any, Any]:
    """`lax.scan`; of one step, no loop."""
    if jax.tree.leaves(xs)[0].shape[0] != 1:
        return jax.lax.scan(body, carry, xs, reverse=reverse)
    carry, made = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], made)


class Decays(NamedTuple):
    """Decays [.., c / L, L, x] in blocks of L steps; a width x of 1 serves every element."""

    start: jax.Array  # of the block's first step to this one, inclusive
    end: jax.Array  # of the steps after this one to the block's end


def decays(gates: jax.Array) -> tuple[Decays, ...]:
    """From log gates [.., c, x], the decays in blocks of 1, 2, 4, …, c steps."""
    start = jnp.exp(gates)[..., :, None, :]
    levels = [Decays(start, jnp.ones_like(start))]
    while levels[-1].start.shape[-3] > 1:
        (start0, start1), (end0, end1) = (halves(x) for x in levels[-1])
        levels.append(
            Decays(
                jnp.concatenate([start0, start1 * start0[..., -1:, :]], axis=-2),
                jnp.concatenate([end0 * start1[..., -1:, :], end1], axis=-2),
            )
        )
    return tuple(levels)


def gate_gradients(
    top: Decays, total: jax.Array, inner: Sequence[tuple[jax.Array, jax.Array]]
) -> jax.Array:
    """Gradients of log gates from those of the logs of decays: the transpose of `decays`.

    `top` and `total` are those of the chunk; `inner`, for blocks of 1, 2, … steps, those of
    `start` in second and of `end` in first halves. All are added, none is taken from another.
    """
    start, end = top
    while (size := start.shape[-2]) > 1:
        (start0, start1), (end0, end1) = (
            (x[..., : size // 2, :], x[..., size // 2 :, :]) for x in (start, end)
        )
        # every decay of a second half's token from the start has all of the first half in it
        total = _interleave(total + start1.sum(axis=-2), total + end0.sum(axis=-2), -2)
        level = (size // 2).bit_length() - 1
        if level < len(inner):
            start1, end0 = start1 + inner[level][0], end0 + inner[level][1]
        start, end = _interleave(start0, start1, -3), _interleave(end0, end1, -3)
    return start[..., 0, :] + total


def _interleave(first: jax.Array, second: jax.Array, axis: int) -> jax.Array:
    both = jnp.stack([first, second], axis=axis)  # [.., n, 2, ..]
    place = both.ndim + axis
    return both.reshape(*both.shape[: place - 1], -1, *both.shape[place + 1 :])


def pairs(levels: Sequence[Decays]) -> jax.Array:
    """Decays [.., c, c] between tokens for gates of width 1; 0 to an earlier token."""
    made = jnp.ones_like(levels[0].start)
    for start, end in levels[:-1]:
        first, second = halves(made)
        below = halves(start)[1] * halves(end)[0].swapaxes(-1, -2)
        made = jnp.concatenate(
            [
                jnp.concatenate([first, jnp.zeros_like(first)], axis=-1),
                jnp.concatenate([below, second], axis=-1),
            ],
            axis=-2,
        )
    return made[..., 0, :, :]


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Blocks [.., 2m, L, x] as the first and the second ones of each pair."""
    *lead, count, size, width = x.shape
    both = x.reshape(*lead, count // 2, 2, size, width)
    return both[..., 0, :, :], both[..., 1, :, :]
