"""Attention of packed queries over pages on TPUs: every option, in bfloat16 and float32."""

from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._pallas.tpu._blocks import capacity, heads
from ejkernel.kernels._pallas.tpu.ragged_page_attention import config, fwd
from ejkernel.kernels._registry import Backend, Platform, kernel_registry


def _requires(args: Any) -> str | None:
    d, blocks = args.queries.shape[-1], args.block_tables.shape[1]
    return (
        capacity.cached(args.queries, args.kv_pages, d)
        or capacity.pages(args.block_tables, args.kv_pages.shape[1])
        or capacity.smem_refusal(config.table_numbers(args) + capacity.page_numbers(blocks))
    )


def _device_requires(args: Any, target: Target) -> str | None:
    _, size, double, d = args.kv_pages.shape
    dense = heads.Heads(double, d, args.kv_pages.dtype).dense
    return (None if dense else capacity.page_rows(target, size)) or capacity.layout(target, d)


kernel_registry.register(
    "ragged_page_attention",
    Platform.PALLAS,
    Backend.TPU,
    config=config,
    requires=_requires,
    device_requires=_device_requires,
)(fwd.forward)
