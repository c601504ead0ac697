"""Lightning attention in plain JAX: the chunks of the linear recurrence."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.lightning_attention import bwd, fwd
from ejkernel.kernels._xla.linear_recurrence import config

kernel_registry.register(
    "lightning_attention",
    Platform.XLA,
    Backend.ANY,
    backward=bwd.backward,
    config=config,
    version=2,
)(fwd.forward)
