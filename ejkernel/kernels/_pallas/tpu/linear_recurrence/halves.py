"""Decays in blocks of 1, 2, 4, … steps of a chunk, and the gradients of the gates in them.

A decay is the product of the gates of its own steps, never a quotient of longer products. Tiles are
[n, 8, w], one register of rows after the other: blocks of at least 8 rows are whole registers, and
smaller ones trade rows inside a register.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

_ROWS = 8


class Side(NamedTuple):
    """Decays of a chunk of c steps along one side of the state."""

    start: jax.Array  # [c, w], of the chunk's first step to this one, inclusive
    end: jax.Array  # [c, w], of the steps after this one to the chunk's end
    total: jax.Array  # [1, w]


def sizes(c: int) -> list[int]:
    """Lengths of the halves that meet in a chunk."""
    return [2**i for i in range(c.bit_length() - 1)]


def is_second(size: int, c: int, width: int) -> jax.Array:
    """Rows in the second half of their block of two halves, [c, w]."""
    return jax.lax.broadcasted_iota(jnp.int32, (c, width), 0) & size != 0


def decays(gates: jax.Array) -> tuple[Side, list[jax.Array]]:
    """Of log gates [c, w]: the chunk's, and for halves of each size [c, w].

    The latter are those from the middle of two halves to a row of the second, and from a row of the
    first to the middle.
    """
    c, width = gates.shape
    start = total = _rows(jnp.exp(gates))
    end = jnp.ones_like(start)
    levels = []
    for size in sizes(c):
        if size < _ROWS:
            second = _second(size, start)
            levels.append(jnp.where(second, start, end))
            other = _other(total, size)
            start = jnp.where(second, start * other, start)
            end = jnp.where(second, end, end * other)
            total = total * other
        else:
            (start0, start1), (end0, end1) = _halves(start, size), _halves(end, size)
            total0, total1 = _halves(total, size)
            levels.append(_join(end0, start1))
            start, end = _join(start0, start1 * total0), _join(end0 * total1, end1)
            total = _join(total0 * total1, total0 * total1)
    side = Side(start.reshape(c, width), end.reshape(c, width), total[0, :1])
    return side, [x.reshape(c, width) for x in levels]


def gate_gradients(top: Side, inner: Sequence[jax.Array]) -> jax.Array:
    """Of log gates [c, w], from gradients of the logs of all that `decays` returns.

    The transpose of `decays`: sums only, so that a strong gate costs its neighbours no digits.
    """
    c, width = top.start.shape
    start, end = _rows(top.start), _rows(top.end)
    total = jnp.broadcast_to(top.total[None], start.shape)
    for size, level in reversed(list(zip(sizes(c), inner, strict=True))):
        level = _rows(level)
        if size < _ROWS:
            second = _second(size, start)
            part = jnp.where(second, start, end)
            for step in sizes(size):
                part = part + _other(part, step)
            total = total + _other(part, size)
            start = jnp.where(second, start + level, start)
            end = jnp.where(second, end, end + level)
        else:
            (start0, start1), (end0, end1) = _halves(start, size), _halves(end, size)
            (total0, total1), (level0, level1) = _halves(total, size), _halves(level, size)
            total = _join(total0 + _row_sums(start1), total1 + _row_sums(end0))
            start, end = _join(start0, start1 + level1), _join(end0 + level0, end1)
    return (start + total).reshape(c, width)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, _ROWS, x.shape[-1])


def _second(size: int, like: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, like.shape, 1) & size != 0


def _other(x: jax.Array, size: int) -> jax.Array:
    """The row as far into the other half, for halves inside a register."""
    later = pltpu.roll(x, _ROWS - size, 1)
    if 2 * size == _ROWS:
        return later
    return jnp.where(_second(size, x), pltpu.roll(x, size, 1), later)


def _halves(x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Whole registers: [m, r, 8, w] of first and of second halves."""
    both = x.reshape(-1, 2, size // _ROWS, *x.shape[1:])
    return both[:, 0], both[:, 1]


def _join(first: jax.Array, second: jax.Array) -> jax.Array:
    both = jnp.concatenate([first[:, None], second[:, None]], axis=1)
    return both.reshape(-1, *first.shape[2:])


def _row_sums(x: jax.Array) -> jax.Array:
    """The sum over all rows of a block, in each of them."""
    part = x.sum(axis=1)  # [m, 8, w]
    for size in sizes(_ROWS):
        part = part + pltpu.roll(part, size, 1)
    return jnp.broadcast_to(part[:, None], x.shape)
