"""Native sparse attention in Triton: every branch, on NVIDIA and AMD GPUs."""

from typing import Any

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton import flash_attention as flash
from ejkernel.kernels._triton.native_sparse_attention import bwd, config, fwd

_MOST_HEADS = 128  # rows of a token in a tile


def requires(args: Any) -> str | None:
    """What the kernels cannot do."""
    group = args.query.shape[2] // max(args.key.shape[2], 1)
    if group > _MOST_HEADS:
        return f"needs at most {_MOST_HEADS} query heads to a key head; got {group}"
    return flash.requires(args)


kernel_registry.register(
    "native_sparse_attention",
    Platform.TRITON,
    Backend.GPU,
    backward=bwd.backward,
    config=config,
    version=1,
    requires=requires,
)(fwd.forward)
