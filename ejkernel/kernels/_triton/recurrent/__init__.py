"""Recurrent cells in Triton: every option but functions as activations, on NVIDIA and AMD GPUs."""

from typing import Any

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton._blocks import activations
from ejkernel.kernels._triton.recurrent import bwd, config, fwd


def _requires(args: Any) -> str | None:
    """What the kernels cannot do."""
    if args.inputs.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"needs bfloat16, float16 or float32; got {args.inputs.dtype}"
    if args.w_hh.shape[2] < 1:
        return "needs at least one feature of the state"
    for name in ("activation", "gate_activation"):
        if getattr(args, name) not in activations.NAMES:
            return f"compiles activations by name; `{name}` is a function, which only XLA can trace"
    return None


kernel_registry.register(
    "recurrent",
    Platform.TRITON,
    Backend.GPU,
    backward=bwd.backward,
    config=config,
    version=2,
    requires=_requires,
)(fwd.forward)
