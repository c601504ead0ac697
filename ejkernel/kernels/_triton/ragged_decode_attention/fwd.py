"""Attention of one query a row over a range of its keys, [b, s, g, d], in Triton.

The keys of a row are one page without a table.
"""

from typing import Any

import jax

from ejkernel.kernels._triton._blocks import cached, packed, paging
from ejkernel.kernels._triton.page_attention import call, config, decode


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and lse when asked for); no residuals."""
    of = config.sizes(args)
    batch, length, groups, _ = args.key.shape
    rows = [paging.rows((length * groups * n, groups * n, n), n) for n in (of.d, of.e)]
    cache = cached.Cache(
        key=args.key,
        value=args.value,
        key_rows=rows[0],
        value_rows=rows[1],
        table=paging.Table(None, None, None, 0),
        first=args.sequence_start,
        last=args.sequence_end,
        room=length,
        INTERLEAVED=False,
    )
    prepared = call.prepare(args, args.query, cache, packed.Packed(None, None, batch), batch)
    made = decode.run(prepared, config.row_tiles(of), cfg)
    return ((made["out"], made["lse"]) if args.return_lse else (made["out"],)), ()
