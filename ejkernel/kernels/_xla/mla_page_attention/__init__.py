"""Latent attention of packed queries over pages in plain JAX: every option, on every device."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.mla_page_attention import config, fwd

kernel_registry.register("mla_page_attention", Platform.XLA, Backend.ANY, config=config)(
    fwd.forward
)
