"""`recurrent`: its arguments, their checks and canonical form."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ejkernel.kernels import _spec, _types
from ejkernel.kernels._specs import _common, _recurrent_cases, _work_linear
from ejkernel.ops.core.sharding import Layout
from ejkernel.ops.core.types import BwdParams, FwdParams

OP = "recurrent"
GATES = _recurrent_cases.GATES
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "softsign": jax.nn.soft_sign,
    "identity": lambda x: x,
}
# Columns that a cell keeps of a step for its backward, in units of the state's columns.
KEPT = {"lstm": 4, "gru": 4, "rnn": 1}
_TORCH_NAMES = {
    "w_ih": "weight_ih_l0",
    "w_hh": "weight_hh_l0",
    "b_ih": "bias_ih_l0",
    "b_hh": "bias_hh_l0",
}
_STATES = {"ranks": (3,), "hint": " Or [2, b, d] with `bidirectional`."}


def _part() -> Any:
    """An array that `hidden` or `weights` is taken apart into."""
    return dataclasses.field(metadata={"internal": True})


@_spec.op_args
class RecurrentArgs(_spec.OpArgs):
    """Arguments of `recurrent`; `p` is 1, or 2 directions, and `m` the gates times `d`."""

    inputs: Float[Array, "b t i"]
    hidden: Float[Array, "b d"] | Float[Array, "p b d"] = dataclasses.field(metadata=_STATES)
    weights: Any  # None: taken apart into the arrays at the end
    cell_type: str = _spec.static(default="lstm")
    bidirectional: bool = _spec.static(default=False)
    activation: Any = _spec.static(default="tanh")
    gate_activation: Any = _spec.static(default="sigmoid")
    lengths: Int[Array, "b"] | None = None
    reverse: bool = _spec.static(default=False)
    cell: Float[Array, "b d"] | Float[Array, "p b d"] | None = dataclasses.field(
        metadata=_STATES | {"internal": True}
    )
    w_ih: Float[Array, "p m i"] = _part()
    w_hh: Float[Array, "p m d"] = _part()
    b_ih: Float[Array, "p m"] | None = _part()
    b_hh: Float[Array, "p m"] | None = _part()


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """How to run `recurrent`; what is None is chosen by the library."""

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
    platform: str | None = None
    backend: str | None = None


def function(activation: Any) -> Callable[[jax.Array], jax.Array]:
    """The function of an activation given by name or as a callable."""
    return ACTIVATIONS[activation] if isinstance(activation, str) else activation


def directions(args: RecurrentArgs) -> tuple[bool, ...]:
    """For each direction, whether it runs from the last step to the first."""
    return (False, True) if args.bidirectional else (args.reverse,)


def unpack(values: dict[str, Any]) -> dict[str, Any]:
    """`hidden` and `weights` as plain arrays; a call that is unpacked already passes."""
    if "weights" not in values:
        return values
    call = {name: value for name, value in values.items() if name not in ("weights", "hidden")}
    options = [call[name] for name in ("cell_type", "bidirectional", "reverse")]
    if not hasattr(call["inputs"], "dtype") or any(isinstance(x, jax.core.Tracer) for x in options):
        return call  # the check of types says more
    _types.check_library(f"`{OP}`: `inputs`", call["inputs"])
    cell_type = call["cell_type"]
    if not isinstance(cell_type, str) or cell_type not in GATES:
        raise ValueError(f"`{OP}`: `cell_type` must be one of {[*GATES]}; got {cell_type!r}.")
    if call["reverse"] and call["bidirectional"]:
        raise ValueError(
            f"`{OP}`: `reverse` must be False with `bidirectional`, which runs both ways; got True."
        )
    parts = _take_weights(values["weights"], cell_type, bool(call["bidirectional"]))
    if call["inputs"].ndim != 3:
        return call | parts
    features, known = call["inputs"].shape[2], parts["w_ih"].shape[2]
    if features != known:
        raise ValueError(
            f"`{OP}`: `weights[{_spelling(values['weights'])['w_ih']!r}]` must take the {features} "
            f"features of `inputs`; got {known}."
        )
    return call | parts | _take_states(call, values["hidden"], parts["w_hh"].shape[2])


def _take_weights(weights: Any, cell_type: str, bidirectional: bool) -> dict[str, jax.Array]:
    """The weights of all directions, stacked."""
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"`{OP}`: `weights` must be a dict with `w_ih`, `w_hh` and, if there are biases, "
            f"`b_ih`, `b_hh`; got {type(weights).__name__}."
        )
    spelling = _spelling(weights)
    endings = ("", "_reverse") if bidirectional else ("",)
    present = [name for name in weights if weights[name] is not None]
    biases = [n for n in ("b_ih", "b_hh") if any(spelling[n] + e in present for e in endings)]
    names = ["w_ih", "w_hh", *biases]
    expected = [spelling[name] + ending for ending in endings for name in names]
    if missing := [name for name in expected if name not in present]:
        hint = " Reverse weights end in `_reverse`." if bidirectional else ""
        raise ValueError(f"`{OP}`: `weights` must have {expected}; {missing} missing.{hint}")
    if extra := [name for name in present if name not in expected]:
        hint = " Reverse weights need `bidirectional=True`." if not bidirectional else ""
        if any("_l" in str(name) and "_l0" not in str(name) for name in extra):
            hint = " One call is one layer: the next takes the outputs of this one."
        raise ValueError(f"`{OP}`: `weights` must have {expected} alone; got also {extra}.{hint}")
    for name in names:
        for ending in endings:
            _check_weight(weights, spelling, name, ending, cell_type)
    return {n: jnp.stack([jnp.asarray(weights[spelling[n] + e]) for e in endings]) for n in names}


def _spelling(weights: Mapping[str, Any]) -> dict[str, str]:
    """Our names of the weights as the call spells them: ours, or torch's for layer 0."""
    torch = any(str(name).startswith(("weight_", "bias_")) for name in weights)
    return _TORCH_NAMES if torch else {name: name for name in _TORCH_NAMES}


def _check_weight(
    weights: Mapping[str, Any], spelling: dict[str, str], name: str, ending: str, cell_type: str
) -> None:
    first, states = weights[spelling["w_ih"]], weights[spelling["w_hh"]]
    spelled = spelling[name] + ending
    gates, shape = GATES[cell_type], getattr(weights[spelled], "shape", None)
    if shape is None:
        got = type(weights[spelled]).__name__
        raise TypeError(f"`{OP}`: `weights[{spelled!r}]` must be an array; got {got}.")
    _types.check_library(f"`{OP}`: `weights[{spelled!r}]`", weights[spelled])
    rule = {"w_ih": f"[{gates} * d, i]", "w_hh": f"[{gates} * d, d]"}.get(name, f"[{gates} * d]")
    d = states.shape[-1] if getattr(states, "ndim", 0) == 2 else None
    wanted: tuple[Any, ...] = (None if d is None else gates * d,)
    if name == "w_hh":
        wanted += (d,)
    elif name == "w_ih":
        wanted += (first.shape[-1] if getattr(first, "ndim", 0) == 2 else None,)
    if shape != wanted:
        of = "" if d is None else f" with d={d} (from `{spelling['w_hh']}`)"
        raise ValueError(
            f"`{OP}`: `weights[{spelled!r}]` of a {cell_type} must be {rule}{of}; got {shape}."
        )


def _take_states(call: dict[str, Any], hidden: Any, d: int) -> dict[str, Any]:
    """`hidden` and, for an LSTM, `cell`; zeros for None."""
    lstm, inputs = call["cell_type"] == "lstm", call["inputs"]
    names = ("hidden", "cell") if lstm else ("hidden",)
    shape = ((2,) if call["bidirectional"] else ()) + (inputs.shape[0], d)
    if hidden is None:
        return dict.fromkeys(names, jnp.zeros(shape, inputs.dtype))
    pair = isinstance(hidden, tuple | list)
    got = f"{len(hidden)} values" if pair else "one array"
    if lstm and (not pair or len(hidden) != 2 or any(x is None for x in hidden)):
        raise ValueError(
            f"`{OP}`: `hidden` of an lstm must be the pair (h, c), or None for zeros; got {got}."
        )
    if not lstm and pair:
        raise ValueError(
            f"`{OP}`: `hidden` of a {call['cell_type']} must be one array, or None for zeros; got "
            f"{got}. Only an lstm has (h, c)."
        )
    states: dict[str, Any] = dict(zip(names, hidden if pair else [hidden], strict=True))
    for name, state in states.items():
        if getattr(state, "shape", shape) != shape:
            which = "`hidden`" if name == "hidden" else "the cell state of `hidden`"
            form = "[2, b, d]" if len(shape) == 3 else "[b, d]"
            raise ValueError(f"`{OP}`: {which} must be {form}, {shape}; got {state.shape}.")
    return states


def canonicalize(values: dict[str, Any]) -> RecurrentArgs:
    """Checks a call and brings it to the one form that kernels see."""
    call = unpack(values)
    names = [n for n in ("inputs", "w_ih", "w_hh", "b_ih", "b_hh") if n in call]
    arrays = {name: jnp.asarray(call[name]) for name in names}
    _common.check_floats(OP, **arrays)
    arrays |= {name: jnp.asarray(call[name]) for name in ("hidden", "cell") if name in call}
    lengths = call["lengths"]
    if call["cell_type"] == "rnn" and call["gate_activation"] != "sigmoid":
        raise ValueError(
            f"`{OP}`: `gate_activation` must be left out for an rnn, which has no gates; got "
            f"{call['gate_activation']!r}. Its activation is `activation`."
        )
    return RecurrentArgs(
        **dict.fromkeys(("weights", "cell", "b_ih", "b_hh")) | arrays,
        cell_type=call["cell_type"],
        bidirectional=bool(call["bidirectional"]),
        activation=_checked_activation("activation", call["activation"]),
        gate_activation=_checked_activation("gate_activation", call["gate_activation"]),
        lengths=None if lengths is None else jnp.asarray(lengths, jnp.int32),
        reverse=bool(call["reverse"]),
    )


def _checked_activation(name: str, activation: Any) -> Any:
    if isinstance(activation, str) and activation in ACTIVATIONS:
        return activation
    if isinstance(activation, str) or not callable(activation):
        raise ValueError(
            f"`{OP}`: `{name}` must be one of {[*ACTIVATIONS]} or a function of an array; got "
            f"{activation!r}."
        )
    asked = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    made = jax.eval_shape(activation, asked)
    if getattr(made, "shape", None) != asked.shape or made.dtype != asked.dtype:
        raise ValueError(
            f"`{OP}`: `{name}` must act on each element, keeping shape and dtype; from "
            f"float32(2, 3) it makes {made}."
        )
    return activation


def publish(args: RecurrentArgs) -> dict[str, Any]:
    """The public arguments: states as a pair, weights as a dict again."""
    endings = ("", "_reverse") if args.bidirectional else ("",)
    weights = {
        name + ending: getattr(args, name)[index]
        for name in ("w_ih", "w_hh", "b_ih", "b_hh")
        if getattr(args, name) is not None
        for index, ending in enumerate(endings)
    }
    hidden = args.hidden if args.cell is None else (args.hidden, args.cell)
    made = {"inputs": args.inputs, "hidden": hidden, "weights": weights, "lengths": args.lengths}
    return made | args.statics()


def finish(args: RecurrentArgs, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Outputs and the final state, of an LSTM a pair."""
    return (outputs[0], outputs[1:] if args.cell is not None else outputs[1])


def twin(args: RecurrentArgs, block: int) -> dict[str, int]:
    """Two rows, and two blocks of steps with the call's own remainder; all features."""
    return {"b": 2, "t": 2 * block + args.inputs.shape[1] % block}


def check_values(values: dict[str, Any]) -> None:
    """Checks known lengths, for `EJKERNEL_DEBUG`."""
    lengths, t = _spec.known(values["lengths"]), values["inputs"].shape[1]
    if lengths is not None and ((lengths < 0).any() or (lengths > t).any()):
        raise ValueError(
            f"`{OP}`: `lengths` must be from 0 to the {t} steps of `inputs`; got "
            f"{_types.brief(lengths)}."
        )


def _of_steps(units: Callable[[RecurrentArgs], int | None]) -> Callable[..., Any]:
    """[b, t, p * units * d], the columns of one direction after those of the other."""

    def shape(args: RecurrentArgs) -> tuple[int, ...] | None:
        (batch, t, _), count = args.inputs.shape, units(args)
        width = len(directions(args)) * args.w_hh.shape[2]
        return None if count is None else (batch, t, count * width)

    return shape


# Rows are in the order of `inputs`, also for a direction that runs from the last step to the first.
# Steps beyond `lengths` hold finite numbers, whatever they are.
_STEPS = ("b", "t", "units")
RESIDUALS = (
    _spec.Residual(
        "states", "The hidden state before each step.", _of_steps(lambda args: 1), axes=_STEPS
    ),
    _spec.Residual(
        "gates",
        "What each step computes from the projections x (inputs) and y (state), both with their "
        "biases, before any activation. lstm: x + y, in the order i, f, g, o. gru: x + y of r and "
        "z, then x of n, then y of n. rnn: x + y.",
        _of_steps(lambda args: KEPT[args.cell_type]),
        axes=_STEPS,
    ),
    _spec.Residual(
        "cells",
        "The cell state before each step; of an lstm alone.",
        _of_steps(lambda args: 1 if args.cell_type == "lstm" else None),
        axes=_STEPS,
    ),
)


class RecurrentSpec(_spec.OpSpec):
    """States of two directions have one axis more."""

    def layout(self, args: RecurrentArgs) -> Layout:
        state = ("p", "b", "d") if args.bidirectional else ("b", "d")
        matrices = {"w_ih": ("p", "m", "i"), "w_hh": ("p", "m", "d")}
        return Layout(
            arrays={"inputs": ("b", "t", "i"), "hidden": state, "lengths": ("b",), "cell": state}
            | matrices
            | {"b_ih": ("p", "m"), "b_hh": ("p", "m")},
            outputs=(("b", "t", "e"), *(state for _ in self.outputs(args)[1:])),
            shardable=frozenset("b"),
            aliases={},
            localize=self.localize,
            instead="split the batch: a recurrence needs all steps and features in one place",
        )


SPEC = RecurrentSpec(
    name=OP,
    work=_work_linear.recurrent,
    args=RecurrentArgs,
    canonicalize=canonicalize,
    unpack=unpack,
    publish=publish,
    finish=finish,
    reference="ejkernel.kernels._reference.recurrent:recurrent",
    differentiable=frozenset({"inputs", "hidden", "cell", "w_ih", "w_hh", "b_ih", "b_hh"}),
    outputs=lambda args: ("out", "hidden") if args.cell is None else ("out", "hidden", "cell"),
    output_axes={},
    residuals=RESIDUALS,
    cases=_recurrent_cases.cases,
    padded=("cover00",),
    changes=_recurrent_cases.changes,
    examples=_recurrent_cases.examples,
    twin=twin,
    config=RecurrentConfig,
    debug=check_values,
)
