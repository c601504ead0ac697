"""Writing into pages and attention over them in plain JAX: every option, on every device."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.ragged_page_attention import config
from ejkernel.kernels._xla.ragged_page_attention_v3 import fwd

kernel_registry.register("ragged_page_attention_v3", Platform.XLA, Backend.ANY, config=config)(
    fwd.forward
)
