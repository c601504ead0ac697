"""`sampled_matmul`: some blocks of a product of dense matrices."""

from typing import Any

from jaxtyping import Array, Float, Int

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.sampled_matmul import SampledMatmulConfig


def sampled_matmul(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "k n"],
    rows: Int[Array, "nnz"],
    cols: Int[Array, "nnz"],
    block_size: int,
    *,
    platform: str = "auto",
    cfg: SampledMatmulConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "nnz i i"]:
    """Computes some blocks of a product, and nothing else of it.

    out[i] = (lhs @ rhs)[rows[i] * block_size : …, cols[i] * block_size : …]

    What a block holds beyond the product is 0.

    Args:
      lhs: Left factor; differentiable. `sparse_matmul` is its gradient.
      rhs: Right factor; differentiable.
      rows: Row of each block, counted in blocks. Beyond the product: refused, or 0 if traced.
      cols: Column of each block, likewise.
      block_size: Rows and columns of a block.
      platform: "auto", "triton", "pallas", "cuda", "cudnn" or "xla"; a name never falls back.
      cfg: Platform and backend in one value.
      mesh: Devices, with the specs; nothing can be split but by giving each its own places.
      in_specs: PartitionSpecs of the leading arrays in order, or by name; others are derived.
      out_specs: PartitionSpec of the output.

    Returns:
      The blocks in the dtype of `lhs`.

    Raises:
      UnsupportedError: If `platform` is given and cannot serve the call.
    """
    return _op_kernel.call(SampledMatmul, locals())


class SampledMatmul(_op_kernel.OpKernel):
    """`sampled_matmul` for an executor."""

    op = "sampled_matmul"
    function = sampled_matmul
