"""Writes the rows of new tokens into pages, in place.

A program copies some rows of one token, its keys and its values, to the slot of the token. A slot
that is negative or beyond the pages writes nothing. Of two tokens with one slot either may win,
each number for itself, as programs run in no order.
"""

from typing import Any, NamedTuple

import jax
import triton
import triton.language as tl

from ejkernel._device import Target
from ejkernel.callib import cdiv, next_power_of_2, triton_call
from ejkernel.kernels._triton import _launch

_DTYPES = (
    *("bfloat16", "float16", "float32", "float64", "int8", "uint8"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
_TILE = 4096  # elements that a program copies at once, of keys and of values


class Layout(NamedTuple):
    """Where the rows of a slot lie in an array of pages; strides are in elements."""

    PAGE: tl.constexpr
    PLACE: tl.constexpr
    ROW: tl.constexpr
    FIRST: tl.constexpr  # offset of row 0 in a slot
    ROWS: tl.constexpr  # rows of a token
    WIDTH: tl.constexpr
    PADDED: tl.constexpr  # a power of two, at least WIDTH


def layout(page: int, place: int, row: int, first: int, shape: tuple[int, int]) -> Layout:
    """A layout for tokens of `shape` [rows, width]."""
    return Layout(page, place, row, first, *shape, next_power_of_2(shape[1]))


@triton.jit
def _copy(new, cache, rows, page, place, inside, BR: tl.constexpr):
    """Copies rows of this program's token to a slot, if that is inside the pages."""
    o_r = tl.program_id(1) * BR + tl.arange(0, BR)
    o_c = tl.arange(0, rows.PADDED)
    count = tl.where(inside, rows.ROWS, 0)
    mask = (o_r < count)[:, None] & (o_c < rows.WIDTH)[None, :]  # [BR, PADDED]
    new += tl.program_id(0).to(tl.int64) * (rows.ROWS * rows.WIDTH)
    cache += page * rows.PAGE + place * rows.PLACE + rows.FIRST
    tile = tl.load(new + o_r[:, None] * rows.WIDTH + o_c[None, :], mask=mask)
    tl.store(cache + o_r[:, None] * rows.ROW + o_c[None, :], tile, mask=mask)


@triton.jit(do_not_specialize=("room",))
def write_pages_kernel(
    slots, first, second, first_rows, second_rows, old_cache, old_second_cache, room,
    cache, second_cache, SIZE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Writes both rows of a token to its slot; without `second_cache`, both into `cache`.

    `room` is the number of slots, SIZE that of a page. The old caches share their memory with the
    new ones, so that other slots stay.
    """
    slot = tl.load(slots + tl.program_id(0))
    inside = (slot >= 0) & (slot < room)
    slot = tl.where(inside, slot, 0)
    page, place = (slot // SIZE).to(tl.int64), (slot % SIZE).to(tl.int64)
    _copy(first, cache, first_rows, page, place, inside, BR)
    if second_cache is not None:
        _copy(second, second_cache, second_rows, page, place, inside, BR)
    else:
        _copy(second, cache, second_rows, page, place, inside, BR)


def write(
    caches: tuple[jax.Array, ...],
    size: int,
    slots: jax.Array,
    new: tuple[jax.Array, jax.Array],
    rows: tuple[Layout, Layout],
) -> tuple[jax.Array, ...]:
    """One or two caches with pages of `size` slots, with new tokens in them."""
    count = max(rows[0].ROWS, 1)
    names = ("cache", "second_cache")[: len(caches)]
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in zip(names, caches, strict=True)}
    if 0 in (sum(x.size for x in caches), sum(x.size for x in new)):
        return caches
    block = min(next_power_of_2(count), max(_TILE // max(r.PADDED for r in rows), 1))
    made = triton_call(
        write_pages_kernel,
        inputs={
            "slots": slots,
            "first": new[0],
            "second": new[1],
            "first_rows": rows[0],
            "second_rows": rows[1],
            "old_cache": caches[0],
            "old_second_cache": caches[1] if len(caches) > 1 else None,
            "room": caches[0].shape[0] * size,
        },
        outputs={"cache": None, "second_cache": None} | shapes,
        aliases={name: f"old_{name}" for name in names},
        grid=(slots.shape[0], cdiv(count, block)),
        num_warps=4,
        num_stages=1,
        SIZE=max(size, 1),
        BR=block,
    )
    return tuple(made[name] for name in names)


def requires(*names: str) -> Any:
    """Why caches with these names cannot be written, as the registry asks for it."""

    def why_not(args: Any) -> str | None:
        for name in names:
            if (dtype := getattr(args, name).dtype).name not in _DTYPES:
                return f"needs {', '.join(_DTYPES)}; `{name}` is {dtype}"
        return None

    return why_not


def device_requires(*names: str) -> Any:
    """Likewise, where it depends on the device."""

    def why_not(args: Any, target: Target) -> str | None:
        reasons = (
            _launch.no_float8(f"`{name}`", getattr(args, name).dtype, target) for name in names
        )
        return next((reason for reason in reasons if reason is not None), None)

    return why_not
