"""Device code that the kernels of native sparse attention share.

A tile has the query heads of one key head for a few tokens: row m is head m % PADDED of token
m // PADDED, where PADDED is the number of heads, made a power of two.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import addresses, softmax


class Sparse(NamedTuple):
    """The call: lengths, heads, layouts and scores."""

    num: Any  # tokens
    HEADS: tl.constexpr
    KEY_HEADS: tl.constexpr
    GROUP: tl.constexpr  # query heads to a key head
    PADDED: tl.constexpr
    SIZE: tl.constexpr  # tokens of a block
    key_rows: Any  # `addresses.Rows` of key and of means of keys
    value_rows: Any
    SCALE: tl.constexpr
    FACTOR: tl.constexpr  # times logits are natural units: SCALE for bare dot products, else 1
    PRECISION: tl.constexpr


class Rows(NamedTuple):
    """The rows of a tile; vectors are [BT * PADDED]."""

    first: Any  # the first row of the batch and key head in [b, t, h]
    token: Any
    head: Any  # in the group
    real: Any


@triton.jit
def rows_of(sparse, batch, i_g, token, real, M: tl.constexpr):
    """The rows of the tokens of a tile, which are given for each row."""
    head = tl.arange(0, M) % sparse.PADDED
    first = batch * sparse.num * sparse.HEADS + i_g * sparse.GROUP
    return Rows(first, token, head, real & (token < sparse.num) & (head < sparse.GROUP))


@triton.jit
def load_rows(base, rows, sparse, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """A tile [M, PADDED] of an array [b, t, h, width]; zeros in rows that are not real."""
    o_d = tl.arange(0, PADDED)
    row = rows.token.to(tl.int64) * sparse.HEADS + rows.head
    p = base + (rows.first + row)[:, None] * WIDTH + o_d[None, :]
    return tl.load(p, mask=rows.real[:, None] & (o_d < WIDTH)[None, :], other=0.0)


@triton.jit
def store_rows(base, rows, sparse, tile, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    o_d = tl.arange(0, PADDED)
    row = rows.token.to(tl.int64) * sparse.HEADS + rows.head
    p = base + (rows.first + row)[:, None] * WIDTH + o_d[None, :]
    inside = rows.real[:, None] & (o_d < WIDTH)[None, :]
    tl.store(p, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_row_sums(base, rows, sparse):
    """A vector [M] of an array [b, t, h]; zeros in rows that are not real."""
    p = base + rows.first + rows.token.to(tl.int64) * sparse.HEADS + rows.head
    return tl.load(p, mask=rows.real, other=0.0)


@triton.jit
def logits(dots, sparse):
    """Scores in units of 1 / FACTOR."""
    if sparse.FACTOR == 1.0:
        return dots * sparse.SCALE
    else:
        return dots


@triton.jit
def weights(x, seen, b_lse, sparse):
    """Softmax weights from the logsumexp of their rows, which is expanded; 0 if not seen."""
    e = softmax.exponents(tl.where(seen, x, float("-inf")), b_lse, sparse.FACTOR, True)
    return tl.math.exp2(e)


@triton.jit
def load_keys(base, rows, start, stop, BK: tl.constexpr, EVEN: tl.constexpr):
    """A tile [BK, PADDED] of keys from `start` on; zeros from `stop` on, unless EVEN."""
    return addresses.load_tile(base, rows, start, stop, None, BK, EVEN == 0)
