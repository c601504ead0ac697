"""Mean pooling backward in CUDA: each token that counts takes its share of a cotangent."""

from typing import Any

import jax

from ejkernel.callib import cuda_call
from ejkernel.kernels._cuda.mean_pooling import config, fwd, spans


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[()],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """The gradient of `inputs`."""
    x, width = args.inputs, config.width(args)
    dout, counts = cotangents[0].reshape(-1, width), spans.rows(args).counts
    (found,) = cuda_call(
        fwd.SOURCE,
        "mean_pooling_bwd",
        inputs=(dout, spans.row_of_token(args), counts),
        outputs=(jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], width), x.dtype),),
        block_t=cfg.slice_t,
        **cfg.launch(),
    )
    return {"inputs": found.reshape(x.shape)}
