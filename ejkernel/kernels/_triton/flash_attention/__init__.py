"""Attention in Triton: every option but float64, on NVIDIA and AMD GPUs."""

from typing import Any

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton.flash_attention import bwd, config, fwd

_MOST = 256


def requires(args: Any) -> str | None:
    """What the kernels cannot do."""
    if args.query.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"needs bfloat16, float16 or float32; got {args.query.dtype}"
    d, e = args.query.shape[-1], args.value.shape[-1]
    if not (1 <= d <= _MOST and 1 <= e <= _MOST):
        return f"needs head sizes from 1 to {_MOST}; got {d} and {e}"
    return None


kernel_registry.register(
    "flash_attention",
    Platform.TRITON,
    Backend.GPU,
    backward=bwd.backward,
    config=config,
    version=10,
    requires=requires,
)(fwd.forward)
