"""`ragged_decode_attention`: one query a row over a range of the row's keys."""

from typing import Any

from jaxtyping import Array, Float, Int, Shaped

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.ragged_decode_attention import RaggedDecodeAttentionConfig


def ragged_decode_attention(
    query: Float[Array, "b h d"] | Float[Array, "b 1 h d"],
    key: Shaped[Array, "b s g d"],
    value: Shaped[Array, "b s g e"],
    sequence_start: Int[Array, "b"],
    sequence_end: Int[Array, "b"],
    *,
    softmax_scale: float | Float[Array, ""] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    alibi_slopes: Float[Array, "h"] | None = None,
    k_scale: float | Float[Array, "..."] | None = None,
    v_scale: float | Float[Array, "..."] | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    platform: str = "auto",
    cfg: RaggedDecodeAttentionConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Array | tuple[Array, Array]:
    """Attention of one query a row over keys start <= j < end of that row.

    The query is at position end - 1. A row with an empty range gives 0 and lse -inf.

    Ranges may be traced, and are clamped to the existing keys; keys outside them may be NaN.
    There is no derivative.

    Args:
      query: Queries, with or without an axis of one token, which the output then has too.
      key: Keys, in the dtype of `query`, int8 or float8.
      value: Values; their head size may differ.
      sequence_start: First key of each row.
      sequence_end: One after the last key of each row.
      softmax_scale: A number or an array of shape (). Default: head size ** -0.5.
      sliding_window: Keys visible to the left of the query; an int or a pair, -1 no limit.
      logits_soft_cap: Scores become cap * tanh(scores / cap).
      softmax_aux: Sink logits in the denominator: [n], [1, n] (shared) or [h, n].
      alibi_slopes: Per head, times (key position - query position), added to the scores.
      k_scale: Keys are multiplied by it: a number, or one per key head. Default: 1.
      v_scale: The same for values.
      num_splits: A speed hint for kernels that split the keys of a row; affects rounding only.
      return_lse: Also return the log-sum-exp of each row, float32.
      platform: "auto", "triton", "pallas", "cuda", "cudnn" or "xla"; a name never falls back.
      cfg: Block sizes and platform; None lets the library choose.
      mesh: Devices to split rows and heads over, as `in_specs` and `out_specs` say if given.
      in_specs: PartitionSpecs of the leading arrays, or by name, for a query without token axis.
      out_specs: PartitionSpec of the output [b, h, e], or of output and lse [b, h].

    Returns:
      The output [b, h, e] in the dtype of `query`, or output and lse [b, h]; [b, 1, h, e] and
      [b, h, 1] when the query has a token axis.

    Raises:
      UnsupportedError: If `platform` is given and cannot serve the call.
    """
    return _op_kernel.call(RaggedDecodeAttention, locals())


class RaggedDecodeAttention(_op_kernel.OpKernel):
    """`ragged_decode_attention` for an executor."""

    op = "ragged_decode_attention"
    function = ragged_decode_attention
