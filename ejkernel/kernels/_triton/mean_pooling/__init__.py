"""Mean pooling in Triton: masks, chunks and packed sequences, on NVIDIA and AMD GPUs."""

from typing import Any

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton.mean_pooling import bwd, config, fwd


def _requires(args: Any) -> str | None:
    """What the kernels cannot do."""
    if args.inputs.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"needs bfloat16, float16 or float32; got {args.inputs.dtype}"
    if 0 in args.inputs.shape or (args.cu_seqlens is not None and args.cu_seqlens.shape[0] < 2):
        return f"needs at least one row, token and feature, and a sequence; got {args.inputs.shape}"
    return None


kernel_registry.register(
    "mean_pooling",
    Platform.TRITON,
    Backend.GPU,
    backward=bwd.backward,
    config=config,
    requires=_requires,
)(fwd.forward)
