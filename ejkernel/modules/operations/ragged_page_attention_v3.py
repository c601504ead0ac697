"""`ragged_page_attention_v3`: a serving step that writes its tokens into the pages it reads."""

from typing import Any

from jaxtyping import Array, Float, Int, Shaped

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.ragged_page_attention_v3 import RaggedPageAttentionV3Config


def ragged_page_attention_v3(
    queries: Float[Array, "n h d"],
    keys: Float[Array, "n g d"],
    values: Float[Array, "n g d"],
    kv_pages: Shaped[Array, "p w g2 d"],
    kv_lens: Int[Array, "i"],
    block_tables: Int[Array, "i m"],
    query_start_loc: Int[Array, "i1"],
    distribution: Int[Array, "three"],
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
    donate_cache: bool = False,
    platform: str = "auto",
    cfg: RaggedPageAttentionV3Config | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Array, ...]:
    """Writes the tokens of a step into their pages, then attends like `ragged_page_attention`.

    Token query_start_loc[i] + j of sequence i goes to its position kv_lens[i] - count + j, with
    count = query_start_loc[i + 1] - query_start_loc[i]: page block_tables[i, position // w], slot
    position % w. Attention reads tokens as the pages hold them.

    Inside a jit that donates `kv_pages` they are changed in place. Outside a jit they are copied,
    with a warning, unless `donate_cache` is set. There is no derivative.

    Args:
      queries: Queries of all sequences, one after another.
      keys: Keys of the same tokens, in the dtype of `queries`.
      values: Values of the same tokens.
      kv_pages: Pages with keys at even and values at odd heads, in the dtype of `queries`, int8 or
        float8; see `pages_to_interleaved`.
      kv_lens: Keys of each sequence, this step's included; at most what its table holds.
      block_tables: Pages of each sequence in order. A token whose page does not exist is not
        written; where two tokens go to one place either may win.
      query_start_loc: First token of each sequence, and the end of the last.
      distribution: (i, j, k): sequences before i have one query, up to j have all their keys in
        this step, up to k have any; those after k do not count. Only k changes the result.
      softmax_scale: A number or an array of shape (). Default: head size ** -0.5.
      sliding_window: Keys visible to the left of a query; an int or a pair, -1 no limit.
      logits_soft_cap: Scores become cap * tanh(scores / cap).
      softmax_aux: Sink logits in the denominator: [n], [1, n] (shared) or [h, n].
      alibi_slopes: Per head, times (key position - query position), added to the scores.
      k_scale: What cached keys are multiplied by, and new ones divided by before they are rounded
        to the dtype of the pages: a number, or one a key head. Default: 1.
      v_scale: The same for values.
      num_splits: A speed hint for kernels that split the keys of a row; affects rounding only.
      return_lse: Also return the log-sum-exp of each row, float32.
      donate_cache: Outside a jit, write in place; the array passed cannot be used afterwards.
      platform: "auto", "triton", "pallas", "cuda", "cudnn" or "xla"; a name never falls back.
      cfg: Block sizes and platform; None lets the library choose.
      mesh: Devices to split heads over, as `in_specs` and `out_specs` say if given.
      in_specs: PartitionSpecs of the leading arrays in order, or by name; others are derived. The
        heads of `kv_pages` are split like those of `queries`; a single key head is refused.
      out_specs: PartitionSpecs of output and pages, and of lse.

    Returns:
      The output in the dtype of `queries` and the pages, and lse when asked for.

    Raises:
      UnsupportedError: If `platform` is given and cannot serve the call.
    """
    return _op_kernel.call(RaggedPageAttentionV3, locals())


class RaggedPageAttentionV3(_op_kernel.OpKernel):
    """`ragged_page_attention_v3` for an executor."""

    op = "ragged_page_attention_v3"
    function = ragged_page_attention_v3
