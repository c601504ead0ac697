"""Every implementation of every operation, and the registry that knows them."""

from ejkernel.kernels._registry import Backend, KernelEntry, Platform, kernel_registry
from ejkernel.kernels._spec import Case, OpArgs, OpSpec, op_args, static

__all__ = [
    "Backend",
    "Case",
    "KernelEntry",
    "OpArgs",
    "OpSpec",
    "Platform",
    "kernel_registry",
    "op_args",
    "static",
]
