"""Attention on TPUs: every option, in bfloat16 and float32."""

from typing import Any

from ejkernel.kernels._pallas.tpu._blocks import capacity
from ejkernel.kernels._pallas.tpu.flash_attention import bwd, config, fwd
from ejkernel.kernels._registry import Backend, Platform, kernel_registry

_MOST = 256


def refused_sizes(args: Any) -> str | None:
    """Why the kernels cannot multiply these arrays."""
    if args.query.dtype.name not in ("bfloat16", "float32"):
        return f"needs bfloat16 or float32, which a TPU multiplies; got {args.query.dtype}"
    d, e = args.query.shape[-1], args.value.shape[-1]
    if not (1 <= d <= _MOST and 1 <= e <= _MOST):
        return f"needs head sizes from 1 to {_MOST}; got {d} and {e}"
    return None


def _requires(args: Any) -> str | None:
    """What the kernels cannot do."""
    return refused_sizes(args) or capacity.smem_refusal(config.table_numbers(args))


kernel_registry.register(
    "flash_attention",
    Platform.PALLAS,
    Backend.TPU,
    backward=bwd.backward,
    config=config,
    requires=_requires,
)(fwd.forward)
