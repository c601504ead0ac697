"""`gla`: gated linear attention, the linear recurrence with gates of the state's rows."""

import dataclasses
from typing import Any

from jaxtyping import Array, Float, Int

from ejkernel.kernels import _derived, _spec
from ejkernel.kernels._specs import _common, _linear_cases, _work_linear, linear_recurrence


@_spec.op_args
class GLAArgs(_spec.OpArgs):
    """Arguments of `gla`; `n` is the batch, or the number of packed sequences."""

    query: Float[Array, "b t h d"]
    key: Float[Array, "b t g d"]
    value: Float[Array, "b t g e"]
    g: Float[Array, "b t h d"] | None = None
    g_gamma: Float[Array, "h"] | None = None
    softmax_scale: _common.Scale = _spec.static(
        default=None, unset=linear_recurrence.default_scale, computed=True
    )
    initial_state: Float[Array, "n h d e"] | None = None
    reverse: bool = _spec.static(default=False)
    cu_seqlens: Int[Array, "n1"] | None = None
    return_state: bool = _spec.static(default=False)


@dataclasses.dataclass(frozen=True)
class GLAConfig(linear_recurrence.LinearRecurrenceConfig):
    """How to run `gla`; what is None is chosen by the library."""


def canonicalize(values: dict[str, Any]) -> GLAArgs:
    """Checks a call and brings it to the one form that kernels see."""
    _common.check_heads("gla", values["query"].shape[2], values["key"].shape[2])
    gates = {name: linear_recurrence.as_array(values[name]) for name in ("g", "g_gamma")}
    return GLAArgs(**linear_recurrence.common("gla", values), **gates)


def as_recurrence(args: GLAArgs) -> linear_recurrence.LinearRecurrenceArgs:
    """The same call as one of `linear_recurrence`, whose `gk` is this op's `g`."""
    shared = args.arrays() | args.statics()
    shared["gk"] = shared.pop("g", None)
    return linear_recurrence.LinearRecurrenceArgs(**shared)


SPEC = _spec.OpSpec(
    name="gla",
    work=_work_linear.gla,
    args=GLAArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.gla:gla",
    lowers_to=_derived.Lowering(linear_recurrence.SPEC, as_recurrence, renamed={"g": "gk"}),
    differentiable=frozenset(
        {"query", "key", "value", "g", "g_gamma", "initial_state", "softmax_scale"}
    ),
    cases=_linear_cases.gla,
    padded=("packed",),
    changes=_linear_cases.gla_changes,
    config=GLAConfig,
    **linear_recurrence.FAMILY,
)
