"""Multi-head latent attention in plain JAX: every option, on every device."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.mla_attention import bwd, config, fwd

kernel_registry.register(
    "mla_attention", Platform.XLA, Backend.ANY, backward=bwd.backward, config=config
)(fwd.forward)
