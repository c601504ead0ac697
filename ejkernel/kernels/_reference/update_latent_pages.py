"""The oracle of writing tokens into pages of latent vectors: one after another."""

import jax
import numpy as np


def update_latent_pages(args) -> tuple[jax.Array]:
    """The pages with their new tokens."""
    kv_pages, latent = args.kv_pages, args.latents.shape[1]
    num_pages, size, _ = kv_pages.shape
    for token, slot in enumerate(np.asarray(args.slot_mapping)):
        if 0 <= slot < num_pages * size:
            page, offset = slot // size, slot % size
            kv_pages = kv_pages.at[page, offset, :latent].set(args.latents[token])
            kv_pages = kv_pages.at[page, offset, latent:].set(args.ropes[token])
    return (kv_pages,)
