"""A block-sparse matrix times a dense one in plain JAX."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.sparse_matmul import bwd, fwd

kernel_registry.register("sparse_matmul", Platform.XLA, Backend.ANY, backward=bwd.backward)(
    fwd.forward
)
