"""Writing keys and values into pages in Triton: one launch, in place when they are donated."""

from typing import Any

import jax

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton._blocks import scatter


@kernel_registry.register(
    "update_kv_pages",
    Platform.TRITON,
    Backend.GPU,
    requires=scatter.requires("kv_pages"),
    device_requires=scatter.device_requires("kv_pages"),
)
def update_kv_pages(args: Any, cfg: None) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """The pages with their new tokens; slots outside them are dropped."""
    _, size, heads, width = args.kv_pages.shape  # [p, w, 2 g, d]
    place, shape = heads * width, args.keys.shape[1:]
    # keys are at even heads, values at odd ones
    keys, values = (
        scatter.layout(size * place, place, 2 * width, first, shape) for first in (0, width)
    )
    new = (args.keys, args.values)
    return scatter.write((args.kv_pages,), size, args.slot_mapping, new, (keys, values)), ()
