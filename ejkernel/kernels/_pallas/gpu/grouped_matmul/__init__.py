"""Grouped matmul for Hopper in Mosaic GPU: bfloat16 and float16."""

from typing import Any

from ejkernel.kernels._pallas.gpu._blocks import probe
from ejkernel.kernels._pallas.gpu.grouped_matmul import config
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._specs.grouped_matmul import num_columns, out_dtype

_DTYPES = ("bfloat16", "float16")


def requires(args: Any) -> str | None:
    """What the kernels cannot do."""
    dtype, rhs = args.lhs.dtype, args.rhs.dtype
    if dtype.name not in _DTYPES or rhs != dtype:
        return f"needs operands of one dtype, bfloat16 or float16; got {dtype} and {rhs}"
    out = out_dtype(args)
    if out not in (dtype, "float32"):
        return f"needs preferred_element_type {dtype} or float32; got {out}"
    if 0 in (*args.lhs.shape, *args.rhs.shape):
        shapes = f"{list(args.lhs.shape)} and {list(args.rhs.shape)}"
        return f"needs at least one row, column and group; got {shapes}"
    k, n, unit = args.lhs.shape[-1], num_columns(args), config.UNIT
    if k % unit or n % unit:
        return f"needs k and n to be multiples of {unit}, which tiles of TMA are; got {k} and {n}"
    return probe.why_not()


def backward_requires(args: Any) -> str | None:
    """What only backward cannot do."""
    if out_dtype(args) != args.lhs.dtype and args.lhs.dtype.name == "float16":
        # two numbers of the operands' dtype are multiplied in place of one of the cotangent
        return "has no gradients of a float32 output of float16, which has too few exponents"
    return None


def forward(args: Any, cfg: config.Config) -> tuple[Any, Any]:
    """The output; imports Mosaic at the first call."""
    from ejkernel.kernels._pallas.gpu.grouped_matmul import fwd

    return fwd.forward(args, cfg)


def backward(args: Any, cfg: config.Config, *rest: Any) -> dict[str, Any]:
    """Gradients of the wanted arguments; imports Mosaic at the first call."""
    from ejkernel.kernels._pallas.gpu.grouped_matmul import bwd

    return bwd.backward(args, cfg, *rest)


kernel_registry.register(
    "grouped_matmul",
    Platform.PALLAS,
    Backend.GPU,
    requires=requires,
    device_requires=probe.device_requires,
    backward=backward,
    backward_requires=backward_requires,
    config=config,
    by_name="has not passed all of its tests on a GPU; ask for it with platform='pallas'",
)(forward)
