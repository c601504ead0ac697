"""`blocksparse_attention`: attention over the blocks that a mask lists, and no others."""

from typing import Any

from jaxtyping import Array, Float, Int, Shaped

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.blocksparse_attention import BlocksparseAttentionConfig
from ejkernel.ops import BwdParams, FwdParams
from ejkernel.types.block_mask import BlockMask


def blocksparse_attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s g d"],
    value: Float[Array, "b s g e"],
    sparsity_mask: Shaped[Array, "..."] | None = None,
    block_size: int = 64,
    *,
    bias: Float[Array, "#b #h #t #s"] | None = None,
    attention_mask: Shaped[Array, "#b #h #t #s"] | None = None,
    causal: bool = False,
    softmax_scale: float | Float[Array, ""] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    q_segment_ids: Int[Array, "b t"] | None = None,
    kv_segment_ids: Int[Array, "b s"] | None = None,
    mask_builder: BlockMask | None = None,
    return_lse: bool = False,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    platform: str = "auto",
    cfg: BlocksparseAttentionConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h e"] | tuple[Float[Array, "b t h e"], Float[Array, "b h t"]]:
    """Softmax attention over listed blocks of pairs; the others are neither read nor computed.

    out = softmax(cap(scale * query @ key.T) + bias, where=masks) @ value, where a query of block i
    sees a key of block j only if sparsity_mask[..., i, j].

    All masks are and-ed. Query i is at position s - t + i (bottom-right). A query that sees no
    key gives 0 and lse -inf. Values that no query sees may be NaN.

    Args:
      query: Queries; their heads must be a multiple of the key heads.
      key: Keys.
      value: Values; their head size may differ.
      sparsity_mask: Blocks that attend: [nq, nk], [h, nq, nk] or [b, h, nq, nk] (axes b and h may
        be 1), with nq = ceil(t / block_size), nk = ceil(s / block_size). May be traced.
      block_size: Queries and keys of a block; the last block may be partial.
      bias: Added to the scaled scores; differentiable, summed over its broadcast axes.
      attention_mask: Bool or integer, nonzero where a query may see a key; an additive mask is a
        `bias`.
      causal: See only keys at or before the query's position.
      softmax_scale: A number, or a differentiable array of shape (). Default: head size ** -0.5.
      sliding_window: Keys visible on each side besides the query's own; an int means both, -1 no
        limit.
      logits_soft_cap: Scores become cap * tanh(scores / cap).
      softmax_aux: Sink logits in the denominator: [n], [1, n] (shared) or [h, n]; differentiable.
      q_segment_ids: Tokens see each other where ids are equal; negative is padding.
      kv_segment_ids: The same for keys.
      mask_builder: A pattern of `ejkernel.modules.block_mask`, instead of `sparsity_mask`. With
        `causal` or `sliding_window` both may be left out: every block with a visible pair attends.
      return_lse: Also return the log-sum-exp of each row, float32, differentiable.
      fwd_params: Block sizes of the forward kernel; None lets the library choose.
      bwd_params: Block sizes of the backward kernel.
      platform: "auto", "triton", "pallas", "cuda", "cudnn" or "xla"; a name never falls back.
      cfg: Platform and block sizes in one value, instead of `fwd_params` and `bwd_params`.
      mesh: Devices to split batch and heads over, as `in_specs` and `out_specs` say if given.
      in_specs: PartitionSpecs of the leading arrays in order, or by name; others are derived.
      out_specs: PartitionSpec of the output, or of output and lse.

    Returns:
      The output in the dtype of `query`, or output and lse.

    Raises:
      UnsupportedError: If `platform` is given and cannot serve the call.
    """
    return _op_kernel.call(BlocksparseAttention, locals())


class BlocksparseAttention(_op_kernel.OpKernel):
    """`blocksparse_attention` for an executor."""

    op = "blocksparse_attention"
    function = blocksparse_attention
