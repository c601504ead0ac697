"""Token axes cut into chunks, of rows or of packed sequences, and sums of log gates in a chunk.

No sum of gates is a difference of two longer sums: each adds the gates of its own steps only, so
that a weak gate after a strong one keeps all its digits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# exp is 0 long before; a gate of -inf would make nan of 0 * inf in the sums
LOWEST = -1e4


class Chunks:
    """Where tokens [b, t, …] go in [m, b, …, c, …]: m chunks of c tokens, no chunk of two rows."""

    def __init__(self, t: int, size: int, cu_seqlens: jax.Array | None, reverse: bool):
        self.t, self.size, self.reverse = t, size, reverse
        self.sequence = None  # [m], of each chunk; the number of sequences when unused
        if cu_seqlens is None:
            self.count = -(-t // size)
            return
        rows = cu_seqlens.shape[0] - 1
        self.count = t // size + rows if t and rows > 0 else 0
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
        index = (jnp.arange(self.count) - before[mine])[:, None] * size + jnp.arange(size)
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


def each(body: Callable[[Any], Any], xs: Any, at_once: int) -> Any:
    """`body` of each chunk, a number of chunks at once."""
    count = jax.tree.leaves(xs)[0].shape[0]
    if count <= at_once:
        return jax.vmap(body)(xs)
    return jax.lax.map(body, xs, batch_size=None if at_once == 1 else at_once)


class Level(NamedTuple):
    """Sums of gates in blocks of L steps, [.., c / L, L, x]."""

    start: jax.Array  # the block's first step to this one, inclusive
    end: jax.Array  # after this step to the block's end


class Sums(NamedTuple):
    """Sums of the gates [.., c, x] of a chunk, over the steps between two of its tokens."""

    inside: jax.Array  # [.., n, p, p, x] in parts of p: after the second index to the first
    levels: tuple[Level, ...]  # blocks of p, 2p, …, c steps

    @property
    def start(self) -> jax.Array:
        """[.., c, x] the chunk's first step to this one, inclusive."""
        return self.levels[-1].start[..., 0, :, :]

    @property
    def end(self) -> jax.Array:
        """[.., c, x] after this step to the chunk's end."""
        return self.levels[-1].end[..., 0, :, :]

    @property
    def total(self) -> jax.Array:
        """[.., x] the whole chunk."""
        return self.levels[-1].start[..., 0, -1, :]


def sums(gates: jax.Array, part: int, exact: Any) -> Sums:
    """In a part, products with zeros and ones; larger blocks add the total of their other half."""
    *lead, c, x = gates.shape
    gates = jnp.maximum(gates, LOWEST).reshape(*lead, c // part, part, x)

    def add(pattern: np.ndarray) -> jax.Array:
        flat = jnp.asarray(pattern.reshape(-1, part), gates.dtype)
        made = jnp.einsum("iu,...ux->...ix", flat, gates, precision=exact)
        return made.reshape(*gates.shape[:-2], *pattern.shape[:-1], x)

    steps = np.arange(part)
    i, j, u = np.ix_(steps, steps, steps)
    levels = [Level(add(steps[None] <= steps[:, None]), add(steps[None] > steps[:, None]))]
    while levels[-1].start.shape[-2] < c:
        (start, end), totals = levels[-1], halves(levels[-1].start[..., -1:, :])
        (start0, start1), (end0, end1) = halves(start), halves(end)
        levels.append(
            Level(
                jnp.concatenate([start0, start1 + totals[0]], axis=-2),
                jnp.concatenate([end0 + totals[1], end1], axis=-2),
            )
        )
    return Sums(add((j < u) & (u <= i)), tuple(levels))


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Blocks [.., 2m, L, x] as the first and the second ones of each pair."""
    *lead, count, size, width = x.shape
    pairs = x.reshape(*lead, count // 2, 2, size, width)
    return pairs[..., 0, :, :], pairs[..., 1, :, :]
