"""`update_paged_cache`: new tokens into pages, and the two layouts of pages."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.update_paged_cache import UpdatePagedCacheConfig


def update_paged_cache(
    key_cache: Shaped[Array, "p g w d"],
    value_cache: Shaped[Array, "p g w e"],
    keys: Shaped[Array, "n g d"],
    values: Shaped[Array, "n g e"],
    slot_mapping: Int[Array, "n"],
    *,
    donate_cache: bool = False,
    platform: str = "auto",
    cfg: UpdatePagedCacheConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Shaped[Array, "p g w d"], Shaped[Array, "p g w e"]]:
    """Writes keys and values of new tokens into their slots of a paged cache.

    key_cache[slot // w, :, slot % w] = keys[i], with slot = slot_mapping[i]

    Inside a jit that donates both caches they are changed in place. Outside a jit they are copied,
    with a warning, unless `donate_cache` is set. There is no derivative.

    Args:
      key_cache: Pages of keys.
      value_cache: Pages of values.
      keys: New keys in the dtype of the cache.
      values: New values.
      slot_mapping: Slot of each token; -1, or any slot outside the cache, skips it. Of two tokens
        with one slot either may win.
      donate_cache: Outside a jit, write in place; the arrays passed cannot be used afterwards.
      platform: "auto" or "xla"; a name never falls back.
      cfg: The platform as a config.
      mesh: Devices to split heads over, as `in_specs` and `out_specs` say if given.
      in_specs: PartitionSpecs of the leading arrays in order, or by name; others are derived.
      out_specs: PartitionSpecs of both caches.

    Returns:
      Both caches.
    """
    return _op_kernel.call(UpdatePagedCache, locals())


class UpdatePagedCache(_op_kernel.OpKernel):
    """`update_paged_cache` for an executor."""

    op = "update_paged_cache"
    function = update_paged_cache


def pages_to_interleaved(
    key_cache: Shaped[Array, "p g w d"], value_cache: Shaped[Array, "p g w d"]
) -> Shaped[Array, "p w g2 d"]:
    """One array of pages, keys at even and values at odd heads, from the two of `page_attention`.

    out[page, slot, 2 * head] = key_cache[page, head, slot], and values at 2 * head + 1.
    """
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError(
            "`pages_to_interleaved`: both caches must have one shape and dtype; got "
            f"{key_cache.dtype}{list(key_cache.shape)} and "
            f"{value_cache.dtype}{list(value_cache.shape)}."
        )
    pages, groups, size, width = key_cache.shape
    both = jnp.stack([key_cache, value_cache], axis=2)  # [p, g, 2, w, d]
    return both.transpose(0, 3, 1, 2, 4).reshape(pages, size, 2 * groups, width)


def pages_from_interleaved(
    kv_pages: Shaped[Array, "p w g2 d"],
) -> tuple[Shaped[Array, "p g w d"], Shaped[Array, "p g w d"]]:
    """Keys and values as `page_attention` takes them; undoes `pages_to_interleaved`."""
    if kv_pages.ndim != 4 or kv_pages.shape[2] % 2:
        raise ValueError(
            f"`pages_from_interleaved`: `kv_pages` must be [p, w, 2 * g, d]; got {kv_pages.shape}."
        )
    key_cache, value_cache = (kv_pages[:, :, i::2].transpose(0, 2, 1, 3) for i in (0, 1))
    return key_cache, value_cache
