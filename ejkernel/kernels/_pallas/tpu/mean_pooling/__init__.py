"""Mean pooling on TPUs, in bfloat16 and float32."""

from typing import Any

from ejkernel.kernels._pallas.tpu._blocks import capacity
from ejkernel.kernels._pallas.tpu.mean_pooling import bwd, config, fwd, layout
from ejkernel.kernels._registry import Backend, Platform, kernel_registry


def _requires(args: Any) -> str | None:
    """What the kernels cannot do."""
    if args.inputs.dtype.name not in ("bfloat16", "float32"):
        return f"needs bfloat16 or float32; `inputs` is {args.inputs.dtype}"
    if 0 in args.inputs.shape:
        return f"needs at least one row, token and feature; got {list(args.inputs.shape)}"
    if args.cu_seqlens is not None and args.cu_seqlens.shape[0] == 1:
        return "needs at least one sequence in `cu_seqlens`"
    return capacity.smem_refusal(max(layout.table_numbers(args, cfg) for cfg in config.guesses()))


kernel_registry.register(
    "mean_pooling",
    Platform.PALLAS,
    Backend.TPU,
    backward=bwd.backward,
    config=config,
    requires=_requires,
)(fwd.forward)
