"""`grouped_matmul`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from ejkernel.kernels import _spec, _types
from ejkernel.kernels._specs import _common, _work_matmul
from ejkernel.ops.core.sharding import Layout
from ejkernel.xla_utils import dtypes

OP = "grouped_matmul"
_FORMS = " Either [m, k] with [g, k, n] and `group_sizes`, or [b, g, m, k] with [b, g, k, n]."
_BOTH_FORMS = {"ranks": (4,), "hint": _FORMS}


@_spec.op_args
class GroupedMatmulArgs(_spec.OpArgs):
    """Arguments of `grouped_matmul`; see the public function for their meaning."""

    lhs: Float[Array, "m k"] | Float[Array, "b g m k"] = dataclasses.field(metadata=_BOTH_FORMS)
    # [g, n, k] with `transpose_rhs`, so k is checked by hand
    rhs: Float[Array, "g i j"] | Float[Array, "b g i j"] = dataclasses.field(metadata=_BOTH_FORMS)
    group_sizes: Int[Array, "groups"] | None = None
    transpose_rhs: bool = _spec.static(default=False)
    preferred_element_type: str | None = _spec.static(default=None)
    group_offset: Integer[Array, ""] | None = _spec.array(ranks=(1,))
    existing_out: Float[Array, "m n"] | None = None


@dataclasses.dataclass(frozen=True)
class GroupedMatmulConfig:
    """How to run `grouped_matmul`; what is None is chosen by the library."""

    platform: str | None = None
    backend: str | None = None
    fwd_params: None = None
    bwd_params: None = None


def unpack(values: dict[str, Any]) -> dict[str, Any]:
    """The dtype asked for, in any spelling, by its name."""
    asked = values["preferred_element_type"]
    if asked is None or isinstance(asked, jax.core.Tracer):
        return values
    try:
        name = jnp.dtype(asked).name
    except TypeError:
        raise TypeError(
            f"`{OP}`: `preferred_element_type` must be a dtype such as jnp.float32; got {asked!r}."
        ) from None
    return values | {"preferred_element_type": name}


def canonicalize(values: dict[str, Any]) -> GroupedMatmulArgs:
    """Checks a call and brings it to the one form that kernels see."""
    call = unpack(values)
    lhs, rhs = jnp.asarray(call["lhs"]), jnp.asarray(call["rhs"])
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        _common.check_floats(OP, **{name: array})
    transposed = bool(call["transpose_rhs"])
    _check_shapes(lhs, rhs, transposed)
    name = call["preferred_element_type"]
    if name is not None and not jnp.issubdtype(jnp.dtype(name), jnp.floating):
        raise TypeError(f"`{OP}`: `preferred_element_type` must be a float dtype; got {name}.")
    preferred = None if name == dtypes.common(lhs.dtype, rhs.dtype).name else name
    made = GroupedMatmulArgs(
        lhs=lhs,
        rhs=rhs,
        group_sizes=_int32(call["group_sizes"]),
        transpose_rhs=transposed,
        preferred_element_type=preferred,
        group_offset=_scalar(call["group_offset"]),
        existing_out=None if call["existing_out"] is None else jnp.asarray(call["existing_out"]),
    )
    _check_groups(made)
    return made


def _int32(value: Any) -> jax.Array | None:
    return None if value is None else jnp.asarray(value, jnp.int32)


def _scalar(offset: Any) -> jax.Array | None:
    if offset is None:
        return None
    if np.size(offset) != 1:
        raise ValueError(f"`{OP}`: `group_offset` must be a scalar; got {np.shape(offset)}.")
    return jnp.asarray(offset, jnp.int32).reshape(())


def _check_shapes(lhs: jax.Array, rhs: jax.Array, transposed: bool) -> None:
    if (lhs.ndim, rhs.ndim) not in ((2, 3), (4, 4)):
        raise ValueError(f"`{OP}`: `lhs` {lhs.shape} does not go with `rhs` {rhs.shape}.{_FORMS}")
    if lhs.ndim == 4 and lhs.shape[:2] != rhs.shape[:2]:
        raise ValueError(
            f"`{OP}`: `rhs` must have the batch and groups of `lhs`, {lhs.shape[:2]}; got "
            f"{rhs.shape[:2]}."
        )
    k, other = lhs.shape[-1], rhs.shape[-1 if transposed else -2]
    if k != other:
        hint = " Set `transpose_rhs` if it is [g, n, k]." if rhs.shape[-1] == k else ""
        form = "[…, n, k]" if transposed else "[…, k, n]"
        raise ValueError(
            f"`{OP}`: `rhs` must be {form} with k={k} (from `lhs`); got {rhs.shape}.{hint}"
        )


def _check_groups(args: GroupedMatmulArgs) -> None:
    if args.lhs.ndim == 4:
        ragged = ("group_sizes", "group_offset", "existing_out")
        if given := [name for name in ragged if getattr(args, name) is not None]:
            raise ValueError(
                f"`{OP}`: {given} belong to `lhs` [m, k]; got `lhs` {args.lhs.shape}, whose groups "
                "are an axis."
            )
        return
    if args.group_sizes is None:
        raise ValueError(f"`{OP}`: `lhs` {args.lhs.shape} needs `group_sizes`, rows of each group.")
    groups, local = args.group_sizes.shape[0], args.rhs.shape[0]
    if groups != local and (args.group_offset is None or groups < local):
        raise ValueError(
            f"`{OP}`: `group_sizes` must have {local} entries, one for each matrix of `rhs`; got "
            f"{groups}. More are allowed with `group_offset`."
        )
    if (existing := args.existing_out) is None:
        return
    shape, dtype = (args.lhs.shape[0], num_columns(args)), out_dtype(args)
    if existing.shape != shape or existing.dtype != dtype:
        raise ValueError(
            f"`{OP}`: `existing_out` must be {dtype}{list(shape)}, as the output; got "
            f"{existing.dtype}{list(existing.shape)}."
        )


def num_columns(args: GroupedMatmulArgs) -> int:
    return args.rhs.shape[-2 if args.transpose_rhs else -1]


def out_dtype(args: GroupedMatmulArgs) -> Any:
    """The dtype asked for, or the one that both operands promote to."""
    common = dtypes.common(args.lhs.dtype, args.rhs.dtype)
    return jnp.dtype(args.preferred_element_type or common)


def check_offset(values: dict[str, Any]) -> None:
    """Refuses a known offset with which `rhs` reaches beyond the groups."""
    offset, sizes, rhs = (values[name] for name in ("group_offset", "group_sizes", "rhs"))
    host = _spec.known(offset)
    if host is None or host.size != 1 or getattr(sizes, "ndim", 0) != 1:
        return
    if not getattr(rhs, "ndim", 0):
        return  # the check of types says more
    first, most = int(host.flat[0]), sizes.shape[0] - rhs.shape[0]
    if not 0 <= first <= max(most, 0):
        raise ValueError(
            f"`{OP}`: `group_offset` must be in [0, {max(most, 0)}]: `rhs` holds {rhs.shape[0]} of "
            f"the {sizes.shape[0]} groups of `group_sizes`; got {first}."
        )


def check_values(values: dict[str, Any]) -> None:
    """Checks known sizes, for `EJKERNEL_DEBUG`."""
    sizes, rows = _spec.known(values["group_sizes"]), values["lhs"].shape[0]
    if sizes is not None and ((sizes < 0).any() or sizes.sum() > rows):
        raise ValueError(
            f"`{OP}`: `group_sizes` must be >= 0 and sum to at most the {rows} rows of `lhs`; got "
            f"{_types.brief(sizes)}."
        )


def examples(args: GroupedMatmulArgs) -> dict[str, jax.Array]:
    """Uneven groups that leave a few rows over, all of them here."""
    if args.group_sizes is None:
        return {}
    (groups,), rows = args.group_sizes.shape, args.lhs.shape[0]
    weights = 1.0 + np.arange(groups) % 4
    sizes = np.floor(0.95 * rows * weights / max(weights.sum(), 1.0))
    return {"group_sizes": jnp.asarray(sizes, jnp.int32), "group_offset": jnp.zeros((), jnp.int32)}


def twin(args: GroupedMatmulArgs, block: int) -> dict[str, int]:
    """Four groups at most, and rows of two blocks and the call's own remainder."""
    return {"b": 1, "g": 4, "groups": 4, "m": 2 * block + args.lhs.shape[-2] % block}


# m, k, n, rows of the groups: odd sizes, empty groups, rows left over
_SHAPES = {
    "uneven": (37, 24, 24, (5, 17, 0, 9)),
    "one": (19, 8, 12, (19,)),
    "small": (23, 16, 8, (0, 1, 2, 0, 3, 11, 0)),
    "nothing": (9, 8, 8, (0, 0, 0)),
}


def _values(row: dict[str, Any], dtype: Any, key: jax.Array) -> dict[str, Any]:
    m, k, n, sizes = _SHAPES[row.get("shape", "uneven")]
    keys = jax.random.split(key, 3)

    def normal(index: int, *shape: int, dtype: Any = dtype) -> jax.Array:
        return jax.random.normal(keys[index], shape, jnp.float32).astype(dtype)

    transposed = row.get("transpose_rhs", False)
    values: dict[str, Any] = {"transpose_rhs": transposed}
    matrix = (n, k) if transposed else (k, n)
    if row.get("batched"):
        return values | {"lhs": normal(0, 2, 3, m, k), "rhs": normal(1, 2, 3, *matrix)}
    groups = row.get("local", len(sizes))
    values |= {
        "lhs": normal(0, m, k),
        "rhs": normal(1, groups, *matrix, dtype=row.get("rhs_dtype") or dtype),
        "group_sizes": jnp.asarray(sizes, jnp.int32),
        "preferred_element_type": row.get("preferred"),
    }
    if "offset" in row:
        values["group_offset"] = row["offset"]
    if row.get("existing"):
        values["existing_out"] = normal(2, m, n, dtype=row.get("preferred") or dtype)
    return values


_ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batched": {"batched": True},
    "batched_transposed": {"batched": True, "transpose_rhs": True, "shape": "one"},
    "transposed": {"transpose_rhs": True, "shape": "small"},
    "one_group": {"shape": "one"},
    "empty_groups": {"shape": "nothing", "existing": True},
    # the middle groups are here, the others on other devices
    "offset_existing": {"shape": "small", "local": 3, "offset": 3, "existing": True},
    "mixed": {"rhs_dtype": "float32", "shape": "small"},
    "cover00": {"preferred": "float32", "transpose_rhs": True, "existing": True},
}


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    tags = frozenset({"core", "full"})
    return tuple(
        _spec.Case(name, functools.partial(_values, row), tags) for name, row in _ROWS.items()
    )


def changes() -> dict[str, dict[str, Any]]:
    """For each option, arguments that set it on the plain case; tests look for the effect."""
    m, k, n, sizes = _SHAPES["uneven"]
    fewer = jax.random.normal(jax.random.key(8), (len(sizes) - 1, k, n))
    return {
        "group_sizes": {"group_sizes": jnp.asarray([9, 0, 20, 2], jnp.int32)},
        "transpose_rhs": {"transpose_rhs": True},
        "preferred_element_type": {"preferred_element_type": "bfloat16"},
        "group_offset": {"group_offset": 1, "rhs": fewer},
        "existing_out": {"existing_out": jax.random.normal(jax.random.key(7), (m, n))},
    }


class GroupedMatmulSpec(_spec.OpSpec):
    """Both forms have axes of their own."""

    def layout(self, args: GroupedMatmulArgs) -> Layout:
        matrix = ("n", "k") if args.transpose_rhs else ("k", "n")
        if args.lhs.ndim == 4:
            arrays = {"lhs": ("b", "g", "m", "k"), "rhs": ("b", "g", *matrix)}
            outputs, shardable = ("b", "g", "m", "n"), frozenset("bgmn")
        else:
            arrays = {"lhs": ("m", "k"), "rhs": ("g", *matrix), "group_sizes": ("groups",)}
            arrays |= {"group_offset": (), "existing_out": ("m", "n")}
            outputs, shardable = ("m", "n"), frozenset("n")
        return Layout(
            arrays=arrays,
            outputs=(outputs,),
            shardable=shardable,
            aliases={},
            localize=self.localize,
            instead=self.instead,
        )


SPEC = GroupedMatmulSpec(
    name=OP,
    work=_work_matmul.grouped_matmul,
    args=GroupedMatmulArgs,
    canonicalize=canonicalize,
    unpack=unpack,
    reference="ejkernel.kernels._reference.grouped_matmul:grouped_matmul",
    formula="ejkernel.kernels._xla.grouped_matmul.formula:grouped_matmul",
    differentiable=frozenset({"lhs", "rhs", "existing_out"}),
    outputs=lambda args: ("out",),
    output_axes={"out": ("m", "n")},
    cases=cases,
    padded=("plain", "empty_groups"),
    changes=changes,
    examples=examples,
    twin=twin,
    config=GroupedMatmulConfig,
    scalars={"group_offset": functools.partial(_common.int32_array, OP, "group_offset")},
    check=check_offset,
    debug=check_values,
    instead="split groups over devices yourself, with `group_offset` in a `shard_map`",
)
