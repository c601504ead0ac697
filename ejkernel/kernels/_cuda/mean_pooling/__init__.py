"""Mean pooling in CUDA: masks, chunks and packed sequences, on NVIDIA GPUs."""

from ejkernel.kernels._cuda import _device
from ejkernel.kernels._cuda.mean_pooling import bwd, config, fwd
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._shared import pooled_rows

kernel_registry.register(
    "mean_pooling",
    Platform.CUDA,
    Backend.GPU,
    backward=bwd.backward,
    config=config,
    requires=pooled_rows.why_no_kernel,
    device_requires=_device.requires,
    by_name="is built by nvcc when first called, and no faster than Triton's; ask for it with "
    "platform='cuda'",
)(fwd.forward)
