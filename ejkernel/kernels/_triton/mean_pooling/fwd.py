"""Mean pooling forward in Triton: one pass over the tokens, and one over slices of long rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.callib import Cost, cdiv, next_power_of_2, triton_call
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.mean_pooling import config, kernels, spans

_SLICES, _COLUMNS = 128, 32  # in a tile of the second pass: rows of 128 bytes


class Cut(NamedTuple):
    """How a call's tokens are cut."""

    spans: spans.Spans
    rows: int  # of the output
    slices: int  # at most
    segments: int  # at most, with those of tokens of no sequence


def cut(args: Any, cfg: config.Config) -> Cut:
    batch, t = args.inputs.shape[:2]
    # a chunk beyond the last token would hold nothing
    size = t if args.chunk_size is None else min(args.chunk_size, t)
    chunks, num_sequences, sequences = cdiv(t, size), 0, args.cu_seqlens
    length = min(cfg.slice_t, size)
    slices = cdiv(size, length)
    rows = batch * chunks
    most, outside, sliced = rows * slices, 0, slices > 1
    if sequences is not None:
        num_sequences, outside = sequences.shape[0] - 1, 2
        sliced = args.chunk_size is None
        rows, length = num_sequences, length if sliced else size
        if not sliced:
            rows += t // args.chunk_size
        # each sequence may end with a slice that is shorter
        most = t // length + num_sequences
    found = spans.Spans(
        cuts=sequences,
        num_sequences=num_sequences,
        tokens=t,
        size=size,
        chunks=chunks,
        length=length,
        slices=slices,
        SLICED=sliced,
        PADDED=next_power_of_2(num_sequences + 2),
    )
    return Cut(found, rows, most if sliced else rows, most + outside)


def out_shape(args: Any, made: Cut) -> tuple[int, ...]:
    """[rows, …], or [b, chunks, …] of chunks of a batch."""
    rest = args.inputs.shape[2:]
    if args.cu_seqlens is None and args.chunk_size is not None:
        return (args.inputs.shape[0], made.spans.chunks, *rest)
    return (made.rows, *rest)


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array], tuple[()]]:
    """The means; there are no residuals."""
    width, made, x = config.width(args), cut(args, cfg), args.inputs
    unit = _launch.unit(width)
    means = jax.ShapeDtypeStruct((made.rows, width), x.dtype)
    sums, counts = jax.ShapeDtypeStruct((made.slices, width), jnp.float32), None
    if args.mask is not None and made.spans.SLICED:
        counts = jax.ShapeDtypeStruct((made.slices,), jnp.int32)
    found = triton_call(
        kernels.mean_pooling_fwd_kernel,
        inputs={"inputs": x, "mask": args.mask, "spans": made.spans, "width": width // unit},
        outputs={"out": sums if made.spans.SLICED else means, "counts": counts},
        grid=(made.slices * cdiv(width, cfg.block_w),),
        cost=Cost(bytes_accessed=x.size * x.dtype.itemsize),
        **cfg.launch(),
        UNIT=unit,
        BT=cfg.block_t,
        BW=cfg.block_w,
    )
    if made.spans.SLICED:
        block_w = min(_COLUMNS, next_power_of_2(width))
        found = triton_call(
            kernels.mean_pooling_slices_kernel,
            inputs={
                "sums": found["out"],
                "counts": found["counts"],
                "spans": made.spans,
                "width": width // unit,
            },
            outputs={"out": means},
            grid=(made.rows * cdiv(width, block_w),),
            num_warps=4,
            UNIT=unit,
            BS=min(_SLICES, next_power_of_2(made.slices)),
            BW=block_w,
        )
    return (found["out"].reshape(out_shape(args, made)),), ()
