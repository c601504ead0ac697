"""Writing latent vectors into pages in Triton: one launch, in place when they are donated."""

from typing import Any

import jax

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton._blocks import scatter


@kernel_registry.register(
    "update_latent_pages",
    Platform.TRITON,
    Backend.GPU,
    requires=scatter.requires("kv_pages"),
    device_requires=scatter.device_requires("kv_pages"),
)
def update_latent_pages(args: Any, cfg: None) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """The pages with their new tokens; slots outside them are dropped."""
    _, size, width = args.kv_pages.shape  # [p, w, l + r]
    latent, rope = args.latents.shape[1], args.ropes.shape[1]
    layouts = (
        scatter.layout(size * width, width, width, 0, (1, latent)),
        scatter.layout(size * width, width, width, latent, (1, rope)),
    )
    new = (args.latents, args.ropes)
    return scatter.write((args.kv_pages,), size, args.slot_mapping, new, layouts), ()
