"""Decoding over ranges of keys on TPUs: every option, in bfloat16 and float32."""

from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._pallas.tpu._blocks import capacity, heads
from ejkernel.kernels._pallas.tpu.page_attention import config
from ejkernel.kernels._pallas.tpu.ragged_decode_attention import fwd
from ejkernel.kernels._registry import Backend, Platform, kernel_registry

_ROWS = 32  # of a register in the narrowest dtype


def _requires(args: Any) -> str | None:
    return capacity.cached(args.query, args.key, args.value.shape[-1]) or capacity.smem_refusal(
        5 * args.key.shape[0]
    )


def _device_requires(args: Any, target: Target) -> str | None:
    _, length, groups, d = args.key.shape
    e = args.value.shape[-1]
    dense = all(heads.Heads(groups, width, args.key.dtype).dense for width in (d, e))
    if target.kind == "tpu" and not dense and length % _ROWS:
        return (
            f"needs a multiple of {_ROWS} keys a row where {groups} key heads of {args.key.dtype} "
            f"do not fill registers; got {length}"
        )
    return capacity.layout(target, d, e)


kernel_registry.register(
    "ragged_decode_attention",
    Platform.PALLAS,
    Backend.TPU,
    config=config,
    requires=_requires,
    device_requires=_device_requires,
)(fwd.forward)
