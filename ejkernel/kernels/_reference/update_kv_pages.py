"""The oracle of writing tokens into pages of keys and values: one after another."""

import jax
import numpy as np


def update_kv_pages(args) -> tuple[jax.Array]:
    """The pages with their new tokens."""
    kv_pages = args.kv_pages
    num_pages, size, _, _ = kv_pages.shape
    for token, slot in enumerate(np.asarray(args.slot_mapping)):
        if 0 <= slot < num_pages * size:
            page, offset = slot // size, slot % size
            kv_pages = kv_pages.at[page, offset, 0::2].set(args.keys[token])
            kv_pages = kv_pages.at[page, offset, 1::2].set(args.values[token])
    return (kv_pages,)
