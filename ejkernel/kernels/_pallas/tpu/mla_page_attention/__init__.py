"""Latent attention over pages on TPUs: every option, in bfloat16 and float32."""

from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._pallas.tpu._blocks import capacity, tiles
from ejkernel.kernels._pallas.tpu.mla_page_attention import fwd
from ejkernel.kernels._pallas.tpu.ragged_page_attention import config
from ejkernel.kernels._registry import Backend, Platform, kernel_registry

_MOST = 1024  # columns of a latent vector and of a rope part


def _requires(args: Any) -> str | None:
    blocks = args.block_tables.shape[1]
    if args.q_pe.dtype != args.q_nope.dtype:
        return f"needs `q_pe` in the dtype of `q_nope`; got {args.q_pe.dtype}"
    return (
        capacity.cached(args.q_nope, args.kv_pages, args.q_pe.shape[-1], _MOST)
        or capacity.pages(args.block_tables, args.kv_pages.shape[1])
        or capacity.smem_refusal(config.table_numbers(args) + capacity.page_numbers(blocks))
    )


def _device_requires(args: Any, target: Target) -> str | None:
    if target.kind != "tpu":
        return None
    _, size, width = args.kv_pages.shape
    latent = args.q_nope.shape[-1]
    if latent % tiles.LANES:
        return f"needs latent vectors of a multiple of {tiles.LANES}; got {latent}"
    if width % tiles.LANES:
        return (
            f"needs rows of `kv_pages` of a multiple of {tiles.LANES}, since XLA keeps others in "
            f"an order that would have to be copied; got {latent} + {width - latent}. Pad `q_pe` "
            "and the rope part of the pages with zeros"
        )
    return capacity.page_rows(target, size) or config.refusal(args, target)


kernel_registry.register(
    "mla_page_attention",
    Platform.PALLAS,
    Backend.TPU,
    config=config,
    requires=_requires,
    device_requires=_device_requires,
)(fwd.forward)
