"""Mean pooling in Triton: masks, chunks and packed sequences, on NVIDIA and AMD GPUs."""

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._shared import pooled_rows
from ejkernel.kernels._triton.mean_pooling import bwd, config, fwd

kernel_registry.register(
    "mean_pooling",
    Platform.TRITON,
    Backend.GPU,
    backward=bwd.backward,
    config=config,
    requires=pooled_rows.why_no_kernel,
)(fwd.forward)
