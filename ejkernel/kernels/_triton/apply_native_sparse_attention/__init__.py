"""Attention over given blocks in Triton: the selected branch of native sparse attention."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton import native_sparse_attention as nsa
from ejkernel.kernels._triton.apply_native_sparse_attention import call
from ejkernel.kernels._triton.native_sparse_attention import config

kernel_registry.register(
    "apply_native_sparse_attention",
    Platform.TRITON,
    Backend.GPU,
    backward=call.backward,
    config=config,
    version=1,
    requires=nsa.requires,
)(call.forward)
