"""cuDNN's attention through its own forward and backward, with a float32 logsumexp."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._cudnn.flash_attention import private


def _mask_type(args: Any) -> Any:
    kinds = private.library().MaskType
    return kinds.CAUSAL if args.sliding_window[1] == 0 else kinds.NO_MASK


def _operands(args: Any) -> list[Any]:
    absent = jnp.zeros(0, args.query.dtype)
    bias = absent if args.bias is None else args.bias
    return [args.query, args.key, args.value, bias, *[absent] * 6]


def _options(args: Any, dbias: bool) -> dict[str, Any]:
    left, _ = args.sliding_window
    return {
        "scale": float(args.softmax_scale),
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (args.bias is not None, dbias),
        "mask_type": _mask_type(args),
        "layout": private.library().AttentionLayout.BTNH.value,
        "sliding_window_length": None if left is None else left + 1,
    }


def forward(args: Any, cfg: None) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Outputs (out, and lse when asked for) and residuals (lse)."""
    out, lse = private.forward(_operands(args), _options(args, dbias=False))
    return ((out, lse) if args.return_lse else (out,)), (lse,)


def backward(
    args: Any,
    cfg: None,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    options = _options(args, dbias="bias" in wanted)
    dout = cotangents[0].astype(args.query.dtype)
    grads = private.backward(_operands(args), residuals[0], outputs[0], dout, options)
    made: dict[str, jax.Array] = dict(zip(("query", "key", "value", "bias"), grads, strict=False))
    if "bias" in wanted:
        made["bias"] = made["bias"].astype(args.bias.dtype)
    return made
