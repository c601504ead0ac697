"""Calling foreign kernels, and the small arithmetic that goes with it."""

from ejkernel.callib._cuda_build import reversed_threads
from ejkernel.callib._cuda_call import cuda_call
from ejkernel.callib._ejit import ejit
from ejkernel.callib._sizes import cdiv, next_power_of_2, strides_from_shape
from ejkernel.callib._triton_call import triton_call
from ejkernel.callib._triton_jaxlib import has_scratch
from ejkernel.callib._triton_launch import Cost

__all__ = [
    "Cost",
    "cdiv",
    "cuda_call",
    "ejit",
    "has_scratch",
    "next_power_of_2",
    "reversed_threads",
    "strides_from_shape",
    "triton_call",
]
