"""`update_kv_pages`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
from typing import Any

from jaxtyping import Array, Int, Shaped

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _work_paged, ragged_page_attention, update_paged_cache

_OP = "update_kv_pages"


@_spec.op_args
class UpdateKVPagesArgs(_spec.OpArgs):
    """Arguments of `update_kv_pages`; see the public function for their meaning."""

    kv_pages: Shaped[Array, "p w g2 d"]
    keys: Shaped[Array, "n g d"]
    values: Shaped[Array, "n g d"]
    slot_mapping: Int[Array, "n"]
    # about buffers outside a jit, which no kernel can see
    donate_cache: bool = _spec.static(default=False, unset=lambda value, args: True)


@dataclasses.dataclass(frozen=True)
class UpdateKVPagesConfig(update_paged_cache.UpdatePagedCacheConfig):
    """How to run `update_kv_pages`; there is nothing to tune."""


def canonicalize(values: dict[str, Any]) -> UpdateKVPagesArgs:
    """Checks a call and brings it to the one form that kernels see."""
    num_kv_heads, double = values["keys"].shape[1], values["kv_pages"].shape[2]
    if double != 2 * num_kv_heads:
        raise ValueError(
            f"`{_OP}`: `kv_pages` must have {2 * num_kv_heads} heads, keys and values of each head "
            f"of `keys` in turn; got {double}."
        )
    into = {"keys": "kv_pages", "values": "kv_pages"}
    return update_paged_cache.canonical_args(_OP, UpdateKVPagesArgs, values, into)


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    made = {}
    for name, ((pages, groups, size, d, _), slots) in update_paged_cache.ROWS.items():
        new = (len(slots), groups, d)
        shapes = {"kv_pages": (pages, size, 2 * groups, d), "keys": new, "values": new}
        made[name] = (shapes, slots)
    return update_paged_cache.table(made)


SPEC = ragged_page_attention.PagedSpec(
    name=_OP,
    work=_work_paged.update_kv_pages,
    args=UpdateKVPagesArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.update_kv_pages:update_kv_pages",
    outputs=lambda args: ("kv_pages",),
    output_axes={"kv_pages": ("p", "w", "g2", "d")},
    cases=cases,
    padded=("plain", "outside"),
    examples=functools.partial(update_paged_cache.examples, "kv_pages", 1),
    config=UpdateKVPagesConfig,
    debug=functools.partial(update_paged_cache.check_slots, _OP, "kv_pages", 1),
    written=("kv_pages",),
    shardable=frozenset({"h", "g"}),
    aliases={"g": "h"},
    **update_paged_cache.FAMILY,
)
