"""Who holds which tokens, and what a block of queries sees of a block of keys."""

import dataclasses
import enum
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._specs.ring_attention import RingAttentionArgs, heads_divide

# A ring hides the rotation of keys when a key byte meets enough queries: at 2 bytes a number, one
# floating-point operation for each query and query head of a key head. An estimate from nominal
# compute and link rates of current accelerators, not measured.
_LONG_SHARD = 1024


class Kind(enum.IntEnum):
    """What the masks leave of a pair of chunks."""

    SKIP = 0
    FULL = 1  # every pair is seen
    ALIGNED = 2  # as in a call of its own, whose last query meets its last key
    SHIFTED = 3  # by positions


def strategy(args: RingAttentionArgs) -> str:
    """The strategy of a call; what "auto" means."""
    if args.strategy != "auto":
        return args.strategy
    _, t, num_q_heads, _ = args.query.shape
    if args.devices == 1:
        return "ring"
    if args.dropout_prob and heads_divide(args):
        return "ulysses"
    repeat = num_q_heads // args.key.shape[2]
    if args.sliding_window[0] is not None or t * repeat >= _LONG_SHARD:
        return "ring"
    return "ulysses" if heads_divide(args) else "allgather"


def positions(args: RingAttentionArgs, index: Any) -> jax.Array:
    """Positions [1, t] of the queries of device `index`, in the order in which it stores them."""
    plan = Plan.of(args)
    starts = (plan.q_start(plan.chunk(index, half)) for half in range(plan.halves))
    return jnp.concatenate([start + np.arange(plan.t, dtype=np.int32) for start in starts])[None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Chunks of consecutive tokens: one a device, or two in zigzag order."""

    devices: int
    halves: int
    t: int  # queries in a chunk
    s: int  # keys in a chunk
    window: tuple[int | None, int | None]
    distances: bool  # scores depend on positions

    @classmethod
    def of(cls, args: RingAttentionArgs) -> "Plan":
        # the zigzag order of one device is the plain one
        halves = 2 if args.layout == "zigzag" and args.devices > 1 else 1
        return cls(
            devices=args.devices,
            halves=halves,
            t=args.query.shape[1] // halves,
            s=args.key.shape[1] // halves,
            window=args.sliding_window,
            distances=args.alibi_slopes is not None,
        )

    def chunk(self, device: Any, half: Any) -> Any:
        """The chunk that is a device's first or second half."""
        return device + half * (2 * self.devices - 1 - 2 * device)

    def q_start(self, chunk: Any) -> Any:
        """Position of a chunk's first query: the last query of all is at the last key."""
        return chunk * self.t + self.devices * self.halves * (self.s - self.t)

    def k_start(self, chunk: Any) -> Any:
        return chunk * self.s

    def kind(self, q_chunk: Any, k_chunk: Any) -> Any:
        """The kind of a pair of chunks, on NumPy or JAX values."""
        xp = jnp if isinstance(q_chunk, jax.Array) else np
        q_low, k_low = self.q_start(q_chunk), self.k_start(k_chunk)
        q_high, k_high = q_low + self.t - 1, k_low + self.s - 1
        left, right = self.window
        nothing, everything = xp.zeros_like(q_low, bool), xp.ones_like(q_low, bool)
        # written as differences: a window may be larger than every position
        if right is not None:
            nothing |= k_low - q_high > right
            everything &= k_high - q_low <= right
        if left is not None:
            nothing |= q_low - k_high > left
            everything &= q_high - k_low <= left
        if self.distances:
            everything = xp.zeros_like(everything)
        aligned = q_low - k_low == self.s - self.t
        seen = xp.where(aligned, Kind.ALIGNED.value, Kind.SHIFTED.value)
        seen = xp.where(everything, Kind.FULL.value, seen)
        return xp.where(nothing, Kind.SKIP.value, seen).astype(np.int32)

    @functools.cached_property
    def _kinds(self) -> np.ndarray:
        """Kinds [steps, devices, halves, halves] of all that ever meets."""
        step, device, a, b = np.ix_(*map(np.arange, (*2 * [self.devices], *2 * [self.halves])))
        source = (device - step) % self.devices
        shape = (self.devices, self.devices, self.halves, self.halves)
        q_chunk, k_chunk = (
            np.broadcast_to(x, shape) for x in (self.chunk(device, a), self.chunk(source, b))
        )
        return self.kind(q_chunk, k_chunk)

    @functools.cached_property
    def last(self) -> int:
        """The last step at which some device sees something."""
        steps = np.flatnonzero((self._kinds != Kind.SKIP).any(axis=(1, 2, 3)))
        return int(steps[-1]) if steps.size else 0

    def kinds(self, steps: Iterable[int] | None = None) -> Sequence[Kind]:
        """The kinds that occur at some steps, or at any."""
        chosen = range(self.last + 1) if steps is None else steps
        return [Kind(kind) for kind in np.unique(self._kinds[list(chosen)])]
