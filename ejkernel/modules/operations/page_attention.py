"""`page_attention`: one query a sequence over keys in pages."""

from typing import Any

from jaxtyping import Array, Float, Int, Shaped

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.page_attention import PageAttentionConfig


def page_attention(
    query: Float[Array, "b h d"],
    key_cache: Shaped[Array, "p g w d"],
    value_cache: Shaped[Array, "p g w e"],
    context_lens: Int[Array, "b"],
    block_tables: Int[Array, "b m"],
    softmax_scale: float | Float[Array, ""] | None = None,
    block_size: int | None = None,
    *,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    alibi_slopes: Float[Array, "h"] | None = None,
    k_scale: float | Float[Array, "..."] | None = None,
    v_scale: float | Float[Array, "..."] | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    platform: str = "auto",
    cfg: PageAttentionConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b h e"] | tuple[Float[Array, "b h e"], Float[Array, "b h"]]:
    """Attention of one query a sequence, the newest token, over a cache in pages.

    Key j of sequence b is key_cache[block_tables[b, j // w], :, j % w], for j < context_lens[b];
    the query is at position context_lens[b] - 1. A sequence of length 0 gives 0 and lse -inf.

    Lengths and tables may be traced. Unused pages and slots, and table entries beyond a length, may
    hold any value. There is no derivative.

    Args:
      query: Queries; their heads must be a multiple of the key heads.
      key_cache: Pages of keys, in the dtype of `query`, int8 or float8.
      value_cache: Pages of values; their head size may differ.
      context_lens: Keys of each sequence; at most what its table has room for.
      block_tables: Pages of each sequence in order; ids are clamped to the pages there are.
      softmax_scale: A number or an array of shape (). Default: head size ** -0.5.
      block_size: Must be the page size when given.
      sliding_window: Keys visible to the left of the query; an int or a pair, -1 no limit.
      logits_soft_cap: Scores become cap * tanh(scores / cap).
      softmax_aux: Sink logits in the denominator: [n], [1, n] (shared) or [h, n].
      alibi_slopes: Per head, times (key position - query position), added to the scores.
      k_scale: Cached keys are multiplied by it: a number, or one per key head. Default: 1.
      v_scale: The same for values.
      num_splits: A speed hint for kernels that split the keys of a row; affects rounding only.
      return_lse: Also return the log-sum-exp of each row, float32.
      platform: "auto", "triton", "pallas", "cuda", "cudnn" or "xla"; a name never falls back.
      cfg: Block sizes and platform; None lets the library choose.
      mesh: Devices to split sequences and heads over, as `in_specs` and `out_specs` say if given.
      in_specs: PartitionSpecs of the leading arrays in order, or by name; others are derived.
      out_specs: PartitionSpec of the output, or of output and lse.

    Returns:
      The output in the dtype of `query`, or output and lse.

    Raises:
      UnsupportedError: If `platform` is given and cannot serve the call.
    """
    return _op_kernel.call(PageAttention, locals())


class PageAttention(_op_kernel.OpKernel):
    """`page_attention` for an executor."""

    op = "page_attention"
    function = page_attention
