"""`update_kv_pages`: new tokens into pages where keys and values take turns."""

from typing import Any

from jaxtyping import Array, Int, Shaped

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.update_kv_pages import UpdateKVPagesConfig


def update_kv_pages(
    kv_pages: Shaped[Array, "p w g2 d"],
    keys: Shaped[Array, "n g d"],
    values: Shaped[Array, "n g d"],
    slot_mapping: Int[Array, "n"],
    *,
    donate_cache: bool = False,
    platform: str = "auto",
    cfg: UpdateKVPagesConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Shaped[Array, "p w g2 d"]:
    """Writes keys and values of new tokens into the pages of `ragged_page_attention`.

    kv_pages[slot // w, slot % w, 2 * head] = keys[i, head], with slot = slot_mapping[i], and
    values[i, head] at 2 * head + 1

    Inside a jit that donates the pages they are changed in place. Outside a jit they are copied,
    with a warning, unless `donate_cache` is set. There is no derivative.

    Args:
      kv_pages: Pages with keys at even and values at odd heads.
      keys: New keys in the dtype of the pages.
      values: New values.
      slot_mapping: Slot of each token; -1, or any slot outside the pages, skips it. Of two tokens
        with one slot either may win.
      donate_cache: Outside a jit, write in place; the array passed cannot be used afterwards.
      platform: "auto" or "xla"; a name never falls back.
      cfg: The platform as a config.
      mesh: Devices to split heads over, with `in_specs` and `out_specs`.
      in_specs: PartitionSpecs of the leading arrays in order, or by name; others are derived.
      out_specs: PartitionSpec of the pages.

    Returns:
      The pages.
    """
    return _op_kernel.call(UpdateKVPages, locals())


class UpdateKVPages(_op_kernel.OpKernel):
    """`update_kv_pages` for an executor."""

    op = "update_kv_pages"
    function = update_kv_pages
