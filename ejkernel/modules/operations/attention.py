"""`attention`, the plain form, and `scaled_dot_product_attention`, JAX's spelling."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, Shaped

from ejkernel.errors import UnsupportedError, UnsupportedGroupError
from ejkernel.kernels import _op_kernel, _types
from ejkernel.kernels._specs.attention import AttentionConfig
from ejkernel.modules.operations.flash_attention import flash_attention
from ejkernel.types import MaskInfo
from ejkernel.xla_utils import dtypes


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
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Integer[Array, "b"] | None = None,
    key_value_seq_lengths: Integer[Array, "b"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    causal: bool | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    softmax_scale: float | Float[Array, ""] | None = None,
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
      bias: Added to the scaled scores; broadcasts to [b, h, t, s]. Integers are allowed.
      mask: True (or a nonzero integer) where a query may see a key; broadcasts to [b, h, t, s].
      scale: Default: head size ** -0.5. An array is differentiable.
      is_causal: See only keys at or before the query's index.
      query_seq_lengths: Real queries of each row; the others give 0.
      key_value_seq_lengths: Real keys of each row.
      local_window_size: Query i sees keys i - left to i + right of a pair (left, right); an int
        means both. As in JAX a negative size moves the window: (-1, 2) is the keys i + 1 and i + 2.
        For no limit on a side, pass the number of keys or None.
      implementation: A platform name; None lets the library choose.
      return_residual: Also return the log-sum-exp, [b, t, h].
      causal: Another name of `is_causal`.
      sliding_window: Another name of `local_window_size`, with its meaning.
      softmax_scale: Another name of `scale`.
      **options: Further arguments of `flash_attention`, such as `softmax_aux` or `mesh`. Packed
        sequences (`cum_seqlens_q`, `cum_seqlens_k`) and `mask_info` belong to that function alone.

    Returns:
      The output, or output and residual.
    """
    _check_options(options)
    is_causal = _one_of("is_causal", is_causal or None, "causal", causal) or False
    factor: Any = _one_of("scale", scale, "softmax_scale", softmax_scale)
    window = _one_of("local_window_size", local_window_size, "sliding_window", sliding_window)
    chosen = options.pop("platform", None)
    platform = _one_of("implementation", implementation, "platform", chosen)
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    for name, x in given.items():
        if hasattr(x, "dtype"):
            _types.check_library(f"`{_SDPA}`: `{name}`", x)
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    if (batched := query.ndim == 4) is False:
        query, key, value = (x[None] if x.ndim == 3 else x for x in (query, key, value))
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(
            f"`{_SDPA}`: `query` and `key` must be [b, t, h, d] or [t, h, d]; got {query.shape} "
            f"and {key.shape}."
        )
    lengths = {
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    _check_lengths(lengths, query.shape[0], options)
    mask, bias = _rank_4(mask), _rank_4(bias)
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        bias = bias.astype(dtypes.wide(query.dtype))
    window, shifted = _window(window, query.shape[1], key.shape[1])
    moved = is_causal or window is not None or options.get("alibi_slopes") is not None
    info = _top_left(query, key, query_seq_lengths, key_value_seq_lengths, moved, shifted)
    with _own_names():
        result = flash_attention(
            query,
            key,
            value,
            mask,
            bias,
            is_causal,
            factor,
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


_SDPA = "scaled_dot_product_attention"
# what `flash_attention` calls an argument, and what this function does
_OWN_NAMES = {
    "flash_attention": _SDPA,
    "attention_mask": "mask",
    "causal": "is_causal",
    "softmax_scale": "scale",
    "sliding_window": "local_window_size",
    "return_lse": "return_residual",
    "platform": "implementation",
}
_REFUSED = {
    "cum_seqlens_q": "lengths of rows are `query_seq_lengths` and `key_value_seq_lengths`",
    "cum_seqlens_k": "lengths of rows are `query_seq_lengths` and `key_value_seq_lengths`",
    "mask_info": "masks are `mask`, `is_causal`, `local_window_size` and the two `*_seq_lengths`",
    "attention_mask": "it is called `mask`",
    "return_lse": "it is called `return_residual`",
}


def _check_options(options: dict[str, Any]) -> None:
    for name, instead in _REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(
                f"`{_SDPA}`: `{name}` belongs to `flash_attention`, which aligns causal masks and "
                f"windows bottom-right; here {instead}."
            )
        options.pop(name, None)


@contextlib.contextmanager
def _own_names() -> Iterator[None]:
    """Errors of `flash_attention` about its arguments, in the words of this function."""

    def renamed(text: str) -> str:
        text = re.sub(r"`(\w+)", lambda found: "`" + _OWN_NAMES.get(found[1], found[1]), text)
        return re.sub(r"\bplatform=", "implementation=", text)

    try:
        yield
    except UnsupportedGroupError as error:
        raise UnsupportedGroupError(renamed(error.message), error.exceptions) from error
    except (TypeError, ValueError, UnsupportedError) as error:
        if not str(error).startswith("`flash_attention`"):
            raise
        raise type(error)(renamed(str(error))) from error


def _one_of(name: str, value: Any, alias: str, other: Any) -> Any:
    if value is None or other is None or value is other:
        return value if value is not None else other
    if any(isinstance(x, jax.Array) for x in (value, other)):
        raise ValueError(f"`{_SDPA}`: give `{name}` or its other name `{alias}`, not both arrays.")
    if _pair(value) != _pair(other):
        raise ValueError(
            f"`{_SDPA}`: `{name}={value}` contradicts its other name `{alias}={other}`."
        )
    return value


def _pair(window: Any) -> Any:
    if isinstance(window, list):
        return tuple(window)
    return (window, window) if isinstance(window, int) else window


def _check_lengths(lengths: dict[str, Any], batch: int, options: dict[str, Any]) -> None:
    for name, given in lengths.items():
        if given is None:
            continue
        if jnp.shape(given) != (batch,) or not jnp.issubdtype(jnp.result_type(given), jnp.integer):
            raise ValueError(
                f"`{_SDPA}`: `{name}` must be [{batch}] integers, one length a row; got "
                f"{jnp.result_type(given)}{list(jnp.shape(given))}."
            )
        for ids in ("q_segment_ids", "kv_segment_ids"):
            if options.get(ids) is not None:
                raise ValueError(
                    f"`{_SDPA}`: `{ids}` cannot be given with `{name}`. Make the ids negative "
                    "beyond the lengths."
                )


def _window(window: Any, t: int, s: int) -> tuple[Any, jax.Array | None]:
    """The window as `flash_attention` has it, or as a mask [1, 1, t, s] if a size is negative."""
    if window is None:
        return None, None
    pair = (window, window) if _is_int(window) else window
    sizes = tuple(pair) if isinstance(pair, tuple | list) else ()
    whole = (x is None or _is_int(x) for x in sizes)
    if len(sizes) != 2 or not all(whole):
        raise ValueError(
            f"`{_SDPA}`: `local_window_size` must be an int or a pair (left, right) of ints; got "
            f"{_types.brief(window)} of type {type(window).__name__}."
        )
    if all(size is None or size >= 0 for size in sizes):
        return sizes, None
    left, right = (max(t, s) if size is None else int(size) for size in sizes)
    i, j = jnp.arange(t)[:, None], jnp.arange(s)[None]
    return None, ((i - left <= j) & (j <= i + right))[None, None]


def _is_int(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def _rank_4(x: Any) -> jax.Array | None:
    """Adds the leading axes that JAX's function adds."""
    if x is None:
        return None
    x = jnp.asarray(x)
    return x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x


def _top_left(
    query: Any, key: Any, q_lengths: Any, kv_lengths: Any, moved: Any, mask: Any
) -> MaskInfo | None:
    """Lengths as ids, which move no position, and positions counted from the first token."""
    (batch, t), s = query.shape[:2], key.shape[1]
    fields: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
    if q_lengths is not None or kv_lengths is not None:
        for name, lengths, size in (("q", q_lengths, t), ("kv", kv_lengths, s)):
            index = jnp.arange(size, dtype=jnp.int32)[None]
            real = jnp.full(batch, size) if lengths is None else jnp.asarray(lengths)
            inside = index < real.astype(jnp.int32)[:, None]
            fields[f"{name}_segment_ids"] = jnp.where(inside, 0, -1).astype(jnp.int32)
    if t != s and moved:
        fields["q_positions"] = jnp.arange(t, dtype=jnp.int32)[None]
        fields["kv_positions"] = jnp.arange(s, dtype=jnp.int32)[None]
    return MaskInfo(**fields) if fields else None
