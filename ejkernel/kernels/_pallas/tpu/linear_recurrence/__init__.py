"""The linear recurrence on TPUs, in bfloat16 and float32: every gate, any heads, packed rows."""

from typing import Any

from ejkernel.kernels._pallas.tpu._blocks import capacity
from ejkernel.kernels._pallas.tpu.linear_recurrence import bwd, config, fwd
from ejkernel.kernels._registry import Backend, Platform, kernel_registry

_MOST = 256  # head sizes whose states and tiles stay in the VMEM of every TPU


def _requires(args: Any) -> str | None:
    """What the kernels cannot do."""
    for name, array in args.arrays().items():
        if array.dtype.name not in ("bfloat16", "float32", "int32"):
            return f"needs bfloat16 or float32, which a TPU multiplies; `{name}` is {array.dtype}"
    d, e = args.query.shape[-1], args.value.shape[-1]
    if max(d, e) > _MOST:
        return f"needs head sizes of at most {_MOST}, whose states stay in VMEM; got {d} and {e}"
    if 0 in (args.query.size, args.value.size):
        return "needs at least one row, token and feature to launch a kernel for"
    if args.cu_seqlens is not None and args.cu_seqlens.shape[0] == 1:
        return "needs at least one sequence in `cu_seqlens`"
    return capacity.smem_refusal(config.table_numbers(args))


kernel_registry.register(
    "linear_recurrence",
    Platform.PALLAS,
    Backend.TPU,
    backward=bwd.backward,
    config=config,
    requires=_requires,
)(fwd.forward)
