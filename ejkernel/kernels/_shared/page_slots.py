"""Where the tokens of a serving step go in a paged cache, and how the cache holds them."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.xla_utils import dtypes, search


def slots(
    starts: jax.Array,
    lens: jax.Array,
    count: jax.Array,
    tables: jax.Array,
    tokens: int,
    pages: tuple[int, int],
) -> jax.Array:
    """The slot of each packed token, [tokens]; -1 for tokens that have no place in the cache.

    Args:
      starts: First token of each sequence, and the end of the last.
      lens: Length of each sequence with this step's tokens, which are its last.
      count: How many sequences there are; the rest of the arrays means nothing.
      tables: Pages of each sequence in order, [sequences, blocks]; a page that does not exist has
        no slots.
      tokens: Number of tokens.
      pages: Number of pages, and slots of each.
    """
    (num_pages, size), (rows, blocks) = pages, tables.shape
    if 0 in (num_pages, size, rows, blocks, tokens):
        return jnp.full(tokens, -1, jnp.int32)
    owner, position = places(starts, jnp.clip(lens, 0, blocks * size), count, tokens)
    page = tables[owner, jnp.maximum(position, 0) // size]
    real = (position >= 0) & (page >= 0) & (page < num_pages)
    return jnp.where(real, page * size + position % size, -1)


def places(
    starts: jax.Array, lens: jax.Array, count: jax.Array, tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Sequence and position of each packed token, [tokens]; position -1 for tokens of none.

    A sequence's tokens are the last of its length; only the first `count` sequences have any.
    """
    token = jnp.arange(tokens, dtype=jnp.int32)
    starts = jnp.clip(starts, 0, tokens)
    index = jnp.arange(lens.shape[0], dtype=jnp.int32)
    # sequences that do not count may start anywhere
    ends = jnp.where(index < count, starts[1:], tokens + 1)
    owner = search.count_before(ends, token)
    real = (owner < jnp.minimum(count, lens.shape[0])) & (token >= starts[0])
    owner = jnp.minimum(owner, lens.shape[0] - 1)
    position = lens[owner] - (starts[owner + 1] - token)
    return owner, jnp.where(real & (position >= 0), position, -1)


def narrow(new: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    """Tokens [n, g, d] as a cache of a dtype holds them: divided by the scale, then rounded.

    What is too large for int8 or float8 becomes the largest that fits.
    """
    new = new.astype(dtypes.wide(new.dtype))
    if scale is not None:
        new = new / scale.astype(new.dtype)[None, :, None]
    if jnp.issubdtype(dtype, jnp.integer):
        new, limits = jnp.round(new), jnp.iinfo(dtype)
    else:
        limits = jnp.finfo(dtype)
    if jnp.dtype(dtype).itemsize == 1:
        new = jnp.clip(new, float(limits.min), float(limits.max))
    return new.astype(dtype)
