"""`grouped_matmul`: products of groups of rows, each with a matrix of its own."""

from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.grouped_matmul import GroupedMatmulConfig


def grouped_matmul(
    lhs: Float[Array, "m k"] | Float[Array, "b g m k"],
    rhs: Float[Array, "g k n"] | Float[Array, "b g k n"],
    group_sizes: Int[Array, "groups"] | None = None,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    group_offset: int | Integer[Array, "..."] | None = None,
    existing_out: Float[Array, "m n"] | None = None,
    platform: str = "auto",
    cfg: GroupedMatmulConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "m n"] | Float[Array, "b g m n"]:
    """Multiplies consecutive groups of rows, each by its own matrix, as a mixture of experts does.

    out[rows of group i] = lhs[rows of group i] @ rhs[i]

    The first `group_sizes[0]` rows are group 0, the next ones group 1, and so on; groups may be
    empty. Rows after the last group give 0 and may be NaN. With four axes, groups are an axis, and
    the result is `lhs @ rhs`.

    Args:
      lhs: Rows, sorted by group.
      rhs: One matrix a group; its float dtype may differ from that of `lhs`.
      group_sizes: Rows of each group, summing to at most m; may be traced. Only for two axes.
      transpose_rhs: The matrices of `rhs` are [n, k].
      preferred_element_type: Dtype of the output. Default: the one both operands promote
        to. Sums are always in float32 at least.
      group_offset: The group of `rhs[0]`, when `group_sizes` also counts groups held elsewhere;
        their rows are not computed.
      existing_out: Values of the rows that are not computed, instead of 0; differentiable.
      platform: "auto", "triton", "pallas", "cuda", "cudnn" or "xla"; a name never falls back.
      cfg: Platform and backend in one value.
      mesh: Devices to split columns over (with four axes: also b, g and m), with the specs.
      in_specs: PartitionSpecs of the leading arrays in order, or by name; others are derived.
      out_specs: PartitionSpec of the output.

    Returns:
      The products.

    Raises:
      UnsupportedError: If `platform` is given and cannot serve the call.
    """
    return _op_kernel.call(GroupedMatmul, locals())


class GroupedMatmul(_op_kernel.OpKernel):
    """`grouped_matmul` for an executor."""

    op = "grouped_matmul"
    function = grouped_matmul
