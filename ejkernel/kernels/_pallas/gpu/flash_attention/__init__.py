"""Attention for Hopper in Mosaic GPU: bfloat16, head sizes 64, 128 and 192 with 128."""

from typing import Any

from ejkernel.kernels._pallas.gpu._blocks import probe
from ejkernel.kernels._pallas.gpu.flash_attention import config
from ejkernel.kernels._registry import Backend, Platform, kernel_registry

_HEAD_SIZES = ((64, 64), (128, 128), (192, 128))


def requires(args: Any) -> str | None:
    """What the kernels cannot do."""
    # float16 has too few exponents for weights above 1, which the fixed reference of a row gives
    if args.query.dtype.name != "bfloat16":
        return f"needs bfloat16; got {args.query.dtype}"
    d, e = args.query.shape[-1], args.value.shape[-1]
    if (d, e) not in _HEAD_SIZES:
        return f"needs head sizes 64, 128, or 192 with values of 128; got {d} and {e}"
    if 0 in (*args.query.shape, *args.key.shape):
        return "needs arrays that are not empty"
    if args.softmax_scale <= 0:
        return f"needs a positive softmax_scale; got {args.softmax_scale}"
    return probe.why_not()


def forward(args: Any, cfg: config.Config) -> tuple[Any, Any]:
    """Outputs, and the logsumexp for backward; imports Mosaic at the first call."""
    from ejkernel.kernels._pallas.gpu.flash_attention import fwd

    return fwd.forward(args, cfg)


def backward_requires(args: Any) -> str | None:
    """What only backward cannot do."""
    fields = ("q_segment_ids", "kv_segment_ids", "cum_seqlens_q", "cum_seqlens_k")
    if config.sums_in_order(args) and any(getattr(args, name) is not None for name in fields):
        return "has no gradients in a fixed order, nor for heads of 192, with segments"
    return None


def backward(args: Any, cfg: config.Config, *rest: Any) -> dict[str, Any]:
    """Gradients of the wanted arguments; imports Mosaic at the first call."""
    from ejkernel.kernels._pallas.gpu.flash_attention import bwd

    return bwd.backward(args, cfg, *rest)


kernel_registry.register(
    "flash_attention",
    Platform.PALLAS,
    Backend.GPU,
    honours={
        *("causal", "softmax_scale", "sliding_window", "logits_soft_cap", "softmax_aux"),
        *("return_lse", "deterministic"),
        *("q_segment_ids", "kv_segment_ids", "cum_seqlens_q", "cum_seqlens_k"),
    },
    requires=requires,
    device_requires=probe.device_requires,
    backward=backward,
    backward_requires=backward_requires,
    config=config,
)(forward)
