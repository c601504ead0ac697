"""Decoding over ranges of keys in Triton: every option but float64, on NVIDIA and AMD GPUs."""

from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton.page_attention import call, config
from ejkernel.kernels._triton.ragged_decode_attention import fwd


def _requires(args: Any) -> str | None:
    return call.requires(args.query, args.key, args.value.shape[-1])


def _device_requires(args: Any, target: Target) -> str | None:
    return call.device_requires(args.key, target)


kernel_registry.register(
    "ragged_decode_attention",
    Platform.TRITON,
    Backend.GPU,
    config=config,
    requires=_requires,
    device_requires=_device_requires,
)(fwd.forward)
