"""Custom calls of our entries that `jax.export` does not promise to keep."""

from typing import Any

_TRITON = ("triton_kernel_call", "triton_kernel_call_ffi")
_CUDNN = tuple(
    f"__cudnn$fmha{bias}Softmax{dropout}{backward}"
    for bias in ("", "ScaleBias")
    for dropout in ("", "Dropout")
    for backward in ("", "Backward")
)


def export_checks() -> list[Any]:
    """What to pass as `disabled_checks` to export a program with Triton or cuDNN entries.

    Such a program runs where the same versions of JAX and its GPU plugin are installed: JAX does
    not promise that these calls mean the same in another. XLA and Pallas TPU entries need none.
    """
    from jax import export

    return [export.DisabledSafetyCheck.custom_call(name) for name in (*_TRITON, *_CUDNN)]
