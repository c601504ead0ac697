"""Scans over chunks of tokens, and the decays inside a chunk.

A decay is the product of the gates of its own steps, never a quotient of two longer products: a
weak gate after a strong one keeps all its digits, and no gate is too strong.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


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
