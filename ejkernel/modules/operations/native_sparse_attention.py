"""`native_sparse_attention`: compressed, selected and sliding attention, gated."""

from typing import Any

from jaxtyping import Array, Float, Int

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.native_sparse_attention import NativeSparseAttentionConfig
from ejkernel.ops import BwdParams, FwdParams


def native_sparse_attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b t g d"],
    value: Float[Array, "b t g e"],
    g_cmp: Float[Array, "b t h"] | None = None,
    g_slc: Float[Array, "b t h"] | None = None,
    g_swa: Float[Array, "b t h"] | None = None,
    block_indices: Int[Array, "b t g k"] | None = None,
    block_counts: int | Int[Array, "b t g"] = 16,
    block_size: int = 64,
    window_size: int = 0,
    softmax_scale: float | Float[Array, ""] | None = None,
    cu_seqlens: Int[Array, "n1"] | None = None,
    *,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    platform: str = "auto",
    cfg: NativeSparseAttentionConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h e"]:
    """Causal attention over block means, the most important blocks, and the latest keys.

    out = g_cmp * compressed + g_slc * selected + g_swa * window

    A gate of None leaves its branch out; without gates the output is the selected branch. Keys are
    cut into blocks, from the start of each sequence. *Compressed*: attention over the mean keys and
    values of the full blocks that end at or before the query. *Selected*: attention over the keys
    of the query's own block and of the blocks with the largest compressed weights, summed over the
    query heads of a key head; ties go to the lower index. *Window*: attention over the latest keys.
    A branch that sees no key gives 0.

    Args:
      query: Queries; their heads must be a multiple of the key heads.
      key: Keys.
      value: Values; their head size may differ.
      g_cmp: Gate of the compressed branch; differentiable, as are the others.
      g_slc: Gate of the selected branch.
      g_swa: Gate of the window.
      block_indices: Blocks to attend to instead of the important ones, numbered in their sequence;
        -1 is none, one listed twice counts once, the own block is not added.
      block_counts: Blocks of a query, its own counted, at least 1; with lists, an array says how
        many of their leading entries count.
      block_size: Tokens of a block.
      window_size: Keys of the window, the query's own position counted.
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
    return _op_kernel.call(NativeSparseAttention, locals())


class NativeSparseAttention(_op_kernel.OpKernel):
    """`native_sparse_attention` for an executor: `executor(NativeSparseAttention(), query, …)`."""

    op = "native_sparse_attention"
    function = native_sparse_attention
