"""`mla_attention`: multi-head latent attention."""

from typing import Any

from jaxtyping import Array, Float, Int, Integer, Shaped

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.mla_attention import MLAAttentionConfig
from ejkernel.ops import BwdParams, FwdParams


def mla_attention(
    query: Float[Array, "b t h dq"],
    key_value: Float[Array, "b s l"],
    w_kc: Float[Array, "l g d"],
    w_vc: Float[Array, "l g e"],
    b_q: Float[Array, "..."] | None = None,
    b_k: Float[Array, "b s r"] | None = None,
    *,
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
    q_segment_ids: Int[Array, "b t"] | None = None,
    kv_segment_ids: Int[Array, "b s"] | None = None,
    alibi_slopes: Float[Array, "h"] | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    platform: str = "auto",
    cfg: MLAAttentionConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h e"] | tuple[Float[Array, "b t h e"], Float[Array, "b h t"]]:
    """Attention whose keys and values are projections of one latent vector a token.

    key = concat(key_value @ w_kc, b_k); value = key_value @ w_vc
    out = flash_attention(concat(query, b_q), key, value, …)

    Keys and values of all heads are never in memory at once. Masks, positions, empty rows and
    values that no query sees are as in `flash_attention`.

    Args:
      query: Queries; with `b_k` and without `b_q`, their last r elements are the rope part.
      key_value: Latent vectors, shared by all heads.
      w_kc: Up-projection to keys; query heads must be a multiple of its heads.
      w_vc: Up-projection to values.
      b_q: Rope part of the queries, [b, t, h, r] or, shared by all heads, [b, t, r].
      b_k: Rope part of the keys, shared by all heads.
      attention_mask: Bool or integer, nonzero where a query may see a key; an additive mask is a
        `bias`.
      bias: Added to the scaled scores; differentiable, summed over its broadcast axes.
      causal: See only keys at or before the query's position.
      softmax_scale: Multiplies the whole score; a number, or a differentiable array of shape
        (). Default: (d + r) ** -0.5.
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
    return _op_kernel.call(MLAAttention, locals())


class MLAAttention(_op_kernel.OpKernel):
    """`mla_attention` for an executor: `executor(MLAAttention(), query, key_value, …)`."""

    op = "mla_attention"
    function = mla_attention


flash_mla = mla_attention
