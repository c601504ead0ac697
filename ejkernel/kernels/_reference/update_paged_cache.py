"""The oracle of writing tokens into pages: one after another."""

import jax
import numpy as np


def update_paged_cache(args) -> tuple[jax.Array, jax.Array]:
    """Both caches with their new tokens."""
    key_cache, value_cache = args.key_cache, args.value_cache
    num_pages, _, size, _ = key_cache.shape
    for token, slot in enumerate(np.asarray(args.slot_mapping)):
        if 0 <= slot < num_pages * size:
            page, offset = slot // size, slot % size
            key_cache = key_cache.at[page, :, offset].set(args.keys[token])
            value_cache = value_cache.at[page, :, offset].set(args.values[token])
    return key_cache, value_cache
