"""The pairs (token, block) of a selection, sorted by block and cut into tiles of one block each."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._xla._blocks import loops


class Schedule(NamedTuple):
    """Tiles of tokens that selected one block; `ends` counts the tiles up to each block's last."""

    tokens: jax.Array  # [tiles * size], past the last token where a tile is not full
    ends: jax.Array  # [n]
    size: int

    @property
    def count(self) -> jax.Array:
        return self.ends[-1]

    def tile(self, i: Any) -> tuple[jax.Array, jax.Array]:
        """Tokens [size] and block of tile i."""
        block = (self.ends <= i).sum(dtype=jnp.int32)
        return jax.lax.dynamic_slice_in_dim(self.tokens, i * self.size, self.size), block


def make(mask: jax.Array, size: int, most: int) -> Schedule:
    """The schedule of a selection [t, n] of at most `most` blocks a token."""
    t, n = mask.shape
    chosen = mask.T
    tiles = -(-chosen.sum(axis=1, dtype=jnp.int32) // size)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    # every block may leave one tile that is not full
    room = (t * min(most, n) // size + n) * size
    place = (ends - tiles)[:, None] * size + jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - 1
    place = jnp.where(chosen, place, room).reshape(-1)
    token = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (n, t)).reshape(-1)
    tokens = loops.vary_like(jnp.full(room, t, jnp.int32), mask)
    return Schedule(tokens.at[place].set(token, mode="drop"), ends, size)


def rows(x: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of `x` for the tokens of a tile; any row where the tile is not full."""
    return x.at[tokens].get(mode="clip")


def put(x: jax.Array, tokens: jax.Array, values: jax.Array) -> jax.Array:
    """Replaces the rows of the tokens of a tile."""
    return x.at[tokens].set(values, mode="drop", unique_indices=True)


def add(x: jax.Array, tokens: jax.Array, values: jax.Array) -> jax.Array:
    """Adds to the rows of the tokens of a tile."""
    return x.at[tokens].add(values, mode="drop", unique_indices=True)
