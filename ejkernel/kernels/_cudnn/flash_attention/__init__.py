"""cuDNN's attention: a rival with few options, chosen where measurement favours it."""

from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._cudnn.flash_attention import fused, private, public
from ejkernel.kernels._registry import Backend, Platform, kernel_registry


def _common(args: Any) -> str | None:
    """What cuDNN cannot do, found on the device (docs/measured.md)."""
    if args.query.dtype.name not in ("bfloat16", "float16"):
        return f"needs bfloat16 or float16; got {args.query.dtype}"
    d, e = args.query.shape[-1], args.value.shape[-1]
    if d % 8 or e % 8 or max(d, e) > 256:
        return f"needs head sizes that are multiples of 8, at most 256; got {d} and {e}"
    if 0 in (*args.query.shape, *args.key.shape, *args.value.shape):
        return "needs arrays that are not empty"
    if args.softmax_scale <= 0:
        return f"gives nan for a softmax_scale that is not positive; got {args.softmax_scale}"
    if args.q_positions is not None or args.kv_positions is not None:
        return "needs the usual positions"
    left, right = args.sliding_window
    t, s = args.query.shape[1], args.key.shape[1]
    if right not in (None, 0) or (left is not None and right is None):
        return f"needs a window that ends at the query; got {args.sliding_window}"
    if right == 0 and t != s:
        return f"aligns causal masks top-left: needs equal lengths; got {t} and {s}"
    return None


def _device_requires(args: Any, target: Target) -> str | None:
    """What JAX's own function checks before it lowers cuDNN's attention."""
    if target.capability is None:  # a device that is only named
        return "needs a GPU of NVIDIA" if target.model.startswith("AMD") else None
    try:
        capability = tuple(int(x) for x in target.capability.split("."))
    except ValueError:
        return f"needs a GPU of NVIDIA; this is {target.model} ({target.capability})"
    if capability < (8, 0):
        return f"needs compute capability 8.0 or later; this is {target.capability}"
    d, e = args.query.shape[-1], args.value.shape[-1]
    if capability < (9, 0) and (max(d, e) > 128 or d != e):
        return (
            "before compute capability 9.0 needs head sizes of at most 128, the same for values; "
            f"got {d} and {e}"
        )
    if d != e and (version := private.cudnn_version()) is not None and version < 91000:
        return f"needs cuDNN 9.10 for values of another size; this is {version}"
    return None


def _fused_requires(args: Any) -> str | None:
    if private.library() is None:
        return "this version of JAX has other cuDNN primitives"
    if args.bias is not None:
        t, s = args.query.shape[1], args.key.shape[1]
        if args.bias.shape[2:] != (t, s) or t % 2 or s % 2:
            return f"needs a bias over all pairs, of even lengths; got {args.bias.shape}"
        if args.bias.dtype != args.query.dtype:
            return f"needs a bias of the query's dtype; got {args.bias.dtype}"
    return _common(args)


def _public_requires(args: Any) -> str | None:
    if private.library() is not None:
        return "gives way to cudnn/gpu, which has a backward of its own"
    return _common(args)


def _backward_requires(args: Any) -> str | None:
    return "has no gradient of the logsumexp" if args.return_lse else None


kernel_registry.register(
    "flash_attention",
    Platform.CUDNN,
    Backend.GPU,
    version=3,
    # lengths are not in it: what lies beyond them leaks when it is nan
    honours={"causal", "softmax_scale", "sliding_window", "bias", "return_lse"},
    requires=_fused_requires,
    device_requires=_device_requires,
    backward=fused.backward,
    backward_requires=_backward_requires,
)(fused.forward)
kernel_registry.register(
    "flash_attention",
    Platform.CUDNN,
    Backend.GPU,
    priority=-1,
    honours={"causal", "softmax_scale", "sliding_window"},
    requires=_public_requires,
    device_requires=_device_requires,
    derivative="jax",
)(public.forward)
