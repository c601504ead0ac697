"""Attention over pages on TPUs: every option, in bfloat16 and float32."""

from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._pallas.tpu._blocks import capacity
from ejkernel.kernels._pallas.tpu.page_attention import config, fwd
from ejkernel.kernels._registry import Backend, Platform, kernel_registry


def _requires(args: Any) -> str | None:
    return capacity.cached(args.query, args.key_cache, args.value_cache.shape[-1]) or (
        capacity.pages(args.block_tables, args.key_cache.shape[2])
    )


def _device_requires(args: Any, target: Target) -> str | None:
    return capacity.page_rows(target, args.key_cache.shape[2]) or capacity.layout(
        target, args.key_cache.shape[-1], args.value_cache.shape[-1]
    )


kernel_registry.register(
    "page_attention",
    Platform.PALLAS,
    Backend.TPU,
    config=config,
    requires=_requires,
    device_requires=_device_requires,
)(fwd.forward)
