"""`mla_page_attention`: prefill and decode together, over latent vectors in pages."""

from typing import Any

from jaxtyping import Array, Float, Int, Integer, Shaped

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.mla_page_attention import MLAPageAttentionConfig


def mla_page_attention(
    q_nope: Float[Array, "n h l"],
    q_pe: Float[Array, "n h r"],
    kv_pages: Shaped[Array, "p w lr"],
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
    num_splits: int | None = None,
    return_lse: bool = False,
    platform: str = "auto",
    cfg: MLAPageAttentionConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "n h l"] | tuple[Float[Array, "n h l"], Float[Array, "n h"]]:
    """Causal latent attention of packed queries over a cache of latent vectors in pages.

    score = scale * (q_nope . page[:l] + q_pe . page[l:]); out = sum of softmax(score) * page[:l]

    This is `mla_attention` with both up-projections taken out: `q_nope` is the query times w_kc,
    and the caller multiplies the output by w_vc. Sequence i owns queries query_start_loc[i] to
    query_start_loc[i + 1], the last of its context_lens[i] positions.

    Lengths, tables and `num_seqs` may be traced. Tokens of no sequence, and queries beyond their
    sequence's context, give 0. Values that no query sees may be NaN. There is no derivative.

    Args:
      q_nope: Queries in latent space, all sequences one after another.
      q_pe: Their rope part.
      kv_pages: Pages of latent vectors followed by the rope part of the keys, in the dtype of
        `q_nope`, int8 or float8.
      context_lens: Keys of each sequence, this step's included.
      block_tables: Pages of each sequence in order; ids are clamped to the pages there are.
      query_start_loc: First query of each sequence, and the end of the last.
      num_seqs: Number of sequences to compute; those after are ignored.
      softmax_scale: Required. Models want (d + r) ** -0.5 with the head size d before the
        projection to latent vectors, which no argument shows.
      sliding_window: Keys visible to the left of a query; an int or a pair, -1 no limit.
      logits_soft_cap: Scores become cap * tanh(scores / cap).
      softmax_aux: Sink logits in the denominator: [n], [1, n] (shared) or [h, n].
      alibi_slopes: Per head, times (key position - query position), added to the scores.
      k_scale: One number that pages are multiplied by, as keys and as values. Default: 1.
      num_splits: A speed hint for kernels that split the keys of a row; affects rounding only.
      return_lse: Also return the log-sum-exp of each row, float32.
      platform: "auto", "triton", "pallas", "cuda", "cudnn" or "xla"; a name never falls back.
      cfg: Block sizes and platform; None lets the library choose.
      mesh: Devices to split heads over, as `in_specs` and `out_specs` say if given.
      in_specs: PartitionSpecs of the leading arrays in order, or by name; others are derived.
      out_specs: PartitionSpec of the output, or of output and lse.

    Returns:
      The output in latent space and in the dtype of `q_nope`, or output and lse.

    Raises:
      ValueError: If `softmax_scale` is missing.
      UnsupportedError: If `platform` is given and cannot serve the call.
    """
    return _op_kernel.call(MLAPageAttention, locals())


class MLAPageAttention(_op_kernel.OpKernel):
    """`mla_page_attention` for an executor."""

    op = "mla_page_attention"
    function = mla_page_attention
