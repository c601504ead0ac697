"""`mean_pooling`: means over tokens."""

from typing import Any

from jaxtyping import Array, Float, Int, Shaped

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.mean_pooling import MeanPoolingConfig


def mean_pooling(
    inputs: Float[Array, "b t d"] | Float[Array, "b t h d"],
    mask: Shaped[Array, "b t"] | None = None,
    *,
    cu_seqlens: Int[Array, "n1"] | None = None,
    chunk_size: int | None = None,
    platform: str = "auto",
    cfg: MeanPoolingConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "..."]:
    """Means over tokens: of whole rows, of chunks, or of packed sequences.

    out = sum(inputs * mask, axis=1) / sum(mask, axis=1)

    A mean of no token is 0. Tokens that do not count may be NaN.

    Args:
      inputs: Tokens, with or without heads.
      mask: True or nonzero where a token counts; not with `cu_seqlens`.
      cu_seqlens: Offsets of n sequences packed into one row (batch 1); tokens outside of them do
        not count.
      chunk_size: Tokens of a chunk; the last chunk of a row or sequence is divided by its real
        length.
      platform: "auto", "triton", "pallas", "cuda", "cudnn" or "xla"; a name never falls back.
      cfg: Platform and backend in one value.
      mesh: Devices to split batch, heads and features over, as the specs say if given.
      in_specs: PartitionSpecs of `inputs` and `mask` in order, or by name; others are derived.
      out_specs: PartitionSpec of the output.

    Returns:
      Means in the dtype of `inputs`: [b, …]; with `chunk_size` [b, chunks, …]; with `cu_seqlens`
      [n, …]; with both [t // chunk_size + n, …], the chunks of all sequences in order and then
      zeros.

    Raises:
      UnsupportedError: If `platform` is given and cannot serve the call.
    """
    return _op_kernel.call(MeanPooling, locals())


class MeanPooling(_op_kernel.OpKernel):
    """`mean_pooling` for an executor."""

    op = "mean_pooling"
    function = mean_pooling
