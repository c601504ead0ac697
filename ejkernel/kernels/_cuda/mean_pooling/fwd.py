"""Mean pooling forward in CUDA: one pass over the tokens, and one over slices of long rows."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.callib import cdiv, cuda_call
from ejkernel.kernels._cuda.mean_pooling import config, spans

SOURCE = pathlib.Path(__file__).with_name("mean_pooling.cu")


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array], tuple[()]]:
    """The means; there are no residuals."""
    x, width = args.inputs, config.width(args)
    tokens, mask = x.reshape(-1, width), None if args.mask is None else args.mask.reshape(-1)
    made = spans.rows(args)
    starts, stops = made.starts, made.stops
    if made.longest > cfg.slice_t:
        cut = spans.slices(made, cfg.slice_t, tokens.shape[0])
        # sums in float32 take the place of the tokens
        tokens = _sums(tokens, mask, (cut.starts, cut.stops, None), jnp.float32, cfg)
        mask, starts, stops = None, cut.first, cut.after
    means = _sums(tokens, mask, (starts, stops, made.counts), x.dtype, cfg)
    return (means.reshape(_shape(args)),), ()


def _sums(tokens: Any, mask: Any, runs: tuple[Any, ...], dtype: Any, cfg: config.Config) -> Any:
    """Sums over runs of tokens, or means where their counts are given."""
    shape = jax.ShapeDtypeStruct((runs[0].shape[0], tokens.shape[1]), dtype)
    (out,) = cuda_call(
        SOURCE, "mean_pooling_fwd", inputs=(tokens, mask, *runs), outputs=(shape,), **cfg.launch()
    )
    return out


def _shape(args: Any) -> tuple[int, ...]:
    """[rows, …], or [b, chunks, …] of chunks of a batch."""
    batch, t, *rest = args.inputs.shape
    if args.cu_seqlens is not None or args.chunk_size is None:
        return (-1, *rest)
    return (batch, cdiv(t, args.chunk_size), *rest)
