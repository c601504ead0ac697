"""`update_latent_pages`: new tokens into pages of latent vectors."""

from typing import Any

from jaxtyping import Array, Int, Shaped

from ejkernel.kernels import _op_kernel
from ejkernel.kernels._specs.update_latent_pages import UpdateLatentPagesConfig


def update_latent_pages(
    kv_pages: Shaped[Array, "p w lr"],
    latents: Shaped[Array, "n l"],
    ropes: Shaped[Array, "n r"],
    slot_mapping: Int[Array, "n"],
    *,
    donate_cache: bool = False,
    platform: str = "auto",
    cfg: UpdateLatentPagesConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Shaped[Array, "p w lr"]:
    """Writes latent vectors of new tokens into the pages of `mla_page_attention`.

    kv_pages[slot // w, slot % w] = concatenate(latents[i], ropes[i]), with slot = slot_mapping[i]

    Inside a jit that donates the pages they are changed in place. Outside a jit they are copied,
    with a warning, unless `donate_cache` is set. There is no derivative.

    Args:
      kv_pages: Pages of latent vectors followed by the rope part of the keys.
      latents: New latent vectors in the dtype of the pages.
      ropes: The rope part of their keys.
      slot_mapping: Slot of each token; -1, or any slot outside the pages, skips it. Of two tokens
        with one slot either may win.
      donate_cache: Outside a jit, write in place; the array passed cannot be used afterwards.
      platform: "auto" or "xla"; a name never falls back.
      cfg: The platform as a config.
      mesh: No axis of this op can be split: its one latent head is whole on every device.
      in_specs: See `mesh`.
      out_specs: See `mesh`.

    Returns:
      The pages.
    """
    return _op_kernel.call(UpdateLatentPages, locals())


class UpdateLatentPages(_op_kernel.OpKernel):
    """`update_latent_pages` for an executor."""

    op = "update_latent_pages"
    function = update_latent_pages
