"""The blocks that each row and column of a mask visits, and which of them need no mask.

A traced mask gives lists on the device. Lists of a known mask are made by NumPy and kept, so that
a call like an earlier one finds constants.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _spec
from ejkernel.kernels._triton._blocks import block_lists

_Arrays = tuple[np.ndarray, np.ndarray]


class _Kept:
    """The lists of known masks that were asked for last, at most so many and of so many bytes."""

    def __init__(self, most: int, most_bytes: int):
        self.most, self.most_bytes, self.bytes = most, most_bytes, 0
        self._found: collections.OrderedDict[Any, _Arrays] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Any, make: Callable[[], _Arrays]) -> _Arrays:
        if key in self._found:
            self._found.move_to_end(key)
            return self._found[key]
        made = make()
        if _size(made) > self.most_bytes:
            return made
        self._found[key] = made
        self.bytes += _size(made)
        while len(self) > self.most or self.bytes > self.most_bytes:
            _, oldest = self._found.popitem(last=False)
            self.bytes -= _size(oldest)
        return made


def _size(arrays: _Arrays) -> int:
    return sum(x.nbytes for x in arrays)


# lists of 16 heads with 1024 x 1024 blocks take 64 MiB
_known = _Kept(most=32, most_bytes=256 << 20)


@dataclasses.dataclass(frozen=True)
class _Side:
    """Queries or keys in blocks; arrays are [b or 1, blocks]."""

    first: Any  # position of the first token
    last: Any
    whole: Any  # no token is missing, and none is padding
    low: Any = None  # ends of the segment ids
    high: Any = None


def of_keys(args: Any) -> block_lists.Lists:
    """For each block of queries, its blocks of keys."""
    return _lists(args, by_keys=False)


def of_queries(args: Any) -> block_lists.Lists:
    """For each block of keys, the blocks of queries that see it."""
    return _lists(args, by_keys=True)


def _lists(args: Any, by_keys: bool) -> block_lists.Lists:
    mask, ids = _spec.known(args.sparsity_mask), (args.q_segment_ids, args.kv_segment_ids)
    if mask is None or ids[0] is not None:
        blocks, counts = _sorted(*_kinds(args, args.sparsity_mask, ids, jnp), by_keys, jnp)
    else:
        lengths = (args.query.shape[1], args.key.shape[1], args.block_size)
        digest = hashlib.sha256(mask.tobytes()).digest()
        key = (digest, mask.shape, lengths, args.sliding_window, by_keys)
        make = lambda: _sorted(*_kinds(args, mask, ids, np), by_keys, np)
        blocks, counts = _known.get(key, make)
    lead_b, lead_h, rows, width = blocks.shape
    return block_lists.Lists(
        blocks=jnp.asarray(blocks),
        counts=jnp.asarray(counts),
        width=width,
        batch=0 if lead_b == 1 else lead_h * rows,
        head=0 if lead_h == 1 else rows,
        UNIT=args.block_size,
    )


def _kinds(args: Any, mask: Any, ids: Any, xp: Any) -> tuple[Any, Any]:
    """Which blocks [b or 1, h or 1, nq, nk] have visible pairs, and which show all of them."""
    t, s, size = args.query.shape[1], args.key.shape[1], args.block_size
    q, k = _side(t, s - t, ids[0], size, xp), _side(s, 0, ids[1], size, xp)
    rows, cols = (lambda x: x[:, :, None]), (lambda x: x[:, None, :])
    left, right = (None if limit is None else min(limit, t + s) for limit in args.sliding_window)
    full = rows(q.whole) & cols(k.whole)
    seen = xp.ones((1, 1, 1), bool)
    if left is not None:
        seen = seen & (cols(k.last) >= rows(q.first) - left)
        full = full & (cols(k.first) >= rows(q.last) - left)
    if right is not None:
        seen = seen & (cols(k.first) <= rows(q.last) + right)
        full = full & (cols(k.last) <= rows(q.first) + right)
    if q.low is not None:
        seen = seen & (rows(q.low) <= cols(k.high)) & (cols(k.low) <= rows(q.high))
        same = (rows(q.low) == rows(q.high)) & (cols(k.low) == cols(k.high))
        full = full & same & (rows(q.low) == cols(k.low))
    seen = mask & seen[:, None]
    return seen, seen & full[:, None]


def _side(count: int, offset: int, ids: Any, size: int, xp: Any) -> _Side:
    start = np.arange(0, count, size, dtype=np.int32)[None]
    stop = np.minimum(start + size, count)
    side = _Side(start + offset, stop - 1 + offset, stop - start == size)
    if ids is None:
        return side
    padded = xp.pad(ids, ((0, 0), (0, start.shape[1] * size - count)), constant_values=-1)
    padded = padded.reshape(ids.shape[0], start.shape[1], size)
    real, big = padded >= 0, np.iinfo(np.int32)
    return _Side(
        side.first,
        side.last,
        real.all(axis=2),
        xp.where(real, padded, big.max).min(axis=2),
        xp.where(real, padded, big.min).max(axis=2),
    )


def _sorted(seen: Any, full: Any, by_keys: bool, xp: Any) -> tuple[Any, Any]:
    """Lists [b or 1, h or 1, rows, width] and counts [.., 2], full blocks first."""
    if by_keys:
        seen, full = seen.swapaxes(2, 3), full.swapaxes(2, 3)
    width = seen.shape[3]
    kind = xp.where(full, 0, xp.where(seen, 1, 2)).astype(np.int32)
    # one number for kind and place: a sort of one array
    places = xp.sort(kind * width + np.arange(width, dtype=np.int32)[None, None, None], axis=3)
    counts = xp.stack([x.sum(axis=3, dtype=np.int32) for x in (full, seen)], axis=3)
    return places % np.int32(max(width, 1)), counts
