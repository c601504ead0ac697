"""Writing tokens into two arrays of pages in Triton: one launch, in place when they are donated."""

from typing import Any

import jax

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton._blocks import scatter

_CACHES = ("key_cache", "value_cache")


@kernel_registry.register(
    "update_paged_cache",
    Platform.TRITON,
    Backend.GPU,
    requires=scatter.requires(*_CACHES),
    device_requires=scatter.device_requires(*_CACHES),
)
def update_paged_cache(args: Any, cfg: None) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Both caches with their new tokens; slots outside the cache are dropped."""
    _, groups, size, _ = args.key_cache.shape  # [p, g, w, d]

    def rows(new: jax.Array) -> scatter.Layout:
        width = new.shape[2]
        return scatter.layout(groups * size * width, width, size * width, 0, new.shape[1:])

    caches, new = (args.key_cache, args.value_cache), (args.keys, args.values)
    layouts = (rows(args.keys), rows(args.values))
    return scatter.write(caches, size, args.slot_mapping, new, layouts), ()
