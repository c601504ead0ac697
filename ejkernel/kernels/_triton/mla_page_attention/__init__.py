"""Latent attention over pages in Triton: every option but float64, on NVIDIA and AMD GPUs."""

from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton.mla_page_attention import config, fwd
from ejkernel.kernels._triton.page_attention import call

_MOST_LATENT, _MOST_ROPE = 512, 128


def _requires(args: Any) -> str | None:
    """What the kernels cannot do."""
    latent, rope = args.q_nope.shape[-1], args.q_pe.shape[-1]
    if not (1 <= latent <= _MOST_LATENT and 1 <= rope <= _MOST_ROPE):
        return (
            f"needs latent vectors of 1 to {_MOST_LATENT} and rope parts of 1 to {_MOST_ROPE}; "
            f"got {latent} and {rope}"
        )
    return call.requires_dtypes(args.q_nope, args.kv_pages)


def _device_requires(args: Any, target: Target) -> str | None:
    return call.device_requires(args.kv_pages, target)


kernel_registry.register(
    "mla_page_attention",
    Platform.TRITON,
    Backend.GPU,
    config=config,
    requires=_requires,
    device_requires=_device_requires,
)(fwd.forward)
