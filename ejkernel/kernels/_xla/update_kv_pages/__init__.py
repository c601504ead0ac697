"""Writing keys and values into pages in plain JAX: one scatter, in place when they are donated."""

from typing import Any

import jax

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla._blocks import paging


@kernel_registry.register("update_kv_pages", Platform.XLA, Backend.ANY)
def update_kv_pages(args: Any, cfg: None) -> tuple[tuple[jax.Array], tuple[()]]:
    """The pages with their new tokens; slots outside them are dropped."""
    new = paging.interleave(args.keys, args.values)
    return (paging.write(args.kv_pages, args.slot_mapping, new, 1),), ()
