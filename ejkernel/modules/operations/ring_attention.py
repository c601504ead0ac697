"""`ring_attention`: attention over a sequence that is split over devices."""

from typing import Any

from jaxtyping import Array, Float, Int, Integer, Shaped

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.ring_attention import RingAttentionConfig


def ring_attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s g d"],
    value: Float[Array, "b s g e"],
    axis_name: str = "ring",
    causal: bool = True,
    *,
    strategy: str = "auto",
    layout: str = "contiguous",
    attention_mask: Shaped[Array, "#b #h #t #columns"] | None = None,
    bias: Float[Array, "#b #h #t #columns"] | None = None,
    softmax_scale: float | Float[Array, ""] | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | Integer[Array, "..."] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    q_segment_ids: Int[Array, "b t"] | None = None,
    kv_segment_ids: Int[Array, "b s"] | None = None,
    alibi_slopes: Float[Array, "h"] | None = None,
    return_lse: bool = False,
    platform: str = "auto",
    cfg: RingAttentionConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h e"] | tuple[Float[Array, "b t h e"], Float[Array, "b h t"]]:
    """`flash_attention` over tokens that are split over the devices of a mesh axis.

    gather(ring_attention(query, key, value)) == flash_attention(*map(gather, (query, key, value)))

    Inside `shard_map`, arrays are this device's; with `mesh` they are whole, and the call makes its
    own `shard_map`. With neither, one device holds all tokens. Positions are those of the whole
    sequence: the last query is at the position of the last key. Pairs of blocks in which the causal
    mask or the window hides everything are not computed.

    Args:
      query: Queries; their heads must be a multiple of the key heads.
      key: Keys.
      value: Values; their head size may differ.
      axis_name: The mesh axis over which tokens are split.
      causal: See only keys at or before the query's position.
      strategy: "ring" passes keys around, "ulysses" exchanges tokens for heads, "allgather"
        collects all keys on each device; "auto" chooses (docs/ops/ring_attention.md).
      layout: How the tokens are stored: "contiguous", or "zigzag" as by `to_zigzag`, which shares
        causal work evenly. Nothing is reordered.
      attention_mask: Bool or integer, nonzero where a query may see a key; rows as stored, columns
        by the position of the key in the whole sequence.
      bias: Added to the scaled scores, laid out like `attention_mask`; differentiable.
      softmax_scale: A number, or a differentiable array of shape (). Default: head size ** -0.5.
      dropout_prob: Share of weights dropped; over several devices only with "ulysses".
      dropout_seed: 64-bit int, scalar or uint32[2]; the mask is that of `flash_attention`.
      sliding_window: Keys visible on each side besides the query's own; an int means both, -1 no
        limit.
      logits_soft_cap: Scores become cap * tanh(scores / cap).
      softmax_aux: Sink logits in the denominator: [n], [1, n] (shared) or [h, n]; differentiable.
      q_segment_ids: Tokens see each other where ids are equal; negative is padding.
      kv_segment_ids: The same for keys; they travel with them.
      alibi_slopes: Per head, times (key position - query position), added to the scores.
      return_lse: Also return the log-sum-exp of each row, float32, differentiable.
      platform: "auto", "triton", "pallas", "cuda", "cudnn" or "xla"; a name never falls back.
      cfg: Block sizes of the attention of each pair of blocks.
      mesh: Devices to split tokens, batch and heads over, as the specs say if given.
      in_specs: PartitionSpecs of the leading arrays in order, or by name; others are derived.
      out_specs: PartitionSpec of the output, or of output and lse.

    Returns:
      The output in the dtype of `query`, or output and lse, stored like `query`.

    Raises:
      ValueError: Inside a `shard_map` without the axis `axis_name`.
      UnsupportedError: If `platform` is given and cannot serve the call.
    """
    return _op_kernel.call(RingAttention, locals())


class RingAttention(_op_kernel.OpKernel):
    """`ring_attention` for an executor: `executor(RingAttention(), query, key, value, …)`."""

    op = "ring_attention"
    function = ring_attention
