"""`ragged_page_attention`: prefill and decode together, over keys in pages."""

from typing import Any

from jaxtyping import Array, Float, Int, Integer, Shaped

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.ragged_page_attention import RaggedPageAttentionConfig


def ragged_page_attention(
    queries: Float[Array, "n h d"],
    kv_pages: Shaped[Array, "p w g2 d"],
    context_lens: Int[Array, "i"],
    block_tables: Int[Array, "i m"],
    query_start_loc: Int[Array, "i1"],
    num_seqs: int | Integer[Array, "..."],
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
    cfg: RaggedPageAttentionConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "n h d"] | tuple[Float[Array, "n h d"], Float[Array, "n h"]]:
    """Causal attention of packed queries, any number a sequence, over a cache in pages.

    Sequence i owns queries query_start_loc[i] to query_start_loc[i + 1], the last of its
    context_lens[i] positions; their keys are in the pages already.

    Lengths, tables and `num_seqs` may be traced. Tokens of no sequence, and queries beyond their
    sequence's context, give 0. Values that no query sees may be NaN. There is no derivative.

    Args:
      queries: Queries of all sequences, one after another.
      kv_pages: Pages with keys at even and values at odd heads, in the dtype of `queries`, int8 or
        float8; see `pages_to_interleaved`.
      context_lens: Keys of each sequence, this step's included.
      block_tables: Pages of each sequence in order; ids are clamped to the pages there are.
      query_start_loc: First query of each sequence, and the end of the last.
      num_seqs: Number of sequences to compute; those after are ignored.
      softmax_scale: A number or an array of shape (). Default: head size ** -0.5.
      sliding_window: Keys visible to the left of a query; an int or a pair, -1 no limit.
      logits_soft_cap: Scores become cap * tanh(scores / cap).
      softmax_aux: Sink logits in the denominator: [n], [1, n] (shared) or [h, n].
      alibi_slopes: Per head, times (key position - query position), added to the scores.
      k_scale: Cached keys are multiplied by it: a number, or one per key head. Default: 1.
      v_scale: The same for values.
      num_splits: A speed hint for kernels that split the keys of a row; affects rounding only.
      return_lse: Also return the log-sum-exp of each row, float32.
      platform: "auto", "triton", "pallas", "cuda", "cudnn" or "xla"; a name never falls back.
      cfg: Block sizes and platform; None lets the library choose.
      mesh: Devices to split heads over, as `in_specs` and `out_specs` say if given.
      in_specs: PartitionSpecs of the leading arrays in order, or by name; others are derived. The
        heads of `kv_pages` are split like those of `queries`; a single key head stays whole.
      out_specs: PartitionSpec of the output, or of output and lse.

    Returns:
      The output in the dtype of `queries`, or output and lse.

    Raises:
      UnsupportedError: If `platform` is given and cannot serve the call.
    """
    return _op_kernel.call(RaggedPageAttention, locals())


class RaggedPageAttention(_op_kernel.OpKernel):
    """`ragged_page_attention` for an executor."""

    op = "ragged_page_attention"
    function = ragged_page_attention
