"""Decoding in Triton: few queries of a sequence over its cached keys, which programs share.

The query heads of a key head are the rows of one tile, so that a key is loaded once and products
run on tensor cores. With several splits the programs store parts, which another kernel merges.
"""

from typing import Any

import triton
import triton.language as tl

from ejkernel.callib import triton_call
from ejkernel.kernels._triton._blocks import cached, packed, splits
from ejkernel.kernels._triton.page_attention import call, config


@triton.jit
def decode_attention_kernel(
    query, cache, sequences, options, final, tiles, width, old_out, old_lse, out, lse, acc, m, l,
    SPLITS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one sequence, for the heads of one tile.

    With one split, `out` and `lse` are written, which may share their memory with `old_out` and
    `old_lse`; else `acc`, `m` and `l`. Sequences with more than `tiles.TOKENS` are left out.
    """
    # heads of one key are neighbours, so that pages which hold several heads are read at once
    HEAD_PROGRAMS: tl.constexpr = tiles.KEY_HEADS * tiles.HEAD_TILES
    i_x = tl.program_id(0) % HEAD_PROGRAMS
    i_p = tl.program_id(0) // HEAD_PROGRAMS % SPLITS
    i_s = tl.program_id(0) // (HEAD_PROGRAMS * SPLITS)
    i_g = i_x // tiles.HEAD_TILES
    tokens = packed.tokens_of(sequences, i_s)
    if sequences.starts is not None:  # else every sequence has one token
        if (tokens.count == 0) | (tokens.count > tiles.TOKENS):
            return
    o_r = tl.arange(0, tiles.BLOCK)
    rows = packed.tile_rows(tiles, i_g, i_x % tiles.HEAD_TILES, o_r, tokens.count)
    first, last = cached.key_range(cache, i_s)
    queries = cached.load_queries(
        query, tokens.first, rows, last - tokens.count, last, cache, options, tiles, width
    )
    low, high = cached.visible_keys(queries, first, last, options.left)
    start, stop = splits.part(low, high, i_p, SPLITS, BK)
    CAUSAL: tl.constexpr = tiles.TOKENS > 1
    b_m, b_l, b_acc = cached.attend(
        queries, cache, i_s, i_g, low, high, start, stop, options, BK, CAUSAL
    )
    if SPLITS == 1:
        splits.store_rows(out, lse, tokens.first, rows, i_g, b_acc, b_m, b_l, tiles, final)
    else:
        parts = splits.Partials(acc, m, l)
        item = i_s * HEAD_PROGRAMS + i_x
        splits.store_part(parts, item, i_p, rows, o_r, b_acc, b_m, b_l, tiles, final, SPLITS)


def launch(
    of: call.Call, tiles: packed.Tiles, cfg: config.Config, old: dict[str, Any]
) -> tuple[dict[str, Any], splits.Partials | None]:
    """Outputs of sequences with at most `tiles.TOKENS` tokens; or, with several splits, parts.

    `old` are by name the arrays to write into, or their shapes.
    """
    heads = tiles.KEY_HEADS * tiles.HEAD_TILES
    items, reach = of.num_sequences * heads, of.cache.room
    num = splits.count(items, reach, cfg, of.num_splits)
    kept, shapes = splits.arrays_and_shapes(old if num == 1 else {})
    made = triton_call(
        decode_attention_kernel,
        inputs=of.inputs(tiles) | {f"old_{name}": kept.get(name) for name in ("out", "lse")},
        outputs=shapes | splits.partial_shapes(items, num, tiles, of.final.WIDTH),
        aliases={name: f"old_{name}" for name in kept},
        grid=(items * num,),
        **cfg.launch(),
        SPLITS=num,
        BK=cfg.block_k,
    )
    parts = splits.Partials(*(made.pop(name) for name in ("acc", "m", "l")))
    return (made, None) if num == 1 else (old, parts)


def run(of: call.Call, tiles: packed.Tiles, cfg: config.Config) -> dict[str, Any]:
    """Outputs `out` and `lse`, where no sequence has more than `tiles.TOKENS` tokens."""
    made, parts = launch(of, tiles, cfg, of.shapes())
    if parts is None:
        return made
    return splits.merge(parts, of.sequences, of.final, tiles, made)
