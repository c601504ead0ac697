"""`lightning_attention`: linear attention with a constant decay for each head and layer."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _common, _linear_cases, linear_recurrence


@_spec.op_args
class LightningAttentionArgs(_spec.OpArgs):
    """Arguments of `lightning_attention`; `n` is the batch, or the number of sequences."""

    query: Float[Array, "b t h d"]
    key: Float[Array, "b t g d"]
    value: Float[Array, "b t g e"]
    layer_idx: int = _spec.static()
    num_layers: int = _spec.static()
    softmax_scale: _common.Scale = _spec.static(
        default=None, unset=linear_recurrence.default_scale, computed=True
    )
    initial_state: Float[Array, "n h d e"] | None = None
    reverse: bool = _spec.static(default=False)
    cu_seqlens: Int[Array, "n1"] | None = None
    return_state: bool = _spec.static(default=False)
    # log decays by global head: a shard of heads has its own
    g_gamma: Float[Array, "h"] | None = _spec.internal()


@dataclasses.dataclass(frozen=True)
class LightningAttentionConfig(linear_recurrence.LinearRecurrenceConfig):
    """How to run `lightning_attention`; what is None is chosen by the library."""


def canonicalize(values: dict[str, Any]) -> LightningAttentionArgs:
    """Checks a call and brings it to the one form that kernels see."""
    made = linear_recurrence.common("lightning_attention", values)
    layer, layers = int(values["layer_idx"]), int(values["num_layers"])
    if not 0 <= layer < layers:
        raise ValueError(
            f"`lightning_attention`: `layer_idx` must be in [0, num_layers = {layers}); "
            f"got {layer}."
        )
    return LightningAttentionArgs(
        **made, layer_idx=layer, num_layers=layers, g_gamma=_decays(made["query"], layer / layers)
    )


def _decays(query: Any, depth: float) -> Any:
    heads = query.shape[2]
    made = -(8 / max(heads, 1)) * (1 - depth) * np.arange(heads)
    return jnp.asarray(made, jnp.float64 if query.dtype.itemsize == 8 else jnp.float32)


SPEC = _spec.OpSpec(
    name="lightning_attention",
    args=LightningAttentionArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.lightning_attention:lightning_attention",
    formula="ejkernel.kernels._xla.lightning_attention.formula:lightning_attention",
    differentiable=frozenset({"query", "key", "value", "initial_state", "softmax_scale"}),
    cases=_linear_cases.lightning_attention,
    changes=_linear_cases.lightning_attention_changes,
    config=LightningAttentionConfig,
    publish=lambda args: {
        name: value for name, value in (args.arrays() | args.statics()).items() if name != "g_gamma"
    },
    **linear_recurrence.FAMILY,
)
