"""`flash_attention`: exact attention in linear memory."""

from typing import Any

from jaxtyping import Array, Float, Int, Integer, Shaped

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.flash_attention import FlashAttentionConfig
from ejkernel.ops import BwdParams, FwdParams
from ejkernel.types import MaskInfo


def flash_attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s g d"],
    value: Float[Array, "b s g e"],
    attention_mask: Shaped[Array, "#b #h #t #s"] | None = None,
    bias: Float[Array, "#b #h #t #s"] | None = None,
    causal: bool = False,
    softmax_scale: float | Float[Array, ""] | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | Integer[Array, "..."] | None = None,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    cum_seqlens_q: Int[Array, "n1"] | None = None,
    cum_seqlens_k: Int[Array, "n1"] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    q_segment_ids: Int[Array, "b t"] | None = None,
    kv_segment_ids: Int[Array, "b s"] | None = None,
    alibi_slopes: Float[Array, "h"] | None = None,
    mask_info: MaskInfo | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    platform: str = "auto",
    cfg: FlashAttentionConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h e"] | tuple[Float[Array, "b t h e"], Float[Array, "b h t"]]:
    """Softmax attention, exact, with memory linear in the lengths, forward and backward.

    out = softmax(cap(scale * query @ key.T) + bias + alibi, where=masks) @ value

    Masks are and-ed. Without lengths, query i is at position s - t + i (bottom-right). A query
    that sees no key gives 0 and lse -inf. Padding may hold NaN.

    Args:
      query: Queries; their heads must be a multiple of the key heads.
      key: Keys.
      value: Values; their head size may differ.
      attention_mask: Bool or integer, nonzero where a query may see a key; an additive mask is a
        `bias`.
      bias: Added to the scaled scores; differentiable, summed over its broadcast axes.
      causal: See only keys at or before the query's position.
      softmax_scale: A number, or a differentiable array of shape (). Default: head size ** -0.5.
      dropout_prob: Share of weights dropped, in [0, 1).
      dropout_seed: 64-bit int, scalar or uint32[2]; the mask is the same on every backend.
      fwd_params: Block sizes of the forward kernel; None lets the library choose.
      bwd_params: Block sizes of the backward kernel.
      sliding_window: Keys visible on each side besides the query's own; an int means both, -1 no
        limit.
      logits_soft_cap: Scores become cap * tanh(scores / cap).
      cum_seqlens_q: Row lengths of a batch as [b + 1] sums, or, with batch 1, packed sequences.
      cum_seqlens_k: The same for keys; one of the two serves both when t == s.
      softmax_aux: Sink logits in the denominator: [n], [1, n] (shared) or [h, n]; differentiable.
      q_segment_ids: Tokens see each other where ids are equal; negative is padding.
      kv_segment_ids: The same for keys.
      alibi_slopes: Per head, times (key position - query position), added to the scores.
      mask_info: Masks, ids, positions and lengths in one value.
      return_lse: Also return the log-sum-exp of each row, float32, differentiable.
      deterministic: Refuse kernels whose results may differ from run to run.
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
    return _op_kernel.call(FlashAttention, locals())


class FlashAttention(_op_kernel.OpKernel):
    """`flash_attention` for an executor: `executor(FlashAttention(), query, key, value, …)`."""

    op = "flash_attention"
    function = flash_attention
