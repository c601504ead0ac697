"""Keys and values in pages: which page holds a key, and tiles of rows out of several pages.

The element of column c in slot w of page p, for one head, is at p * page + w * SLOT + c from that
head's base: the layouts [p, g, w, d], [p, w, 2 g, d] and [p, w, d] differ in strides alone. Keys
that are not paged, [b, s, g, d], are pages of s slots, one a sequence, without a table.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import next_power_of_2


class Table(NamedTuple):
    """Which page holds which keys of a sequence."""

    ids: Any  # int32 [sequences, blocks]; None: page i holds all keys of sequence i
    blocks: Any  # None where there are no ids
    pages: Any  # how many the cache has; ids are clamped to them
    SIZE: tl.constexpr  # slots of a page


class Rows(NamedTuple):
    """How the rows of one head lie in pages."""

    page: Any  # elements between two pages
    SLOT: tl.constexpr  # elements between two slots of a page
    HEAD: tl.constexpr  # elements between two heads
    WIDTH: tl.constexpr
    PADDED: tl.constexpr  # columns of a tile: a power of two, at least WIDTH


def table(ids: Any, pages: int, size: int) -> Table:
    """The table of a call, whose ids are [sequences, blocks]."""
    if not ids.shape[1]:  # kernels look up a page before they know that there is no key
        ids = jnp.zeros((ids.shape[0], 1), jnp.int32)
    return Table(ids, ids.shape[1], pages, max(size, 1))  # a page of no slots is never read


def rows(page: Sequence[int], width: int) -> Rows:
    """Rows in pages with elements (of a page, of a slot, of a head) between their neighbours."""
    return Rows(*page, width, max(next_power_of_2(width), 16))


@triton.jit
def page_ids(table, i_s, first, BK: tl.constexpr):
    """Pages of BK keys of sequence i_s from `first` on, a multiple of BK.

    That is a number if all of them have one page, and else a vector [BK]. An id that names no page
    gives the nearest one, and a key beyond the table is taken for one of the last page.
    """
    if table.ids is None:
        return i_s
    else:
        if table.SIZE % BK == 0:
            block = first // table.SIZE
        else:
            block = (first + tl.arange(0, BK)) // table.SIZE
        block = tl.minimum(block, table.blocks - 1)
        page = tl.load(table.ids + i_s.to(tl.int64) * table.blocks + block)
        return tl.minimum(tl.maximum(page, 0), table.pages - 1)


@triton.jit
def row_pointers(base, rows, table, page, first, BK: tl.constexpr):
    """Pointers [BK, PADDED] to the keys from `first` on, whose pages are `page`."""
    # 64 bits for what is the same for a whole row, 32 for what is inside a tile of one page
    start = base + page.to(tl.int64) * rows.page
    o_k = tl.arange(0, BK)
    if table.ids is None:
        p = start + first.to(tl.int64) * rows.SLOT + o_k * rows.SLOT
    elif table.SIZE % BK == 0:
        p = start + (first % table.SIZE).to(tl.int64) * rows.SLOT + o_k * rows.SLOT
    else:
        p = start + ((first + o_k) % table.SIZE).to(tl.int64) * rows.SLOT
    return p[:, None] + tl.arange(0, rows.PADDED)[None, :]


@triton.jit
def load_rows(base, rows, table, page, first, seen, BK: tl.constexpr):
    """Rows [BK, PADDED] of keys from `first` on; zeros where `seen` [BK] is false, and in columns
    beyond WIDTH. Nothing is read there, so that what unused slots hold does not matter.
    """
    p = row_pointers(base, rows, table, page, first, BK)
    inside = seen[:, None]
    if rows.PADDED != rows.WIDTH:
        inside = inside & (tl.arange(0, rows.PADDED) < rows.WIDTH)[None, :]
    if base.dtype.element_ty.is_int():
        return tl.load(p, mask=inside, other=0)
    else:
        return tl.load(p, mask=inside, other=0.0)


@triton.jit
def widen(x, like):
    """A tile of int8 or float8 in the dtype of `like`, which holds their values exactly."""
    if x.dtype == like.dtype:
        return x
    elif x.dtype.is_fp8():
        # through float32, which costs nothing: Triton's interpreter is wrong about other casts
        return x.to(tl.float32).to(like.dtype)
    else:
        return x.to(like.dtype)
