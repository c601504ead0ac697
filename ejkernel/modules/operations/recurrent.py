"""`recurrent`: LSTM, GRU and plain RNN layers."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.recurrent import RecurrentConfig

State = Float[Array, "b d"] | Float[Array, "2 b d"]


def recurrent(
    inputs: Float[Array, "b t i"],
    hidden: State | tuple[State, State] | None,
    weights: dict[str, Array],
    cell_type: str = "lstm",
    *,
    bidirectional: bool = False,
    activation: str | Callable[[Array], Array] = "tanh",
    gate_activation: str | Callable[[Array], Array] = "sigmoid",
    lengths: Int[Array, "b"] | None = None,
    reverse: bool = False,
    platform: str = "auto",
    cfg: RecurrentConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Float[Array, "b t e"], State | tuple[State, State]]:
    """A recurrent layer, with the weights and the order of gates that torch and cuDNN have.

    x, y = w_ih @ inputs[t] + b_ih, w_hh @ h + b_hh
    lstm: i, f, g, o = split(x + y);  c = gate(f) * c + gate(i) * act(g);  h = gate(o) * act(c)
    gru:  r, z = gate(xr + yr), gate(xz + yz);  h = (1 - z) * act(xn + r * yn) + z * h
    rnn:  h = act(x + y)

    Inputs, states and all weights are differentiable, by outputs and by the final state.

    Args:
      inputs: The steps of each sequence.
      hidden: The state before the first step, of an lstm the pair (h, c), stacked with
        `bidirectional`; None for zeros.
      weights: `w_ih` and `w_hh`, with the rows of all gates, and the biases `b_ih` and `b_hh`, if
        there are any; with `bidirectional` also those of the other direction, the same names and
        `_reverse`. Or with torch's names, `weight_ih_l0`, `bias_ih_l0` and so on.
      cell_type: "lstm", "gru" or "rnn".
      bidirectional: Run both ways; outputs are concatenated, states stacked.
      activation: "tanh", "sigmoid", "relu", "softsign", "identity" or a function that acts on each
        element; nothing that it closes over gets a gradient.
      gate_activation: The same for gates; an rnn has none.
      lengths: Real steps of each sequence; those beyond give 0, keep the state and may be NaN.
      reverse: Run from the last step, with `lengths` from the last real one, to the first.
      platform: "auto", "triton", "pallas", "cuda", "cudnn" or "xla"; a name never falls back.
      cfg: Platform and backend in one value.
      mesh: Devices to split the batch over, as `in_specs` and `out_specs` say if given.
      in_specs: PartitionSpecs of `inputs` and `hidden` in order, or by name; others are derived.
      out_specs: PartitionSpecs of the output, of h and, for an lstm, of c.

    Returns:
      The outputs h of all steps in the dtype of `inputs`, and the final state, which has the form
      and dtype of `hidden`.

    Raises:
      UnsupportedError: If `platform` is given and cannot serve the call.
    """
    return _op_kernel.call(Recurrent, locals())


class Recurrent(_op_kernel.OpKernel):
    """`recurrent` for an executor: `executor(Recurrent(), inputs, hidden, weights, …)`."""

    op = "recurrent"
    function = recurrent
