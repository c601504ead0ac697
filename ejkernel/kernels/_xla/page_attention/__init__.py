"""Attention over pages in plain JAX: every option, on every device."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.page_attention import config, fwd

kernel_registry.register("page_attention", Platform.XLA, Backend.ANY, config=config)(fwd.forward)
