"""Attention over given blocks in plain JAX: the selected branch of native sparse attention."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.apply_native_sparse_attention import bwd, config, fwd

kernel_registry.register(
    "apply_native_sparse_attention", Platform.XLA, Backend.ANY, backward=bwd.backward, config=config
)(fwd.forward)
