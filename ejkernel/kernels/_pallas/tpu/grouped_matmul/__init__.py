"""Grouped matmul on TPUs, in bfloat16 and float32."""

from typing import Any

from ejkernel.kernels._pallas.tpu._blocks import capacity
from ejkernel.kernels._pallas.tpu.grouped_matmul import bwd, config, fwd
from ejkernel.kernels._registry import Backend, Platform, kernel_registry


def _requires(args: Any) -> str | None:
    """What the kernels cannot do."""
    for name in ("lhs", "rhs"):
        dtype = getattr(args, name).dtype
        if dtype.name not in ("bfloat16", "float32"):
            return f"needs bfloat16 or float32, which a TPU multiplies; `{name}` is {dtype}"
    if 0 in (*args.lhs.shape, *args.rhs.shape):
        shapes = f"{list(args.lhs.shape)} and {list(args.rhs.shape)}"
        return f"needs at least one row, column and group; got {shapes}"
    return capacity.smem_refusal(config.table_numbers(args))


kernel_registry.register(
    "grouped_matmul",
    Platform.PALLAS,
    Backend.TPU,
    backward=bwd.backward,
    config=config,
    requires=_requires,
)(fwd.forward)
