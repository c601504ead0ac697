"""Attention of one query a sequence over its pages, [p, g, w, d], in Triton."""

from typing import Any

import jax

from ejkernel.kernels._triton._blocks import cached, packed, paging
from ejkernel.kernels._triton.page_attention import call, config, decode


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and lse when asked for); no residuals."""
    of = config.sizes(args)
    pages, groups, size, _ = args.key_cache.shape
    rows = [paging.rows((groups * size * n, n, size * n), n) for n in (of.d, of.e)]
    cache = cached.Cache(
        key=args.key_cache,
        value=args.value_cache,
        key_rows=rows[0],
        value_rows=rows[1],
        table=paging.table(args.block_tables, pages, size),
        first=None,
        last=args.context_lens,
        room=of.reach,
        INTERLEAVED=False,
    )
    batch = args.query.shape[0]
    sequences = packed.Packed(None, None, batch)
    prepared = call.prepare(args, args.query, cache, sequences, batch)
    made = decode.run(prepared, config.row_tiles(of), cfg)
    return ((made["out"], made["lse"]) if args.return_lse else (made["out"],)), ()
