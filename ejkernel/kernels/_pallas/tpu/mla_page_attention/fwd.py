"""Latent attention over pages, [p, w, l + r], on a TPU: prefill and decoding at once.

All heads share one key, so the rows of a tile are all heads of its tokens. A page is copied once:
its rows are the keys, and their first l columns the values.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas.tpu._blocks import keys
from ejkernel.kernels._pallas.tpu.ragged_page_attention import config
from ejkernel.kernels._pallas.tpu.ragged_page_attention import fwd as ragged


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and lse when asked for); no residuals."""
    latent, dtype = args.q_nope.shape[-1], args.q_nope.dtype
    queries = jnp.concatenate([args.q_nope, args.q_pe.astype(dtype)], axis=-1)

    def make(per_step: int) -> keys.AbstractPages:
        return keys.LatentPages(args.kv_pages, latent, args.block_tables, per_step, dtype)

    return ragged.attend(args, cfg, ragged.Source(queries, 1, latent, make)), ()
