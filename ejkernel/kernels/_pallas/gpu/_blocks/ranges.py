"""Which blocks of keys a run of query rows sees, under causal masks, windows and lengths.

The functions take ints, NumPy arrays or traced values alike.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax


class Blocks(NamedTuple):
    """Blocks of keys, visited from `top` - 1 down to `bottom`; there is one at least.

    Those from `edge` on take a mask: every row that sees a key sees one of them. Those below
    `inner` take the mask of the window's left end. The others are visible to all rows.
    """

    top: Any
    edge: Any
    inner: Any
    bottom: Any


@dataclasses.dataclass(frozen=True)
class Reach:
    """Which keys a query sees: from its position - left to its position + right."""

    num_q: int
    num_k: int
    left: int | None
    right: int | None
    block_k: int

    @property
    def offset(self) -> int:
        """The position of query 0: queries end where keys end."""
        return self.num_k - self.num_q

    @property
    def num_blocks(self) -> int:
        return -(-self.num_k // self.block_k)

    @property
    def is_ragged(self) -> bool:
        """Whether the last block of keys reaches beyond the last key."""
        return self.num_k % self.block_k != 0

    def blocks(self, first: Any, last: Any) -> Blocks:
        """The blocks that rows `first` to `last`, both included, see together."""
        xp = np if isinstance(first, int | np.integer | np.ndarray) else jnp
        size = self.block_k
        block = lambda key: _quotient(xp.maximum(key, 0), size)
        low, high = first + self.offset, xp.minimum(last, self.num_q - 1) + self.offset
        bottom = inner = xp.zeros_like(first)
        if self.left is not None:
            bottom = xp.minimum(block(low - self.left), self.num_blocks - 1)
            inner = block(high - self.left + size - 1)
        top = xp.full_like(first, self.num_blocks)
        if self.right is not None:
            top = xp.minimum(block(high + self.right) + 1, top)
        top = xp.maximum(top, bottom + 1)  # rows that see nothing visit one block, masked
        edge = top - 1
        if self.right is not None:
            edge = xp.minimum(block(low + self.right), edge)
        edge = xp.maximum(edge, bottom)
        return Blocks(top, edge, xp.clip(inner, bottom, edge), bottom)

    def sees(self, rows: Any, keys: Any) -> Any:
        """Whether rows see keys, for arrays of indices of one shape; None: all do."""
        limits = []
        if (last := self._last(rows)) is not None:
            limits.append(keys <= last)
        if self.left is not None:
            limits.append(self.sees_left(rows, keys))
        return functools.reduce(operator.and_, limits) if limits else None

    def sees_at_edges(self, rows: Any, keys: Any, count: int) -> Any:
        """The same for keys of blocks from `edge` on, of a run of `count` rows.

        A window that is wide enough has no left end there: the first of these keys is at most a
        block before the run, or before the last key.
        """
        last = self._last(rows)
        if last is None or self.left is None:
            return self.sees(rows, keys)
        is_wide = self.left + min(self.right or 0, 0) >= self.block_k + count - 2
        return keys <= last if is_wide else self.sees(rows, keys)

    def _last(self, rows: Any) -> Any:
        """The last key that rows see, of two limits the lower; None: there is none."""
        xp = np if isinstance(rows, np.ndarray) else jnp
        end = self.num_k - 1
        if self.right is None:
            return xp.full_like(rows, end) if self.is_ragged else None
        last = rows + (self.offset + self.right)
        # rows behind the last query may see what they like
        return xp.minimum(last, end) if self.is_ragged and self.right > 0 else last

    def sees_left(self, rows: Any, keys: Any) -> Any:
        """The same for keys that the other limits leave visible; there is a limit to the left."""
        assert self.left is not None
        return keys >= rows + (self.offset - self.left)


def _quotient(x: Any, size: int) -> Any:
    """x // size of numbers that are not negative."""
    return (
        x // size if isinstance(x, int | np.integer | np.ndarray) else lax.div(x, jnp.int32(size))
    )
