"""The oracle of latent attention over pages: one key head that is its own value, in part."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._reference import page_attention


def mla_page_attention(args) -> tuple[jax.Array, ...]:
    """Output, and lse when asked for."""
    tokens, _, latent = args.q_nope.shape
    pages, size, width = args.kv_pages.shape
    blocks = args.block_tables.shape[1]
    lens, starts = np.asarray(args.context_lens), np.asarray(args.query_start_loc)
    owner, end = np.full(tokens, -1), np.zeros(tokens, int)
    for n in range(int(np.asarray(args.num_seqs)[0])):
        context = np.clip(lens[n], 0, blocks * size)
        for i in range(starts[n], starts[n + 1]):
            owner[i], end[i] = n, context - (starts[n + 1] - starts[n]) + (i - starts[n]) + 1
    tables = np.clip(np.asarray(args.block_tables), 0, pages - 1)[owner]
    rows = args.kv_pages[tables].reshape(tokens, blocks * size, 1, width)
    view = types.SimpleNamespace(
        **vars(args),
        query=jnp.concatenate([args.q_nope, args.q_pe], axis=-1),
        v_scale=args.k_scale,
    )
    out, lse = page_attention.decode(view, rows, rows[..., :latent], 0 * end, end)
    out = jnp.where((owner >= 0)[:, None, None], out, 0)
    lse = jnp.where((owner >= 0)[:, None], lse, -jnp.inf)
    return (out, lse) if args.return_lse else (out,)
