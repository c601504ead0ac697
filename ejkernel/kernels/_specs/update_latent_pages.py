"""`update_latent_pages`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
from typing import Any

from jaxtyping import Array, Int, Shaped

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _work_paged, update_paged_cache

_OP = "update_latent_pages"


@_spec.op_args
class UpdateLatentPagesArgs(_spec.OpArgs):
    """Arguments of `update_latent_pages`; see the public function for their meaning."""

    kv_pages: Shaped[Array, "p w lr"]
    latents: Shaped[Array, "n l"]
    ropes: Shaped[Array, "n r"]
    slot_mapping: Int[Array, "n"]
    # about buffers outside a jit, which no kernel can see
    donate_cache: bool = _spec.static(default=False, unset=lambda value, args: True)


@dataclasses.dataclass(frozen=True)
class UpdateLatentPagesConfig(update_paged_cache.UpdatePagedCacheConfig):
    """How to run `update_latent_pages`; there is nothing to tune."""


def canonicalize(values: dict[str, Any]) -> UpdateLatentPagesArgs:
    """Checks a call and brings it to the one form that kernels see."""
    latent, rope = values["latents"].shape[1], values["ropes"].shape[1]
    width = values["kv_pages"].shape[2]
    if width != latent + rope:
        raise ValueError(
            f"`{_OP}`: `kv_pages` must have a width of {latent + rope}, {latent} of `latents` "
            f"followed by {rope} of `ropes`; got {width}."
        )
    into = {"latents": "kv_pages", "ropes": "kv_pages"}
    return update_paged_cache.canonical_args(_OP, UpdateLatentPagesArgs, values, into)


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    made = {}
    for name, ((pages, _, size, latent, rope), slots) in update_paged_cache.ROWS.items():
        shapes = {
            "kv_pages": (pages, size, latent + rope),
            "latents": (len(slots), latent),
            "ropes": (len(slots), rope),
        }
        made[name] = (shapes, slots)
    return update_paged_cache.table(made)


SPEC = _spec.OpSpec(
    name=_OP,
    work=_work_paged.update_latent_pages,
    args=UpdateLatentPagesArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.update_latent_pages:update_latent_pages",
    outputs=lambda args: ("kv_pages",),
    output_axes={"kv_pages": ("p", "w", "lr")},
    cases=cases,
    padded=("plain", "outside"),
    examples=functools.partial(update_paged_cache.examples, "kv_pages", 1),
    config=UpdateLatentPagesConfig,
    debug=functools.partial(update_paged_cache.check_slots, _OP, "kv_pages", 1),
    written=("kv_pages",),
    instead="all heads share one latent vector, so keep a copy of the pages on each device",
    **update_paged_cache.FAMILY,
)
