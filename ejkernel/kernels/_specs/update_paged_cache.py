"""`update_paged_cache`, and what the ops that write tokens into pages share."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _paged, _work_paged


@_spec.op_args
class UpdatePagedCacheArgs(_spec.OpArgs):
    """Arguments of `update_paged_cache`; see the public function for their meaning."""

    key_cache: Shaped[Array, "p g w d"]
    value_cache: Shaped[Array, "p g w e"]
    keys: Shaped[Array, "n g d"]
    values: Shaped[Array, "n g e"]
    slot_mapping: Int[Array, "n"]
    # about buffers outside a jit, which no kernel can see
    donate_cache: bool = _spec.static(default=False, unset=lambda value, args: True)


@dataclasses.dataclass(frozen=True)
class UpdatePagedCacheConfig:
    """How to run `update_paged_cache`; there is nothing to tune."""

    platform: str | None = None
    backend: str | None = None
    fwd_params: None = None
    bwd_params: None = None


def canonical_args(op: str, cls: type, values: dict[str, Any], into: Mapping[str, str]) -> Any:
    """The arguments of an op that writes tokens `into` pages, both by name."""
    arrays = {f.name: jnp.asarray(values[f.name]) for f in _spec.array_fields(cls)}
    for new, cache in into.items():
        if arrays[new].dtype != arrays[cache].dtype:
            raise TypeError(
                f"`{op}`: `{new}` must have the dtype of `{cache}`, {arrays[cache].dtype}; got "
                f"{arrays[new].dtype}. Cast, or divide by the scale and round, before the call."
            )
    arrays["slot_mapping"] = arrays["slot_mapping"].astype(jnp.int32)
    return cls(**arrays)  # no kernel sees `donate_cache`


def canonicalize(values: dict[str, Any]) -> UpdatePagedCacheArgs:
    """Checks a call and brings it to the one form that kernels see."""
    into = {"keys": "key_cache", "values": "value_cache"}
    return canonical_args("update_paged_cache", UpdatePagedCacheArgs, values, into)


def check_slots(op: str, cache: str, axis: int, values: dict[str, Any]) -> None:
    """Checks concrete slots, for `EJKERNEL_DEBUG`; traced ones pass.

    `axis` is that of the slots of a page in the array `cache`.
    """
    arrays = _paged.concrete(values, "slot_mapping")
    if arrays is not None:
        room = values[cache].shape[0] * values[cache].shape[axis]
        (slots,) = arrays
        rule = f"`{op}`: `slot_mapping` must hold different slots in [0, {room}) or -1"
        if (token := _paged.first((slots < -1) | (slots >= room))) is not None:
            raise ValueError(f"{rule}; got {slots[token]} for token {token}.")
        if (pair := _paged.repeated(slots)) is not None:
            raise ValueError(f"{rule}; got {slots[pair[0]]} for tokens {pair[0]} and {pair[1]}.")


def examples(cache: str, axis: int, args: Any) -> dict[str, jax.Array]:
    """Slots all over the cache; whole numbers for caches of integers."""
    pages = getattr(args, cache)
    room = pages.shape[0] * pages.shape[axis]
    count = args.slot_mapping.shape[0]
    slots = np.random.default_rng(0).permutation(room)[:count]
    slots = np.concatenate([slots, np.full(count - len(slots), -1)])
    made = {"slot_mapping": jnp.asarray(slots, jnp.int32)}
    for index, (name, array) in enumerate(args.arrays().items()):
        if name != "slot_mapping" and jnp.issubdtype(array.dtype, jnp.integer):
            made[name] = jax.random.randint(jax.random.key(index), array.shape, -100, 100)
    return made


def twin(args: Any, block: int) -> dict[str, int]:
    """Two heads, a few pages and tokens."""
    return {"p": 5, "g": 2, "g2": 4, "n": 9}


def _values(
    shapes: dict[str, tuple[int, ...]], slots: list[int], dtype: Any, key: jax.Array
) -> dict[str, Any]:
    keys = jax.random.split(key, len(shapes))
    made = {
        name: jax.random.normal(k, s, jnp.float32).astype(dtype)
        for k, (name, s) in zip(keys, shapes.items(), strict=True)
    }
    return made | {"slot_mapping": jnp.asarray(slots, jnp.int32)}


# pages, key heads, page size, two widths; the slot of each token
ROWS = {
    "plain": ((3, 2, 4, 8, 8), [5, 0, 11, 3, 2]),
    "cover00": ((4, 1, 3, 4, 6), [-1, 11, 4, -1, 0, 7]),
    "skip_all": ((2, 2, 4, 8, 4), [-1, -1]),
    "outside": ((2, 1, 4, 8, 8), [8, 3, 2**31 - 1, -7]),
}


def table(rows: dict[str, tuple[dict[str, tuple[int, ...]], list[int]]]) -> tuple[_spec.Case, ...]:
    """Cases by name from the shapes of all arrays but the slots, and the slots."""
    tags = frozenset({"core", "full"})
    return tuple(
        _spec.Case(name, functools.partial(_values, *row), tags, grads=())
        for name, row in rows.items()
    )


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    made = {}
    for name, ((pages, groups, size, d, e), slots) in ROWS.items():
        shapes = {
            "key_cache": (pages, groups, size, d),
            "value_cache": (pages, groups, size, e),
            "keys": (len(slots), groups, d),
            "values": (len(slots), groups, e),
        }
        made[name] = (shapes, slots)
    return table(made)


# what the ops of this family share
FAMILY: dict[str, Any] = {
    "differentiable": frozenset(),
    # nothing to see in the numbers: whose memory the result takes
    "changes": lambda: {"donate_cache": {"donate_cache": True}},
    "twin": twin,
}

SPEC = _spec.OpSpec(
    name="update_paged_cache",
    work=_work_paged.update_paged_cache,
    args=UpdatePagedCacheArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.update_paged_cache:update_paged_cache",
    outputs=lambda args: ("key_cache", "value_cache"),
    output_axes={"key_cache": ("p", "g", "w", "d"), "value_cache": ("p", "g", "w", "e")},
    cases=cases,
    padded=("plain", "outside"),
    examples=functools.partial(examples, "key_cache", 2),
    config=UpdatePagedCacheConfig,
    debug=functools.partial(check_slots, "update_paged_cache", "key_cache", 2),
    written=("key_cache", "value_cache"),
    shardable=frozenset({"g"}),
    **FAMILY,
    heads="g",
)
