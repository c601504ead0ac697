"""Flash decoding (Dao and others, 2023): few queries over many keys, which several programs share.

Each program attends to one part of a sequence's keys, and stores maximum, sum and weighted values
of its rows. One kernel merges them, in the order of the parts. The parts of a sequence depend on
its own range of keys alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import cdiv, next_power_of_2, triton_call
from ejkernel.kernels._triton._blocks import packed as packing
from ejkernel.kernels._triton._blocks import softmax

_AT_ONCE = 8192  # elements of weighted values that a program merges at once


class Partials(NamedTuple):
    """What programs store of their rows; [items, splits, rows], the values with their width too.

    An item is a tile of the query heads of one key head, for one sequence.
    """

    acc: Any  # sums of values, weighted by exp(x - m)
    m: Any  # maxima of logits x, in units of 1 / FACTOR; -inf where no key was seen
    l: Any  # sums of weights


class Final(NamedTuple):
    """What is done to a row after its last key, and where it is stored."""

    sinks: Any  # `softmax.Sinks`, or None
    v_scale: Any  # float32 [key heads], or None
    FACTOR: tl.constexpr  # times maxima are natural units
    WIDTH: tl.constexpr  # of values
    PADDED: tl.constexpr


def count(items: int, reach: int, cfg: Any, given: int | None) -> int:
    """How many parts the keys of a sequence are cut into.

    Args:
      items: Programs without splits: sequences times tiles of heads.
      reach: The most keys of a sequence.
      cfg: Has `block_k`, of which a part has a whole number, `programs`, which fill the device, and
        `split_keys`, the least keys of a part.
      given: What the caller asks for, or None.
    """
    most = max(cdiv(reach, cfg.block_k), 1)
    if given is not None:
        return min(given, most)
    useful = max(reach // max(cfg.split_keys, cfg.block_k), 1)
    return min(max(cfg.programs // max(items, 1), 1), useful)


def partial_shapes(items: int, splits: int, tiles: packing.Tiles, width: int) -> dict[str, Any]:
    """The outputs `acc`, `m` and `l` of a kernel with splits; None if there is but one."""
    if splits == 1:
        return dict.fromkeys(("acc", "m", "l"))
    shape = (items, splits, tiles.TOKENS * tiles.TILE_HEADS)
    rows = jax.ShapeDtypeStruct(shape, jnp.float32)
    return {"acc": jax.ShapeDtypeStruct((*shape, width), jnp.float32), "m": rows, "l": rows}


@triton.jit
def part(low, high, i_p, SPLITS: tl.constexpr, BK: tl.constexpr):
    """Tiles [first, last) of part i_p of the keys in [low, high); low is not negative."""
    first = low // BK
    stop = tl.maximum((high + BK - 1) // BK, first)
    if SPLITS == 1:
        return first, stop
    else:
        size = tl.cdiv(stop - first, SPLITS)
        start = tl.minimum(first + i_p * size, stop)
        return start, tl.minimum(start + size, stop)


@triton.jit
def store_part(partials, item, i_p, rows, o_r, acc, m, l, tiles, final, SPLITS: tl.constexpr):
    """Stores maximum, sum and weighted values of the rows o_r of an item, [BLOCK] each."""
    ROWS: tl.constexpr = tiles.TOKENS * tiles.TILE_HEADS
    row = (item.to(tl.int64) * SPLITS + i_p) * ROWS + o_r
    tl.store(partials.m + row, m, mask=rows.real)
    tl.store(partials.l + row, l, mask=rows.real)
    o_e = tl.arange(0, final.PADDED)
    inside = (rows.real & (l != 0.0))[:, None] & (o_e < final.WIDTH)[None, :]
    tl.store(partials.acc + row[:, None] * final.WIDTH + o_e[None, :], acc, mask=inside)


@triton.jit
def store_rows(out, lse, token, rows, i_g, acc, m, l, tiles, final):
    """Stores output [tokens, h, e] and, if wanted, logsumexp [tokens, h], of rows of key head i_g.

    Tokens are counted from `token` on; `m` is in units of 1 / FACTOR. Sinks are added here.
    """
    m = tl.where(l == 0.0, float("-inf"), m * final.FACTOR)
    factor = tl.full(l.shape, 1.0, tl.float32)
    if final.sinks is not None:
        m, l, factor = softmax.add_sinks_of_heads(m, l, final.sinks, rows.head, rows.real)
    factor = factor / tl.where(l == 0.0, 1.0, l)  # one quotient a row
    if final.v_scale is not None:
        factor *= tl.load(final.v_scale + i_g)
    o_t = (token + rows.token).to(tl.int64)
    row = o_t * tiles.HEADS + rows.head
    o_e = tl.arange(0, final.PADDED)
    inside = rows.real[:, None] & (o_e < final.WIDTH)[None, :]
    acc = (acc * factor[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * final.WIDTH + o_e[None, :], acc, mask=inside)
    if lse is not None:
        tl.store(lse + row, softmax.logsumexp(m, l), mask=rows.real)


@triton.jit
def merge_parts_kernel(
    partials, packed, final, tiles, old_out, old_lse, out, lse,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merges the parts of one row. BLOCK is SPLITS, padded to a power of two.

    `old_out` and `old_lse` share their memory with the outputs, so that other rows stay.
    """
    ROWS: tl.constexpr = tiles.TOKENS * tiles.TILE_HEADS
    item = tl.program_id(0) // ROWS
    o_r = tl.program_id(0) % ROWS + tl.arange(0, 1)
    i_h = item % tiles.HEAD_TILES
    i_g = item // tiles.HEAD_TILES % tiles.KEY_HEADS
    tokens = packing.tokens_of(packed, item // (tiles.HEAD_TILES * tiles.KEY_HEADS))
    if tokens.count > tiles.TOKENS:
        return
    rows = packing.tile_rows(tiles, i_g, i_h, o_r, tokens.count)  # [1]
    if tl.max(rows.real.to(tl.int32), 0) == 0:
        return
    o_s = tl.arange(0, BLOCK)
    row = item.to(tl.int64) * (SPLITS * ROWS) + tl.program_id(0) % ROWS
    b_m = tl.load(partials.m + row + o_s * ROWS, mask=o_s < SPLITS, other=float("-inf"))
    m = tl.max(b_m, 0) + tl.zeros([1], tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, final.PADDED], tl.float32)
    o_e = tl.arange(0, final.PADDED)
    for first in range(0, SPLITS, AT_ONCE):
        o_c = first + tl.arange(0, AT_ONCE)
        some = row + o_c * ROWS
        c_m = tl.load(partials.m + some, mask=o_c < SPLITS, other=float("-inf"))
        c_l = tl.load(partials.l + some, mask=o_c < SPLITS, other=0.0)
        weight = tl.math.exp2((c_m - softmax.finite(m)) * (final.FACTOR * softmax.LOG2_E))
        # a part without keys has stored no values
        inside = (c_l != 0.0)[:, None] & (o_e < final.WIDTH)[None, :]
        p = partials.acc + some[:, None] * final.WIDTH + o_e[None, :]
        b_a = tl.load(p, mask=inside, other=0.0)  # [AT_ONCE, PADDED]
        l += tl.sum(c_l * weight, 0)
        acc += tl.sum(b_a * weight[:, None], 0)[None, :]
    store_rows(out, lse, tokens.first, rows, i_g, acc, m, l, tiles, final)


def arrays_and_shapes(old: dict[str, Any]) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """The arrays among `out` and `lse` that a kernel writes into, and the shapes of both."""
    wanted = {name: x for name, x in old.items() if x is not None}
    kept = {n: x for n, x in wanted.items() if not isinstance(x, jax.ShapeDtypeStruct)}
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in wanted.items()}
    return kept, {"out": None, "lse": None} | shapes


def merge(
    partials: Partials,
    packed: packing.Packed,
    final: Final,
    tiles: packing.Tiles,
    old: dict[str, Any],
) -> dict[str, Any]:
    """Outputs `out` and `lse` of all rows.

    Args:
      partials: What `store_part` has stored.
      packed: The tokens of sequences; those with more than `tiles.TOKENS` are left out.
      final: What is done to rows.
      tiles: The rows of items.
      old: By name, an array to write into, a shape, or None for an `lse` that is not wanted.
    """
    items, splits, rows = partials.m.shape
    kept, shapes = arrays_and_shapes(old)
    return triton_call(
        merge_parts_kernel,
        inputs={
            "partials": partials,
            "packed": packed,
            "final": final,
            "tiles": tiles,
            "old_out": kept.get("out"),
            "old_lse": kept.get("lse"),
        },
        outputs=shapes,
        aliases={name: f"old_{name}" for name in kept},
        grid=(items * rows,),
        num_warps=4,
        num_stages=1,
        SPLITS=splits,
        BLOCK=next_power_of_2(splits),
        AT_ONCE=min(next_power_of_2(splits), max(_AT_ONCE // final.PADDED, 1)),
    )
