"""`lightning_attention`: linear attention with a constant decay for each head."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ejkernel.kernels import _derived, _spec
from ejkernel.kernels._specs import _common, _linear_cases, _work_linear, linear_recurrence

KINDS = ("linear", "exponential")


def _layered(value: Any, args: Any) -> bool:
    """True if the decays come from a layer's number, not from the caller."""
    return args.layer_idx is not None


@_spec.op_args
class LightningAttentionArgs(_spec.OpArgs):
    """Arguments of `lightning_attention`; `n` is the batch, or the number of sequences."""

    query: Float[Array, "b t h d"]
    key: Float[Array, "b t g d"]
    value: Float[Array, "b t g e"]
    layer_idx: int | None = _spec.static(default=None)
    num_layers: int | None = _spec.static(default=None)
    # log decays by global head, also those of a layer: a shard of heads has its own
    g_gamma: Float[Array, "h"] | None = dataclasses.field(
        default=None, metadata={"unset": _layered}
    )
    softmax_scale: _common.Scale = _spec.static(
        default=None, unset=linear_recurrence.default_scale, computed=True
    )
    initial_state: Float[Array, "n h d e"] | None = None
    reverse: bool = _spec.static(default=False)
    cu_seqlens: Int[Array, "n1"] | None = None
    return_state: bool = _spec.static(default=False)


@dataclasses.dataclass(frozen=True)
class LightningAttentionConfig(linear_recurrence.LinearRecurrenceConfig):
    """How to run `lightning_attention`; what is None is chosen by the library."""


def canonicalize(values: dict[str, Any]) -> LightningAttentionArgs:
    """Checks a call and brings it to the one form that kernels see."""
    op, query = "lightning_attention", values["query"]
    _common.check_heads(op, query.shape[2], values["key"].shape[2])
    made = linear_recurrence.common(op, values)
    layer = {name: values[name] for name in ("layer_idx", "num_layers")}
    if values["g_gamma"] is not None:
        if any(value is not None for value in layer.values()):
            raise ValueError(
                f"`{op}`: `g_gamma` replaces `layer_idx` and `num_layers`; give one or the others. "
                f"Got {layer} besides `g_gamma`."
            )
        return LightningAttentionArgs(**made, g_gamma=jnp.asarray(values["g_gamma"]))
    if None in layer.values():
        raise ValueError(
            f"`{op}`: needs `layer_idx` and `num_layers`, or `g_gamma`, such as "
            f"`lightning_decay(num_heads, layer_idx, num_layers)`; got {layer} and no `g_gamma`."
        )
    layer = {name: int(value) for name, value in layer.items() if value is not None}
    decays = decay(op, query.shape[2], layer["layer_idx"], layer["num_layers"])
    dtype = jnp.float64 if query.dtype.itemsize == 8 else jnp.float32
    return LightningAttentionArgs(**made, **layer, g_gamma=jnp.asarray(decays, dtype))


def decay(
    op: str, num_heads: int, layer_idx: int, num_layers: int, kind: str = KINDS[0]
) -> np.ndarray:
    """The log decay of each head of a layer, in float64."""
    if not 0 <= layer_idx < num_layers:
        raise ValueError(
            f"`{op}`: `layer_idx` must be in [0, num_layers = {num_layers}); got {layer_idx}."
        )
    if kind not in KINDS:
        raise ValueError(f"`{op}`: `kind` must be one of {KINDS}; got {kind!r}.")
    head = np.arange(num_heads)
    if kind == "linear":
        return -(8 / max(num_heads, 1)) * (1 - layer_idx / num_layers) * head
    depth = layer_idx / max(num_layers - 1, 1)
    return -(2.0 ** (-8 * (head + 1) / max(num_heads, 1))) * (1 - depth + 1e-5)


def publish(args: LightningAttentionArgs) -> dict[str, Any]:
    """Arguments of the public function: decays that a layer's number gives are none of them."""
    values = args.arrays() | args.statics()
    return {n: x for n, x in values.items() if n != "g_gamma" or args.layer_idx is None}


def as_recurrence(args: LightningAttentionArgs) -> linear_recurrence.LinearRecurrenceArgs:
    """The same call as one of `linear_recurrence`; the layer is in the decays."""
    shared = args.arrays() | args.statics()
    del shared["layer_idx"], shared["num_layers"]
    return linear_recurrence.LinearRecurrenceArgs(**shared)


SPEC = _spec.OpSpec(
    name="lightning_attention",
    work=_work_linear.lightning_attention,
    args=LightningAttentionArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.lightning_attention:lightning_attention",
    lowers_to=_derived.Lowering(linear_recurrence.SPEC, as_recurrence),
    differentiable=frozenset(
        {"query", "key", "value", "g_gamma", "initial_state", "softmax_scale"}
    ),
    cases=_linear_cases.lightning_attention,
    padded=("packed",),
    changes=_linear_cases.lightning_attention_changes,
    config=LightningAttentionConfig,
    publish=publish,
    **linear_recurrence.FAMILY,
)
