"""Recurrent cells on TPUs, in bfloat16 and float32: every option but functions as activations."""

from typing import Any

from ejkernel.kernels._pallas.tpu.recurrent import bwd, cells, config, fwd
from ejkernel.kernels._registry import Backend, Platform, kernel_registry


def _requires(args: Any) -> str | None:
    """What the kernels cannot do."""
    for name, array in args.arrays().items():
        if array.dtype.name not in ("bfloat16", "float32", "int32"):
            return f"needs bfloat16 or float32, which a TPU multiplies; `{name}` is {array.dtype}"
    if 0 in (*args.inputs.shape, args.w_hh.shape[2]):
        return "needs at least one row, step, input and feature to launch a kernel for"
    for name in ("activation", "gate_activation"):
        if getattr(args, name) not in cells.ACTIVATIONS:
            return (
                f"knows activations by name; `{name}` is a function, which Mosaic may not compile"
            )
    return None


kernel_registry.register(
    "recurrent",
    Platform.PALLAS,
    Backend.TPU,
    backward=bwd.backward,
    config=config,
    requires=_requires,
    device_requires=config.refusal,
)(fwd.forward)
