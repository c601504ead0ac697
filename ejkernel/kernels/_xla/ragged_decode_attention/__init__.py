"""Decoding over ranges of keys in plain JAX: every option, on every device."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.page_attention import config
from ejkernel.kernels._xla.ragged_decode_attention import fwd

kernel_registry.register("ragged_decode_attention", Platform.XLA, Backend.ANY, config=config)(
    fwd.forward
)
