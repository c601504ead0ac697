"""Several arrays as one, that travel together.

XLA for GPUs has one transfer under way at a time: of two that a step starts, the first has to end
before the block at hand is computed, and only the second is hidden behind it.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.xla_utils import manual

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


class Packing:
    """How the arrays of a tree lie in one; None in a tree stays None.

    Arrays of one dtype stay numbers of it, which can be added; others become words of bits.
    """

    def __init__(self, tree: Any):
        leaves, self._form = jax.tree.flatten(tree)
        self._like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        dtypes = {x.dtype for x in leaves}
        # of the smallest size; larger numbers are several words
        self._word = dtypes.pop() if len(dtypes) == 1 else _WORDS[min(d.itemsize for d in dtypes)]

    def join(self, tree: Any) -> jax.Array:
        """The arrays one after the other."""
        leaves = manual.vary_alike(self._form.flatten_up_to(tree))
        words = (jax.lax.bitcast_convert_type(x, self._word) for x in leaves)
        return jnp.concatenate([x.reshape(-1) for x in words])

    def split(self, words: jax.Array) -> Any:
        """The arrays of what `join` made."""
        ends = np.cumsum([self._count(x) for x in self._like])
        parts = jnp.split(words, ends[:-1])
        made = zip(parts, self._like, strict=True)
        return self._form.unflatten([self._array(part, like) for part, like in made])

    def _several(self, like: Any) -> int:
        return like.dtype.itemsize // jnp.dtype(self._word).itemsize

    def _count(self, like: Any) -> int:
        return math.prod(like.shape) * self._several(like)

    def _array(self, words: jax.Array, like: Any) -> jax.Array:
        several = self._several(like)
        shape = like.shape if several == 1 else (*like.shape, several)
        return jax.lax.bitcast_convert_type(words.reshape(shape), like.dtype)
