"""Attention over pages in Triton: every option but float64, on NVIDIA and AMD GPUs."""

from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton.page_attention import call, config, fwd


def _requires(args: Any) -> str | None:
    return call.requires(args.query, args.key_cache, args.value_cache.shape[-1])


def _device_requires(args: Any, target: Target) -> str | None:
    return call.device_requires(args.key_cache, target)


kernel_registry.register(
    "page_attention",
    Platform.TRITON,
    Backend.GPU,
    config=config,
    requires=_requires,
    device_requires=_device_requires,
)(fwd.forward)
