"""Writing latent vectors into pages in plain JAX: one scatter, in place when they are donated."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla._blocks import paging


@kernel_registry.register("update_latent_pages", Platform.XLA, Backend.ANY)
def update_latent_pages(args: Any, cfg: None) -> tuple[tuple[jax.Array], tuple[()]]:
    """The pages with their new tokens; slots outside them are dropped."""
    new = jnp.concatenate([args.latents, args.ropes], axis=-1)
    return (paging.write(args.kv_pages, args.slot_mapping, new, 1),), ()
