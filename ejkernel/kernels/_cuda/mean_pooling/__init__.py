"""Mean pooling in CUDA: masks, chunks and packed sequences, on NVIDIA GPUs."""

from typing import Any

from ejkernel.kernels._cuda import _device
from ejkernel.kernels._cuda.mean_pooling import bwd, config, fwd
from ejkernel.kernels._registry import Backend, Platform, kernel_registry


def _requires(args: Any) -> str | None:
    """What the kernels cannot do."""
    if args.inputs.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"needs bfloat16, float16 or float32; got {args.inputs.dtype}"
    if 0 in args.inputs.shape or (args.cu_seqlens is not None and args.cu_seqlens.shape[0] < 2):
        return f"needs at least one row, token and feature, and a sequence; got {args.inputs.shape}"
    return None


kernel_registry.register(
    "mean_pooling",
    Platform.CUDA,
    Backend.GPU,
    backward=bwd.backward,
    config=config,
    requires=_requires,
    device_requires=_device.requires,
    by_name="has not run on a GPU yet; ask for it with platform='cuda'",
)(fwd.forward)
