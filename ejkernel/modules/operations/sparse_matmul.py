"""`sparse_matmul`: a matrix given by some of its blocks, times a dense one."""

from typing import Any

from jaxtyping import Array, Float, Int

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.sparse_matmul import SparseMatmulConfig


def sparse_matmul(
    blocks: Float[Array, "nnz i i"],
    rows: Int[Array, "nnz"],
    cols: Int[Array, "nnz"],
    dense: Float[Array, "k n"],
    *,
    shape: tuple[int, int],
    platform: str = "auto",
    cfg: SparseMatmulConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "m n"]:
    """Multiplies a block-sparse matrix by a dense one, without writing the matrix out.

    out = A @ dense, where A is 0 but for A's block (rows[i], cols[i]), to which blocks[i] is added.

    Blocks at one place add up. Of a block that reaches beyond `shape`, only what is inside counts.

    Args:
      blocks: The blocks; differentiable. `sampled_matmul` is their gradient.
      rows: Row of each block, counted in blocks. Beyond the matrix: refused, or dropped if traced.
      cols: Column of each block, likewise.
      dense: The other factor; differentiable.
      shape: Rows and columns (m, k) of the matrix.
      platform: "auto", "triton", "pallas", "cuda", "cudnn" or "xla"; a name never falls back.
      cfg: Platform and backend in one value.
      mesh: Devices to split the columns of `dense` over, with the specs.
      in_specs: PartitionSpecs of the leading arrays in order, or by name; others are derived.
      out_specs: PartitionSpec of the output.

    Returns:
      The product in the dtype of `dense`.

    Raises:
      UnsupportedError: If `platform` is given and cannot serve the call.
    """
    return _op_kernel.call(SparseMatmul, locals())


class SparseMatmul(_op_kernel.OpKernel):
    """`sparse_matmul` for an executor."""

    op = "sparse_matmul"
    function = sparse_matmul
