"""Writing tokens into pages in plain JAX: one scatter a cache, in place when it is donated."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._registry import Backend, Platform, kernel_registry


@kernel_registry.register("update_paged_cache", Platform.XLA, Backend.ANY)
def update_paged_cache(args: Any, cfg: None) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Both caches with their new tokens; slots outside the cache are dropped."""
    num_pages, _, size, _ = args.key_cache.shape
    slots = args.slot_mapping
    # a scatter drops what lies past the end; a negative page would count from it
    page = jnp.where(slots < 0, num_pages, slots // max(size, 1))
    offset = slots % max(size, 1)

    def write(cache: jax.Array, new: jax.Array) -> jax.Array:
        return cache.at[page, :, offset].set(new, mode="drop")

    return (write(args.key_cache, args.keys), write(args.value_cache, args.values)), ()
