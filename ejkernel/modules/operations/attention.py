"""`attention`, the plain form, and `scaled_dot_product_attention`, JAX's spelling."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer, Shaped

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.attention import AttentionConfig
from ejkernel.modules.operations.flash_attention import flash_attention
from ejkernel.types import MaskInfo


def attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s g d"],
    value: Float[Array, "b s g e"],
    attention_mask: Shaped[Array, "#b #h #t #s"] | None = None,
    bias: Float[Array, "#b #h #t #s"] | None = None,
    causal: bool = False,
    softmax_scale: float | Float[Array, ""] | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | Integer[Array, "..."] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    cum_seqlens_q: Int[Array, "n1"] | None = None,
    cum_seqlens_k: Int[Array, "n1"] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    q_segment_ids: Int[Array, "b t"] | None = None,
    kv_segment_ids: Int[Array, "b s"] | None = None,
    alibi_slopes: Float[Array, "h"] | None = None,
    mask_info: MaskInfo | None = None,
    platform: str = "auto",
    cfg: AttentionConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Float[Array, "b t h e"], Float[Array, "b h t s"]]:
    """Attention that also returns its weights; memory grows with t * s.

    weights = softmax(…); out = weights @ value, with every argument as in `flash_attention`.

    Returns:
      The output, and the weights it was made with, dropout included; both in `query`'s dtype.
    """
    return _op_kernel.call(Attention, locals())


class Attention(_op_kernel.OpKernel):
    """`attention` for an executor."""

    op = "attention"
    function = attention


def scaled_dot_product_attention(
    query: Shaped[Array, "*b t h d"],
    key: Shaped[Array, "*b s g d"],
    value: Shaped[Array, "*b s g e"],
    bias: Shaped[Array, "..."] | None = None,
    mask: Shaped[Array, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, "b"] | None = None,
    key_value_seq_lengths: Int[Array, "b"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    causal: bool | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """Drop-in for `jax.nn.dot_product_attention`, with its names, order and meaning.

    Unlike `flash_attention`, causal masks and windows are aligned top-left: query i and key i stand
    at the same position even when the lengths differ. Two differences from JAX: a query that sees
    no key gives 0, and the residual is float32 and differentiable.

    Args:
      query: Queries, with or without a batch axis.
      key: Keys.
      value: Values.
      bias: Added to the scaled scores; broadcasts to [b, h, t, s].
      mask: True where a query may see a key; broadcasts to [b, h, t, s].
      scale: Default: head size ** -0.5.
      is_causal: See only keys at or before the query's index.
      query_seq_lengths: Real queries of each row; the others give 0.
      key_value_seq_lengths: Real keys of each row.
      local_window_size: Keys visible to the left and right; an int means both.
      implementation: A platform name; None lets the library choose.
      return_residual: Also return the log-sum-exp, [b, t, h].
      causal: Another name of `is_causal`.
      sliding_window: Another name of `local_window_size`.
      softmax_scale: Another name of `scale`.
      **options: Further arguments of `flash_attention`, such as `softmax_aux` or `mesh`.

    Returns:
      The output, or output and residual.
    """
    op = "scaled_dot_product_attention"
    is_causal = _one_of(op, "is_causal", is_causal or None, "causal", causal) or False
    scale = _one_of(op, "scale", scale, "softmax_scale", softmax_scale)
    window = _one_of(op, "local_window_size", local_window_size, "sliding_window", sliding_window)
    chosen = options.pop("platform", None)
    platform = _one_of(op, "implementation", implementation, "platform", chosen)
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    if (batched := query.ndim == 4) is False:
        query, key, value = (x[None] if x.ndim == 3 else x for x in (query, key, value))
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(
            f"`{op}`: `query` and `key` must be [b, t, h, d] or [t, h, d]; got {query.shape} and "
            f"{key.shape}."
        )
    for name, lengths in (
        ("query_seq_lengths", query_seq_lengths),
        ("key_value_seq_lengths", key_value_seq_lengths),
    ):
        if lengths is not None and jnp.shape(lengths) != query.shape[:1]:
            raise ValueError(
                f"`{op}`: `{name}` must be [{query.shape[0]}], one length a row; "
                f"got {jnp.shape(lengths)}."
            )
    moved = is_causal or window is not None
    info = _top_left(query, key, query_seq_lengths, key_value_seq_lengths, moved)
    result = flash_attention(
        query,
        key,
        value,
        _rank_4(mask),
        _rank_4(bias),
        is_causal,
        scale,
        sliding_window=window,
        mask_info=info,
        return_lse=return_residual,
        platform=platform or "auto",
        **options,
    )
    if return_residual:
        out, lse = result
        lse = lse.transpose(0, 2, 1)
        return (out, lse) if batched else (out[0], lse[0])
    return result if batched else result[0]


def _pair(window: Any) -> Any:
    return (window, window) if isinstance(window, int) else window


def _one_of(op: str, name: str, value: Any, alias: str, other: Any) -> Any:
    if value is not None and other is not None and _pair(value) != _pair(other):
        raise ValueError(f"`{op}`: `{name}={value}` contradicts its other name `{alias}={other}`.")
    return value if value is not None else other


def _rank_4(x: Any) -> jax.Array | None:
    """Adds the leading axes that JAX's function adds."""
    if x is None:
        return None
    x = jnp.asarray(x)
    return x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x


def _top_left(query: Any, key: Any, q_lengths: Any, kv_lengths: Any, moved: Any) -> MaskInfo | None:
    """Lengths as ids, which move no position, and positions counted from the first token."""
    (batch, t), s = query.shape[:2], key.shape[1]
    fields: dict[str, Any] = {}
    if q_lengths is not None or kv_lengths is not None:
        for name, lengths, size in (("q", q_lengths, t), ("kv", kv_lengths, s)):
            index = jnp.arange(size)[None]
            real = jnp.full((batch, 1), size) if lengths is None else jnp.asarray(lengths)[:, None]
            fields[f"{name}_segment_ids"] = jnp.where(index < real, 0, -1).astype(jnp.int32)
    if t != s and moved:
        fields["q_positions"] = jnp.arange(t, dtype=jnp.int32)[None]
        fields["kv_positions"] = jnp.arange(s, dtype=jnp.int32)[None]
    return MaskInfo(**fields) if fields else None
