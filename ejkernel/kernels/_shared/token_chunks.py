"""Token axes cut into chunks, of rows or of packed sequences."""

import jax
import jax.numpy as jnp

from ejkernel.xla_utils import search


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
        used = jnp.cumsum(-(-lengths // size), dtype=jnp.int32)  # chunks up to each sequence
        before = used + lengths // -size
        chunk, inside = (jnp.arange(n, dtype=jnp.int32) for n in (self.count, size))
        self.sequence = search.count_before(used, chunk)
        mine = jnp.minimum(self.sequence, rows - 1)
        self.first = chunk == before[mine]
        self.last = chunk == used[mine] - 1
        # [m * c] token of each place
        index = (chunk - before[mine])[:, None] * size + inside[None]
        real = (index < lengths[mine, None]) & (self.sequence < rows)[:, None]
        index = lengths[mine, None] - 1 - index if reverse else index
        self.token = jnp.where(real, starts[mine, None] + index, t).reshape(-1)
        # [t] place of each token
        places = jnp.arange(self.count * size, dtype=jnp.int32)
        self.place = jnp.full(t + 1, places.size, jnp.int32).at[self.token].set(places)[:t]

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
