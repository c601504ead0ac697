"""`merge_attention_states`: attention over a union of keys from its parts."""

from typing import Any

from jaxtyping import Array, Float

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.merge_attention_states import MergeAttentionStatesConfig


def merge_attention_states(
    out_a: Float[Array, "b t h e"],
    lse_a: Float[Array, "b h t"],
    out_b: Float[Array, "b t h e"],
    lse_b: Float[Array, "b h t"],
    *,
    platform: str = "auto",
    cfg: MergeAttentionStatesConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Float[Array, "b t h e"], Float[Array, "b h t"]]:
    """Merges attention over two sets of keys into attention over both.

    out = (exp(lse_a) * out_a + exp(lse_b) * out_b) / (exp(lse_a) + exp(lse_b))

    Differentiable. A part that saw no key (lse -inf) changes nothing, whatever its output holds.

    Args:
      out_a: Output of the first part.
      lse_a: Log-sum-exp of its rows, float32.
      out_b: Output of the second part.
      lse_b: Log-sum-exp of its rows.
      platform: As in `flash_attention`.
      cfg: As in `flash_attention`; there is nothing to tune.
      mesh: Devices to split batch, tokens and heads over, as the specs say if given.
      in_specs: PartitionSpecs of the arrays in order, or by name.
      out_specs: PartitionSpecs of output and lse.

    Returns:
      The output in the dtype of `out_a`, and its lse.
    """
    return _op_kernel.call(MergeAttentionStates, locals())


class MergeAttentionStates(_op_kernel.OpKernel):
    """`merge_attention_states` for an executor."""

    op = "merge_attention_states"
    function = merge_attention_states
