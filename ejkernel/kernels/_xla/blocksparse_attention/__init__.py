"""Block-sparse attention in plain JAX: every option, on every device, masks known or traced."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.blocksparse_attention import bwd, config, fwd

kernel_registry.register(
    "blocksparse_attention", Platform.XLA, Backend.ANY, backward=bwd.backward, config=config
)(fwd.forward)
