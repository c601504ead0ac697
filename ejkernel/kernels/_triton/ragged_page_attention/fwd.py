"""Attention of packed queries over pages, [p, w, 2 g, d], in Triton: prefill and decoding at once.

Sequences with so few tokens that they fit into the rows of a decoding tile are decoded, with splits
over keys. All others are cut into tiles of tokens times heads of a key head; a program finds the
sequence of its tile by bisection. Grids depend on shapes alone; programs without work leave early.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import triton_call
from ejkernel.kernels._triton._blocks import cached, packed, paging, splits
from ejkernel.kernels._triton.page_attention import call, decode
from ejkernel.kernels._triton.ragged_page_attention import config


@triton.jit
def ragged_prefill_kernel(
    query, cache, sequences, options, final, tiles, width, num_sequences, old_out, old_lse, out,
    lse, DECODED: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of a sequence with more than DECODED tokens, for one tile of heads.

    `old_out` and `old_lse` share their memory with the outputs, so that other rows stay.
    """
    HEAD_PROGRAMS: tl.constexpr = tiles.KEY_HEADS * tiles.HEAD_TILES
    i_x = tl.program_id(0) % HEAD_PROGRAMS
    # the last tiles of a sequence see most keys, and start first
    i_t = (tl.num_programs(0) - 1 - tl.program_id(0)) // HEAD_PROGRAMS
    i_g = i_x // tiles.HEAD_TILES
    i_s, i_q = packed.find_sequence(sequences, i_t, num_sequences, tiles.TOKENS)
    tokens = packed.tokens_of(sequences, i_s)
    before = i_q * tiles.TOKENS  # tokens in front of this tile
    if (before < 0) | (before >= tokens.count) | (tokens.count <= DECODED):
        return
    count = tl.minimum(tokens.count - before, tiles.TOKENS)
    o_r = tl.arange(0, tiles.BLOCK)
    rows = packed.tile_rows(tiles, i_g, i_x % tiles.HEAD_TILES, o_r, count)
    first, last = cached.key_range(cache, i_s)
    position = last - tokens.count + before
    token = tokens.first + before
    queries = cached.load_queries(
        query, token, rows, position, position + count, cache, options, tiles, width
    )
    low, high = cached.visible_keys(queries, first, last, options.left)
    start, stop = splits.part(low, high, 0, 1, BK)
    m, l, acc = cached.attend(queries, cache, i_s, i_g, low, high, start, stop, options, BK, True)
    splits.store_rows(out, lse, token, rows, i_g, acc, m, l, tiles, final)


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and lse when asked for); no residuals."""
    of, few, prepared = config.sizes(args), config.for_decoding(cfg), _prepare(args)
    # rows of no sequence stay as they are here
    old = {
        name: None if x is None else jnp.full(x.shape, 0.0 if name == "out" else -jnp.inf, x.dtype)
        for name, x in prepared.shapes().items()
    }
    decoded = config.decode_tiles(of, cfg.decode_rows)
    if prepared.num_sequences:
        old, parts = decode.launch(prepared, decoded, few, old)
        if args.queries.shape[0] > decoded.TOKENS:
            old = _prefill(prepared, config.prefill_tiles(of, cfg), cfg, decoded.TOKENS, old)
        if parts is not None:
            old = splits.merge(parts, prepared.sequences, prepared.final, decoded, old)
    return ((old["out"], old["lse"]) if args.return_lse else (old["out"],)), ()


def _prepare(args: Any) -> call.Call:
    of = config.sizes(args)
    pages, size, double, d = args.kv_pages.shape
    rows = paging.rows((size * double * d, double * d, 2 * d), d)
    cache = cached.Cache(
        key=args.kv_pages,
        value=None,
        key_rows=rows,
        value_rows=rows,
        table=paging.table(args.block_tables, pages, size),
        first=None,
        last=args.context_lens,
        room=of.reach,
        INTERLEAVED=True,
    )
    sequences = packed.Packed(args.query_start_loc, args.num_seqs, args.queries.shape[0])
    return call.prepare(args, args.queries, cache, sequences, args.block_tables.shape[0])


def _prefill(
    prepared: call.Call, tiles: packed.Tiles, cfg: config.Config, decoded: int, old: dict[str, Any]
) -> dict[str, Any]:
    """Writes the rows of sequences with more than `decoded` tokens into `out` and `lse`."""
    kept, shapes = splits.arrays_and_shapes(old)
    count = prepared.query.shape[0] // tiles.TOKENS + prepared.num_sequences
    return triton_call(
        ragged_prefill_kernel,
        inputs=prepared.inputs(tiles)
        | {"num_sequences": prepared.num_sequences}
        | {f"old_{name}": kept.get(name) for name in shapes},
        outputs=shapes,
        aliases={name: f"old_{name}" for name in kept},
        grid=(count * tiles.KEY_HEADS * tiles.HEAD_TILES,),
        **cfg.launch(),
        DECODED=decoded,
        BK=cfg.block_k,
    )
