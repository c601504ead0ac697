"""`lightning_attention`: linear attention with a constant decay for each head."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs import lightning_attention as spec
from ejkernel.kernels._specs.lightning_attention import LightningAttentionConfig
from ejkernel.ops import BwdParams, FwdParams


def lightning_attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b t g d"],
    value: Float[Array, "b t g e"],
    *,
    layer_idx: int | None = None,
    num_layers: int | None = None,
    g_gamma: Float[Array, "h"] | None = None,
    softmax_scale: float | Float[Array, ""] | None = None,
    initial_state: Float[Array, "n h d e"] | None = None,
    reverse: bool = False,
    cu_seqlens: Int[Array, "n1"] | None = None,
    return_state: bool = False,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    platform: str = "auto",
    cfg: LightningAttentionConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h e"] | tuple[Float[Array, "b t h e"], Float[Array, "n h d e"]]:
    """Linear attention with a constant decay, in time and memory linear in the tokens.

    h[t] = exp(g_gamma) * h[t-1] + outer(k[t], v[t]);  out[t] = h[t].T @ (scale * q[t])
    g_gamma[h] = -(8 / heads) * (1 - layer_idx / num_layers) * h, unless it is given

    Args:
      query: Queries; their heads must be a multiple of the key heads.
      key: Keys.
      value: Values; their head size may differ.
      layer_idx: Index of this layer, from 0; later layers decay less.
      num_layers: The layers of the model.
      g_gamma: Log decay of each head at every step, instead of `layer_idx` and `num_layers`;
        differentiable. `lightning_decay` makes the usual ones.
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
    return _op_kernel.call(LightningAttention, locals())


class LightningAttention(_op_kernel.OpKernel):
    """`lightning_attention` for an executor: `executor(LightningAttention(), query, …)`."""

    op = "lightning_attention"
    function = lightning_attention


lightning_attn = lightning_attention


def lightning_decay(
    num_heads: int, layer_idx: int, num_layers: int, kind: str = "linear"
) -> Float[Array, "h"]:
    """The log decay of each head of a layer, for `g_gamma` of `lightning_attention`.

    linear:      -(8 / num_heads) * (1 - layer_idx / num_layers) * h
    exponential: -2 ** (-8 * (h + 1) / num_heads) * (1 - layer_idx / (num_layers - 1) + 1e-5)

    Args:
      num_heads: The heads of the queries.
      layer_idx: Index of this layer, from 0; later layers decay less.
      num_layers: The layers of the model; a single layer has depth 0 in both formulas.
      kind: "linear", which `lightning_attention` computes from `layer_idx`, or "exponential", as
        in MiniMax.
    """
    return jnp.asarray(
        spec.decay("lightning_decay", num_heads, layer_idx, num_layers, kind), jnp.float32
    )
