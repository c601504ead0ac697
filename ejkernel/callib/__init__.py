"""Calling foreign kernels, and the small arithmetic that goes with it."""

from ejkernel.callib._ejit import ejit
from ejkernel.callib._sizes import cdiv, next_power_of_2, strides_from_shape

__all__ = ["cdiv", "ejit", "next_power_of_2", "strides_from_shape"]
