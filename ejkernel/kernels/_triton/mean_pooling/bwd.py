"""Mean pooling backward in Triton: each token that counts takes its share of a cotangent."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.callib import Cost, cdiv, triton_call
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.mean_pooling import config, fwd, kernels


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[()],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """The gradient of `inputs`."""
    width, made, x = config.width(args), fwd.cut(args, cfg), args.inputs
    counts, unit = None, _launch.unit(width)
    if args.mask is not None and made.spans.SLICED:  # a program sees a part of its row's mask
        size = made.spans.size
        mask = jnp.pad(args.mask, ((0, 0), (0, made.spans.chunks * size - x.shape[1])))
        counts = mask.reshape(-1, size).sum(axis=1, dtype=jnp.int32)
    found = triton_call(
        kernels.mean_pooling_bwd_kernel,
        inputs={
            "dout": cotangents[0],
            "mask": args.mask,
            "counts": counts,
            "spans": made.spans,
            "width": width // unit,
        },
        outputs={"dinputs": jax.ShapeDtypeStruct(x.shape, x.dtype)},
        grid=(made.segments * cdiv(width, cfg.block_w),),
        cost=Cost(bytes_accessed=x.size * x.dtype.itemsize),
        **cfg.launch(),
        UNIT=unit,
        BT=cfg.block_t,
        BW=cfg.block_w,
    )
    return {"inputs": found["dinputs"]}
