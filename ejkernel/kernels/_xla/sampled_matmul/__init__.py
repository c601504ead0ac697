"""Some blocks of a product of dense matrices in plain JAX."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.sampled_matmul import bwd, fwd

kernel_registry.register("sampled_matmul", Platform.XLA, Backend.ANY, backward=bwd.backward)(
    fwd.forward
)
