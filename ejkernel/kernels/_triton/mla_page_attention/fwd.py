"""Latent attention over pages in Triton: packed queries, any number a sequence.

Sequences with few tokens share their keys among programs, whose parts another kernel merges;
longer ones are cut into tiles of tokens, of which each has one program. The grids depend on shapes
alone. The rows of a tile are the heads of its tokens.
"""

import types
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import next_power_of_2, triton_call
from ejkernel.kernels._triton._blocks import addresses, cached, packed, paging, splits
from ejkernel.kernels._triton.mla_page_attention import config, latents
from ejkernel.kernels._triton.page_attention import call


@triton.jit
def mla_decode_kernel(
    query, q_pe, cache, sequences, options, final, tiles, width, pe_width, old_out, old_lse,
    out, lse, acc, m, l, SPLITS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one sequence, for the heads of one tile.

    With one split, `out` and `lse` are written, which share their memory with `old_out` and
    `old_lse`; else `acc`, `m` and `l`. Sequences with more than `tiles.TOKENS` are left out.
    """
    # tiles of heads read the same keys: as neighbours, they find them in the cache of the device
    i_h = tl.program_id(0) % tiles.HEAD_TILES
    i_p = tl.program_id(0) // tiles.HEAD_TILES % SPLITS
    i_s = tl.program_id(0) // (tiles.HEAD_TILES * SPLITS)
    tokens = packed.tokens_of(sequences, i_s)
    if (tokens.count == 0) | (tokens.count > tiles.TOKENS):
        return
    o_r = tl.arange(0, tiles.BLOCK)
    rows = packed.tile_rows(tiles, 0, i_h, o_r, tokens.count)
    first, last = cached.key_range(cache, i_s)
    position = last - tokens.count
    queries = cached.load_queries(
        query, tokens.first, rows, position, last, cache, options, tiles, width
    )
    pe = cached.load_queries(
        q_pe, tokens.first, rows, position, last, cache, options, tiles, pe_width
    )
    low, high = cached.visible_keys(queries, first, last, options.left)
    start, stop = splits.part(low, high, i_p, SPLITS, BK)
    CAUSAL: tl.constexpr = tiles.TOKENS > 1
    b_m, b_l, b_acc = latents.attend(
        queries, pe, cache, i_s, low, high, start, stop, options, BK, CAUSAL
    )
    if SPLITS == 1:
        splits.store_rows(out, lse, tokens.first, rows, 0, b_acc, b_m, b_l, tiles, final)
    else:
        parts = splits.Partials(acc, m, l)
        item = i_s * tiles.HEAD_TILES + i_h
        splits.store_part(parts, item, i_p, rows, o_r, b_acc, b_m, b_l, tiles, final, SPLITS)


@triton.jit
def mla_prefill_kernel(
    query, q_pe, cache, sequences, num, options, final, tiles, width, pe_width, old_out, old_lse,
    out, lse, SHORT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """All keys of one tile of the tokens of one of `num` sequences.

    Sequences with at most SHORT tokens are left out.
    """
    i_h = tl.program_id(0) % tiles.HEAD_TILES
    # the last tiles of a sequence see most keys, and start first
    i_t = (tl.num_programs(0) - 1 - tl.program_id(0)) // tiles.HEAD_TILES
    i_s, index = packed.find_sequence(sequences, i_t, num, tiles.TOKENS)
    tokens = packed.tokens_of(sequences, i_s)
    before = index * tiles.TOKENS  # tokens of the sequence in earlier tiles
    if (tokens.count <= SHORT) | (index < 0) | (before >= tokens.count):
        return
    count = tl.minimum(tokens.count - before, tiles.TOKENS)
    rows = packed.tile_rows(tiles, 0, i_h, tl.arange(0, tiles.BLOCK), count)
    first, last = cached.key_range(cache, i_s)
    token, position = tokens.first + before, last - tokens.count + before
    stop = position + count
    queries = cached.load_queries(query, token, rows, position, stop, cache, options, tiles, width)
    pe = cached.load_queries(q_pe, token, rows, position, stop, cache, options, tiles, pe_width)
    low, high = cached.visible_keys(queries, first, last, options.left)
    first_tile, last_tile = splits.part(low, high, 0, 1, BK)
    CAUSAL: tl.constexpr = tiles.TOKENS > 1
    b_m, b_l, b_acc = latents.attend(
        queries, pe, cache, i_s, low, high, first_tile, last_tile, options, BK, CAUSAL
    )
    splits.store_rows(out, lse, token, rows, 0, b_acc, b_m, b_l, tiles, final)


def _prepared(args: Any) -> call.Call:
    """The call, with the latent part of queries as its queries."""
    latent, rope = args.q_nope.shape[2], args.q_pe.shape[2]
    pages, size, width = args.kv_pages.shape
    count, blocks = args.block_tables.shape
    room = blocks * size if pages else 0
    # a table without places would have no id to read ahead
    tables = args.block_tables if blocks else jnp.zeros((count, 1), jnp.int32)
    rows = (size * width, width, 0)
    cache = latents.Latents(
        key=args.kv_pages,
        value_rows=paging.rows(rows, latent),
        rope_rows=paging.rows(rows, rope),
        table=paging.table(tables, pages, max(size, 1)),
        first=None,
        last=args.context_lens,
        room=room,
    )
    sequences = packed.Packed(args.query_start_loc, args.num_seqs, args.q_nope.shape[0])
    # the scale of a page is that of its keys and of its values
    view = types.SimpleNamespace(**vars(args), v_scale=args.k_scale)
    return call.prepare(view, args.q_nope, cache, sequences, count)


def _launch(
    kernel: Any, inputs: dict[str, Any], cfg: config.Config, old: dict[str, Any], **given: Any
) -> dict[str, Any]:
    """Runs a kernel that writes into the arrays of `old`, if it has any."""
    kept, shapes = splits.arrays_and_shapes(old)
    return triton_call(
        kernel,
        inputs=inputs | {f"old_{name}": kept.get(name) for name in ("out", "lse")},
        outputs=shapes | given.pop("outputs", {}),
        aliases={name: f"old_{name}" for name in kept},
        **cfg.launch(),
        BK=cfg.block_k,
        **given,
    )


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and lse when asked for); no residuals."""
    num_tokens, heads, _ = args.q_nope.shape
    # rows that no sequence owns keep these
    made: dict[str, Any] = {"out": jnp.zeros(args.q_nope.shape, args.q_nope.dtype), "lse": None}
    if args.return_lse:
        made["lse"] = jnp.full((num_tokens, heads), -jnp.inf, jnp.float32)
    of = _prepared(args)
    if 0 not in (num_tokens, heads, of.num_sequences):
        rope = args.q_pe.shape[2]
        pe = {
            "q_pe": args.q_pe,
            "pe_width": addresses.Rows(rope, rope, max(next_power_of_2(rope), 16)),
        }
        short = config.row_tiles(heads, cfg.block_q, num_tokens)
        if num_tokens > short.TOKENS:  # else no sequence has more
            made = _prefill(of, pe, config.prefill(cfg), short.TOKENS, made)
        made = _decode(of, pe, cfg, short, made)
    return ((made["out"], made["lse"]) if args.return_lse else (made["out"],)), ()


def _prefill(
    of: call.Call, pe: dict[str, Any], cfg: config.Config, short: int, old: dict[str, Any]
) -> dict[str, Any]:
    """Outputs of the sequences with more than `short` tokens; others keep what is in `old`."""
    num_tokens, heads, _ = of.query.shape
    tiles = config.row_tiles(heads, cfg.block_q, num_tokens)
    return _launch(
        mla_prefill_kernel,
        of.inputs(tiles) | pe | {"num": of.num_sequences},
        cfg,
        old,
        grid=((num_tokens // tiles.TOKENS + of.num_sequences) * tiles.HEAD_TILES,),
        SHORT=short,
    )


def _decode(
    of: call.Call, pe: dict[str, Any], cfg: config.Config, tiles: packed.Tiles, old: dict[str, Any]
) -> dict[str, Any]:
    """Outputs of the other sequences."""
    items = of.num_sequences * tiles.HEAD_TILES
    num = splits.count(items, of.cache.room, cfg, of.num_splits)
    made = _launch(
        mla_decode_kernel,
        of.inputs(tiles) | pe,
        cfg,
        old if num == 1 else {},
        outputs=splits.partial_shapes(items, num, tiles, of.final.WIDTH),
        grid=(items * num,),
        SPLITS=num,
    )
    parts = splits.Partials(*(made.pop(name) for name in ("acc", "m", "l")))
    return made if num == 1 else splits.merge(parts, of.sequences, of.final, tiles, old)
