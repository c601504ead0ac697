"""cuDNN's attention through its own forward and backward, with a float32 logsumexp."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._cudnn.flash_attention import private

_BIAS = 3  # its place among the operands


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


def _run(fn: Callable[..., Sequence[Any]], operands: Sequence[Any], dbias: bool) -> tuple[Any, ...]:
    """Runs cuDNN; an axis of `vmap` joins the batch. JAX's own rule sums a bias over its lanes."""
    run = jax.custom_batching.custom_vmap(lambda *xs: tuple(fn(*xs)))

    @run.def_vmap
    def _(size: int, has_axis: Sequence[bool], *xs: Any) -> tuple[Any, Any]:
        rows = xs[0].shape[int(has_axis[0])]

        def fold(place: int, x: Any, has: bool) -> Any:
            lead = x.shape[int(has)]
            whole = place == _BIAS and not has and lead == 1 and not dbias
            if whole or x.ndim - int(has) == 1:  # serves all rows, or is absent
                return x
            x = x if has else x[None]
            x = jnp.broadcast_to(x, (size, rows, *x.shape[2:]))
            return x.reshape(size * rows, *x.shape[2:])

        folded = [fold(i, x, h) for i, (x, h) in enumerate(zip(xs, has_axis, strict=True))]
        outs = [x.reshape(size, rows, *x.shape[1:]) for x in _run(fn, folded, dbias)]
        if dbias and xs[_BIAS].shape[int(has_axis[_BIAS])] == 1:  # each lane has its own sum
            total = outs[-1].astype(jnp.float32).sum(1, keepdims=True)
            outs[-1] = total.astype(outs[-1].dtype)
        return tuple(outs), (True,) * len(outs)

    return run(*operands)


def forward(args: Any, cfg: None) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Outputs (out, and lse when asked for) and residuals (lse)."""
    options = _options(args, dbias=False)
    run = lambda *operands: private.forward(operands, options)
    out, lse = _run(run, _operands(args), dbias=False)
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
    run = lambda *xs: private.backward(xs[:-3], xs[-3], xs[-2], xs[-1], options)
    dout = cotangents[0].astype(args.query.dtype)
    operands = [*_operands(args), residuals[0], outputs[0], dout]
    grads = _run(run, operands, dbias="bias" in wanted)
    made: dict[str, jax.Array] = dict(zip(("query", "key", "value", "bias"), grads, strict=False))
    if "bias" in wanted:
        made["bias"] = made["bias"].astype(args.bias.dtype)
    return made
