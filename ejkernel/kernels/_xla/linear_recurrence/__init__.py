"""The linear recurrence in chunks in plain JAX: every gate, on every device."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.linear_recurrence import bwd, config, fwd

kernel_registry.register(
    "linear_recurrence", Platform.XLA, Backend.ANY, backward=bwd.backward, config=config, version=2
)(fwd.forward)
