"""Gated linear attention in plain JAX: the chunks of the linear recurrence."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.gla import bwd, fwd
from ejkernel.kernels._xla.linear_recurrence import config

kernel_registry.register(
    "gla", Platform.XLA, Backend.ANY, backward=bwd.backward, config=config, version=2
)(fwd.forward)
