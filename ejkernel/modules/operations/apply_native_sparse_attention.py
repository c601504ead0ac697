"""`apply_native_sparse_attention`: causal attention over given blocks of keys."""

from typing import Any

from jaxtyping import Array, Float, Int

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.apply_native_sparse_attention import ApplyNativeSparseAttentionConfig
from ejkernel.ops import BwdParams, FwdParams


def apply_native_sparse_attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b t g d"],
    value: Float[Array, "b t g e"],
    block_indices: Int[Array, "b t g k"],
    block_counts: int | Int[Array, "b t g"] | None = None,
    block_size: int = 64,
    softmax_scale: float | Float[Array, ""] | None = None,
    cu_seqlens: Int[Array, "n1"] | None = None,
    *,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    platform: str = "auto",
    cfg: ApplyNativeSparseAttentionConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h e"]:
    """Causal attention of each query over the keys of the blocks in its list.

    The selected branch of `native_sparse_attention`, on blocks that are given. Blocks are numbered
    in their sequence. A query whose list has no block at or before its own gives 0.

    Args:
      query: Queries; their heads must be a multiple of the key heads.
      key: Keys.
      value: Values; their head size may differ.
      block_indices: Lists of blocks, in any order; -1 is none, a later block than the query's own
        is not seen, one listed twice counts once.
      block_counts: How many leading entries of a list count. Default: all.
      block_size: Tokens of a block.
      softmax_scale: A number, or a differentiable array of shape (). Default: head size ** -0.5.
      cu_seqlens: With batch 1, where packed sequences begin and end; tokens of none give 0.
      fwd_params: `q_blocksize` is the queries of a tile forward; None lets the library choose.
      bwd_params: The same backward.
      platform: "auto", "triton", "pallas", "cuda", "cudnn" or "xla"; a name never falls back.
      cfg: Platform and block sizes in one value, instead of `fwd_params` and `bwd_params`.
      mesh: Devices to split batch and heads over, as `in_specs` and `out_specs` say if given.
      in_specs: PartitionSpecs of the leading arrays in order, or by name; others are derived.
      out_specs: PartitionSpec of the output.

    Returns:
      The output in the dtype of `query`.

    Raises:
      UnsupportedError: If `platform` is given and cannot serve the call.
    """
    return _op_kernel.call(ApplyNativeSparseAttention, locals())


class ApplyNativeSparseAttention(_op_kernel.OpKernel):
    """`apply_native_sparse_attention` for an executor."""

    op = "apply_native_sparse_attention"
    function = apply_native_sparse_attention
