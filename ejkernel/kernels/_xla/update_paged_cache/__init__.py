"""Writing tokens into pages in plain JAX: one scatter a cache, in place when it is donated."""

from typing import Any

import jax

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla._blocks import paging


@kernel_registry.register("update_paged_cache", Platform.XLA, Backend.ANY)
def update_paged_cache(args: Any, cfg: None) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Both caches with their new tokens; slots outside the cache are dropped."""
    key_cache = paging.write(args.key_cache, args.slot_mapping, args.keys, 2)
    return (key_cache, paging.write(args.value_cache, args.slot_mapping, args.values, 2)), ()
