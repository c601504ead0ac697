"""Attention of packed queries over pages in Triton: every option but float64, on GPUs."""

from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton.page_attention import call
from ejkernel.kernels._triton.ragged_page_attention import config, fwd


def _requires(args: Any) -> str | None:
    return call.requires(args.queries, args.kv_pages, args.kv_pages.shape[-1])


def _device_requires(args: Any, target: Target) -> str | None:
    return call.device_requires(args.kv_pages, target)


kernel_registry.register(
    "ragged_page_attention",
    Platform.TRITON,
    Backend.GPU,
    config=config,
    requires=_requires,
    device_requires=_device_requires,
)(fwd.forward)
