"""Recurrent cells in plain JAX: every cell, on every device."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.recurrent import bwd, config, fwd

kernel_registry.register(
    "recurrent", Platform.XLA, Backend.ANY, backward=bwd.backward, config=config, version=2
)(fwd.forward)
