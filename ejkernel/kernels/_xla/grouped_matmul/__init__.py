"""Grouped matmul in plain JAX: a loop over blocks of rows, each of one group."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.grouped_matmul import bwd, config, fwd

kernel_registry.register(
    "grouped_matmul", Platform.XLA, Backend.ANY, backward=bwd.backward, config=config
)(fwd.forward)
