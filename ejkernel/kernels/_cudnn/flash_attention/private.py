"""The private names of JAX behind its cuDNN attention, all in one place.

JAX's public function hides the float32 logsumexp and has no backward of its own; the two primitives
below have both. tests/kernels/test_cudnn.py holds the names to the JAX versions that the package
supports; where they are missing, only the public function is used.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

_KNOWN = {
    "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets",
    "page_table_k", "page_table_v", "score_mod_args", "scale", "seed", "dropout_rate",
    "variadic_args", "mask_type", "layout", "sliding_window_length", "score_mod",
    "cudnn_version", "return_residual",
}  # fmt: skip


@functools.cache
def library() -> Any:
    """The module with the primitives; None where this JAX has others."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as module

        rule = inspect.signature(module._dot_product_attention_fwd_rule).parameters
        names = ("_dot_product_attention_fwd_p_wrapper", "_dot_product_attention_bwd_p_wrapper")
        found = all(hasattr(module, name) for name in names)
    except (ImportError, AttributeError):
        return None
    return module if found and set(rule) <= _KNOWN else None


@functools.cache
def cudnn_version() -> int | None:
    """The version of cuDNN that JAX runs with, as 91000 for 9.10; None where it does not tell."""
    try:
        from jax._src.lib import cuda_versions

        return int(cuda_versions.cudnn_get_version())
    except (ImportError, AttributeError, RuntimeError):  # no plugin here
        return None


@functools.cache
def _extra() -> dict[str, Any]:
    """Parameters that newer versions want."""
    rule = inspect.signature(library()._dot_product_attention_fwd_rule).parameters
    return {"score_mod": None} if "score_mod" in rule else {}


def forward(operands: Sequence[Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """Out [b, t, h, e] and lse float32 [b, h, t]; operands as the primitive has them."""
    primitive = library()._dot_product_attention_fwd_p_wrapper
    out, lse = primitive.bind(*operands, **options, **_extra(), is_training=True)
    return out, lse


def backward(
    operands: Sequence[Any], lse: Any, out: Any, dout: Any, options: dict[str, Any]
) -> list[Any]:
    """dq, dk, dv, and dbias where the options ask for it."""
    primitive = library()._dot_product_attention_bwd_p_wrapper
    return primitive.bind(*operands, lse, out, dout, **options, **_extra())
