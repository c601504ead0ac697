"""`linear_recurrence`: linear attention with gates of every kind."""

from typing import Any

from jaxtyping import Array, Float, Int

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.linear_recurrence import LinearRecurrenceConfig
from ejkernel.ops import BwdParams, FwdParams


def linear_recurrence(
    query: Float[Array, "b t hq d"],
    key: Float[Array, "b t hk d"],
    value: Float[Array, "b t hv e"],
    *,
    g: Float[Array, "b t h"] | None = None,
    gk: Float[Array, "b t h d"] | None = None,
    gv: Float[Array, "b t h e"] | None = None,
    g_gamma: Float[Array, "h"] | None = None,
    softmax_scale: float | Float[Array, ""] | None = None,
    initial_state: Float[Array, "n h d e"] | None = None,
    reverse: bool = False,
    cu_seqlens: Int[Array, "n1"] | None = None,
    return_state: bool = False,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    platform: str = "auto",
    cfg: LinearRecurrenceConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h e"] | tuple[Float[Array, "b t h e"], Float[Array, "n h d e"]]:
    """A linear recurrence of matrix states with gates, in time and memory linear in the tokens.

    h[t] = exp(g[t] + g_gamma) * diag(exp(gk[t])) @ h[t-1] @ diag(exp(gv[t])) + outer(k[t], v[t])
    out[t] = h[t].T @ (scale * q[t])

    Gates are logarithms, of any strength; all of them are differentiable, as are the states.
    Queries, keys and values may each have any number of heads that divides the largest, h; head i
    of n serves the h // n heads from i * (h // n). Gates, states and output have h.

    Args:
      query: Queries.
      key: Keys.
      value: Values; their head size may differ.
      g: Log gates of the whole state.
      gk: Log gates of its rows, one for each element of a key.
      gv: Log gates of its columns, one for each element of a value.
      g_gamma: Log decay of each head at every step.
      softmax_scale: A number, or a differentiable array of shape (). Default: head size ** -0.5.
      initial_state: The state before the first token, of each row or packed sequence.
      reverse: Run from the last token to the first.
      cu_seqlens: With batch 1, where packed sequences begin and end; tokens of none give 0.
      return_state: Also return the last state, float32, differentiable.
      fwd_params: `q_blocksize` is the tokens of a chunk forward; None lets the library choose.
      bwd_params: The same backward.
      platform: "auto", "triton", "pallas", "cuda", "cudnn" or "xla"; a name never falls back.
      cfg: Platform and block sizes in one value, instead of `fwd_params` and `bwd_params`.
      mesh: Devices to split batch and heads over, as `in_specs` and `out_specs` say if given.
      in_specs: PartitionSpecs of the leading arrays in order, or by name; others are derived.
      out_specs: PartitionSpec of the output, or of output and state.

    Returns:
      The output in the dtype of `query`, or output and state.

    Raises:
      UnsupportedError: If `platform` is given and cannot serve the call.
    """
    return _op_kernel.call(LinearRecurrence, locals())


class LinearRecurrence(_op_kernel.OpKernel):
    """`linear_recurrence` for an executor: `executor(LinearRecurrence(), query, key, value, …)`."""

    op = "linear_recurrence"
    function = linear_recurrence
