"""Mean pooling in plain JAX."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.mean_pooling import bwd, fwd

kernel_registry.register("mean_pooling", Platform.XLA, Backend.ANY, backward=bwd.backward)(
    fwd.forward
)
