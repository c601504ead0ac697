"""Grouped matmul in Triton: both forms and every option, on NVIDIA and AMD GPUs."""

from typing import Any

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._specs.grouped_matmul import out_dtype
from ejkernel.kernels._triton.grouped_matmul import bwd, config, fwd

_DTYPES = ("bfloat16", "float16", "float32")


def _requires(args: Any) -> str | None:
    """What the kernels cannot do."""
    dtypes = {"lhs": args.lhs.dtype, "rhs": args.rhs.dtype, "out": out_dtype(args)}
    for name, dtype in dtypes.items():
        if dtype.name not in _DTYPES:
            return f"needs bfloat16, float16 or float32; `{name}` is {dtype}"
    if 0 in (*args.lhs.shape, *args.rhs.shape):
        shapes = f"{list(args.lhs.shape)} and {list(args.rhs.shape)}"
        return f"needs at least one row, column and group; got {shapes}"
    return None


kernel_registry.register(
    "grouped_matmul",
    Platform.TRITON,
    Backend.GPU,
    backward=bwd.backward,
    config=config,
    requires=_requires,
)(fwd.forward)
