"""`native_sparse_attention`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ejkernel.kernels import _cases, _spec, _types
from ejkernel.kernels._specs import _common, _work_sparse
from ejkernel.ops.core.types import BwdParams, FwdParams

_INT32_MAX = 2**31 - 1
COUNT = 16
WORD = 16  # bits in a number of the residual `selected`


def default_scale(scale: float | None, args: Any) -> bool:
    return scale in (None, _common.default_scale(args.query.shape[-1]))


def _default_count(counts: Any, args: Any) -> bool:
    return counts is None and args.max_blocks == COUNT


_COUNTS = dataclasses.field(default=COUNT, metadata={"unset": _default_count})


@_spec.op_args
class NativeSparseAttentionArgs(_spec.OpArgs):
    """Arguments of `native_sparse_attention`; see the public function for their meaning."""

    query: Float[Array, "b t h d"]
    key: Float[Array, "b t g d"]
    value: Float[Array, "b t g e"]
    g_cmp: Float[Array, "b t h"] | None = None
    g_slc: Float[Array, "b t h"] | None = None
    g_swa: Float[Array, "b t h"] | None = None
    block_indices: Int[Array, "b t g k"] | None = None
    # canonical: an array, or None and an int in `max_blocks`
    block_counts: int | Int[Array, "b t g"] | None = _COUNTS
    block_size: int = _spec.static(default=64)
    window_size: int = _spec.static(default=0)
    softmax_scale: _common.Scale = _spec.static(default=None, unset=default_scale, computed=True)
    cu_seqlens: Int[Array, "n1"] | None = None
    max_blocks: int = _spec.hidden(default=COUNT)


@dataclasses.dataclass(frozen=True)
class NativeSparseAttentionConfig:
    """How to run `native_sparse_attention`; what is None is chosen by the library."""

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
    platform: str | None = None
    backend: str | None = None


def as_array(value: Any, dtype: Any = None) -> jax.Array | None:
    return None if value is None else jnp.asarray(value, dtype)


def unpack(values: dict[str, Any]) -> dict[str, Any]:
    """Takes an int `block_counts` apart from arrays, which have axes to check."""
    counts = values["block_counts"]
    if counts is None or hasattr(counts, "shape"):
        return values
    return values | {"block_counts": None, "_count": counts}


def common(op: str, call: dict[str, Any]) -> dict[str, Any]:
    """The checked arguments that both ops have, and an int of `block_counts` as `_count`."""
    call = unpack(call)
    query, key, value = (jnp.asarray(call[name]) for name in ("query", "key", "value"))
    _common.check_floats(op, query=query, key=key, value=value)
    batch, _, heads, head_dim = query.shape
    _common.check_heads(op, heads, key.shape[2])
    count, size, cu_seqlens = call.get("_count"), call["block_size"], call["cu_seqlens"]
    if count is not None and (not _is_int(count) or count < 1):
        raise ValueError(
            f"`{op}`: `block_counts` must be an int >= 1 or an array [b, t, g]; got {count!r}."
        )
    if not _is_int(size) or size < 1:
        raise ValueError(f"`{op}`: `block_size` must be an int >= 1; got {size!r}.")
    if cu_seqlens is not None and batch != 1:
        raise ValueError(
            f"`{op}`: `cu_seqlens` packs sequences into one row, so the batch must be 1; got "
            f"batch {batch}."
        )
    if cu_seqlens is not None and cu_seqlens.shape[0] < 1:
        raise ValueError(f"`{op}`: `cu_seqlens` must have at least one entry; got none.")
    return {
        "query": query,
        "key": key,
        "value": value,
        "block_indices": as_array(call["block_indices"], jnp.int32),
        "block_counts": as_array(call["block_counts"], jnp.int32),
        # a block beyond every token is the row
        "block_size": min(int(size), _INT32_MAX // 2),
        "softmax_scale": _common.canonical_scale(op, call["softmax_scale"], head_dim, query.dtype),
        "cu_seqlens": as_array(cu_seqlens, jnp.int32),
        "_count": None if count is None else min(int(count), _INT32_MAX),
    }


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def canonicalize(values: dict[str, Any]) -> NativeSparseAttentionArgs:
    """Checks a call and brings it to the one form that kernels see."""
    op = "native_sparse_attention"
    made = common(op, values)
    count, indices, window = made.pop("_count"), made["block_indices"], values["window_size"]
    if not _is_int(window) or window < 0:
        raise ValueError(f"`{op}`: `window_size` must be an int >= 0; got {window!r}.")
    if count is None and made["block_counts"] is None:
        raise ValueError(
            f"`{op}`: `block_counts` must be an int >= 1 or an array [b, t, g]; got None."
        )
    if indices is not None and count is not None and count < indices.shape[-1]:
        raise ValueError(
            f"`{op}`: `block_counts` must be at least the {indices.shape[-1]} blocks of a list of "
            f"`block_indices`; got {count}. Pass `block_counts={indices.shape[-1]}`, or shorten "
            "the lists."
        )
    gates = {name: as_array(values[name]) for name in ("g_cmp", "g_slc", "g_swa")}
    if gates["g_swa"] is not None and window == 0:
        raise ValueError(
            f"`{op}`: `window_size` must be at least 1 with `g_swa`, the gate of the sliding "
            "window; got 0. Pass `window_size=`, or leave `g_swa` out."
        )
    return NativeSparseAttentionArgs(
        **made,
        **gates,
        window_size=min(int(window), _INT32_MAX),
        max_blocks=COUNT if count is None else count,
    )


def publish(args: NativeSparseAttentionArgs) -> dict[str, Any]:
    """Canonical arguments as the public function takes them."""
    values = {"block_counts": args.max_blocks} | args.arrays() | args.statics()
    del values["max_blocks"]
    return values


def check_values(values: dict[str, Any], op: str = "native_sparse_attention") -> None:
    """Checks known lengths and counts, for `EJKERNEL_DEBUG`."""
    t = values["query"].shape[1]
    if (cuts := _spec.known(values["cu_seqlens"])) is not None:
        if (np.diff(cuts) < 0).any() or cuts.max(initial=0) > t:
            raise ValueError(
                f"`{op}`: `cu_seqlens` must not decrease, from 0 to at most the {t} tokens of "
                f"`query`; got {_types.brief(cuts)}."
            )
    if (counts := _spec.known(values["block_counts"])) is not None:
        if (least := int(counts.min(initial=1))) < 1:
            raise ValueError(f"`{op}`: `block_counts` must be at least 1; got {least}.")


def check_lists(values: dict[str, Any], op: str = "native_sparse_attention") -> None:
    """Refuses known indices beyond the blocks of the longest sequence."""
    lists, size = _spec.known(values["block_indices"]), values["block_size"]
    counts = values["block_counts"]
    if lists is None or lists.ndim != 4 or not _is_int(size) or size < 1:
        return
    if isinstance(counts, jax.core.Tracer):
        return  # which entries count is not known
    cuts, longest = _spec.known(values["cu_seqlens"]), lists.shape[1]
    if cuts is not None and cuts.ndim == 1 and cuts.dtype.kind == "i":
        longest = int(np.diff(cuts).max(initial=0))
    blocks = -(-longest // size)
    bad = (lists < -1) | (lists >= blocks)
    counts = counts if _is_int(counts) else _spec.known(counts)
    if counts is not None and np.shape(counts) in ((), lists.shape[:3]):
        bad &= np.arange(lists.shape[3]) < np.asarray(counts)[..., None]
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"`{op}`: `block_indices` must be -1 (none) or in [0, {blocks}), the blocks of {size} "
            f"that {longest} tokens make; got {lists[place]} at {list(place)}."
        )


def examples(args: Any) -> dict[str, jax.Array]:
    """Lists as models have them: the own block, the first, and some in between."""
    batch, t, groups = args.key.shape[:3]
    rng, made = np.random.default_rng(0), {}
    own = np.arange(t)[None, :, None] // args.block_size
    if args.block_indices is not None:
        k = args.block_indices.shape[-1]
        some = rng.integers(0, own[..., None] + 1, (batch, t, groups, k))
        some[..., :1], some[..., 1:2] = own[..., None], 0
        made["block_indices"] = jnp.asarray(some, jnp.int32)
    if args.block_counts is not None:
        made["block_counts"] = jnp.asarray(rng.integers(1, COUNT + 1, (batch, t, groups)))
    if args.cu_seqlens is not None:
        made["cu_seqlens"] = jnp.asarray(np.linspace(0, t, args.cu_seqlens.shape[0]), jnp.int32)
    return made


def twin(args: Any, block: int) -> dict[str, int]:
    """One row, two key heads, and a few blocks with the call's own remainder."""
    t, heads = args.query.shape[1:3]
    num_kv_heads = args.key.shape[2]
    groups = min(num_kv_heads, 2)
    size = args.block_size
    blocks = min(max(2 * block // size, 3), 8)
    repeat = heads // num_kv_heads
    return {"b": 1, "g": groups, "h": groups * repeat, "t": blocks * size + t % size}


class Branches(NamedTuple):
    """Which branches a call has."""

    compressed: bool
    selected: bool
    window: bool


def branches(args: NativeSparseAttentionArgs) -> Branches:
    """Those with a gate; without gates, the selection."""
    compressed, selected, window = (g is not None for g in (args.g_cmp, args.g_slc, args.g_swa))
    return Branches(compressed, selected or not (compressed or window), window)


def is_empty(args: Any) -> bool:
    """Whether a call has nothing to compute."""
    batch, t, heads, _ = args.query.shape
    no_sequence = args.cu_seqlens is not None and args.cu_seqlens.shape[0] == 1
    return 0 in (batch, t, heads) or no_sequence


def num_blocks(args: Any) -> int:
    """Blocks of a row; packed sequences each begin a new block, and need at most this many."""
    t = args.query.shape[1]
    if args.cu_seqlens is None:
        return -(-t // args.block_size)
    return t // args.block_size + args.cu_seqlens.shape[0] - 1


def residuals_of(
    names: Sequence[str], branch: str, has: Callable[[Any], bool]
) -> tuple[_spec.Residual, ...]:
    """Output, lse and, for a third name, chosen blocks of a branch; of shape [0] without it."""

    def of(shape: Callable[[Any], tuple[int, ...]]) -> Callable[[Any], tuple[int, ...]]:
        return lambda args: shape(args) if has(args) and not is_empty(args) else (0,)

    def words(args: Any) -> tuple[int, ...]:
        batch, t, groups, _ = args.key.shape
        return batch, groups, t, -(-num_blocks(args) // WORD)

    out = _spec.Residual(
        names[0],
        f"The output of {branch}, without its gate.",
        of(lambda args: (*args.query.shape[:3], args.value.shape[-1])),
        lambda args: args.query.dtype,
        axes=("b", "t", "h", "e"),
    )
    meaning = f"The lse of {branch}, as in `flash_attention`."
    rows = of(_common.rows_of_queries)
    made = [out, _spec.Residual(names[1], meaning, rows, axes=("b", "h", "t"))]
    for name in names[2:]:
        meaning = (
            f"The blocks that the queries of a key head see: bit i of number j, a whole number in "
            f"float32, is block {WORD} * j + i. Blocks are numbered along the row; each packed "
            "sequence begins a new one."
        )
        float32 = lambda args: jnp.dtype(jnp.float32)
        made.append(
            _spec.Residual(name, meaning, of(words), float32, axes=("b", "g", "t", "words"))
        )
    return tuple(made)


def localize(args: Any, offsets: dict[str, jax.Array]) -> Any:
    """Packed sequences are one row: there is no batch to split."""
    if args.cu_seqlens is not None and "b" in offsets:
        raise ValueError("`cu_seqlens` packs all sequences into one row: split heads instead.")
    return args


# (batch, tokens, heads, kv heads, d, e, block size): a partial last block, grouped heads, d != e
_SHAPES = {"plain": (1, 21, 4, 2, 8, 12, 4), "rows": (2, 19, 3, 1, 12, 8, 5)}
# an empty sequence, one of three blocks, one token, one of whole blocks, tokens of none
PACKED = (0, 9, 9, 10, 18, 18)
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "shape": ("plain", "packed", "rows"),
    "gates": ((), ("g_cmp", "g_slc"), ("g_cmp", "g_slc", "g_swa"), ("g_swa",)),
    "choice": (3, "counts", "lists", "lists and counts"),
}
_NAMED: dict[str, dict[str, Any]] = {
    "plain": {},
    "compressed": {"gates": ("g_cmp",), "shape": "rows"},
    "lists": {"choice": "lists", "shape": "packed"},
    "packed": {"gates": _OPTIONS["gates"][2], "shape": "packed", "choice": "counts"},
    "rows": {"gates": _OPTIONS["gates"][1], "shape": "rows", "choice": "lists and counts"},
    "window": {"gates": ("g_swa",), "shape": "rows"},
    "cover00": {"gates": _OPTIONS["gates"][2], "choice": 3, "scale": 0.5},
}


def lists_of(key: jax.Array, shape: tuple[int, ...], size: int, k: int) -> jax.Array:
    """Lists with the own block, some that repeat, some of the future, some that are none."""
    batch, t, groups = shape
    own = jnp.arange(t)[None, :, None, None] // size
    drawn = jax.random.randint(key, (batch, t, groups, k), -1, -(-t // size))
    return drawn.at[..., 1:2].set(jnp.broadcast_to(own, (batch, t, groups, 1))).astype(jnp.int32)


def _values(row: dict[str, Any], dtype: Any, key: jax.Array) -> dict[str, Any]:
    """Public arguments of one row of options; every array from a key of its own."""
    shape, choice = row.get("shape", "plain"), row.get("choice", 3)
    packed = shape == "packed"
    batch, t, heads, groups, d, e, size = _SHAPES["plain" if packed else shape]
    keys = iter(jax.random.split(key, 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

    values: dict[str, Any] = {
        "query": normal(batch, t, heads, d),
        "key": normal(batch, t, groups, d),
        "value": normal(batch, t, groups, e),
        "block_size": size,
        "window_size": 6 if "g_swa" in row.get("gates", ()) else 0,
    }
    for name in row.get("gates", ()):
        values[name] = jax.nn.sigmoid(normal(batch, t, heads))
    if isinstance(choice, int):
        values["block_counts"] = choice
    if "counts" in str(choice):
        values["block_counts"] = jax.random.randint(next(keys), (batch, t, groups), 1, 5)
    if "lists" in str(choice):
        values["block_indices"] = lists_of(next(keys), (batch, t, groups), size, 4)
    if "scale" in row:
        values["softmax_scale"] = row["scale"]
    if packed:
        values["cu_seqlens"] = jnp.asarray(PACKED, jnp.int32)
    return values


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    """Named rows, the core, then a pairwise cover."""
    rows = list(_NAMED.items())
    rows += [(f"cover{i + 1:02d}", row) for i, row in enumerate(_cases.pairwise(_OPTIONS, seed=1))]
    return tuple(
        _spec.Case(
            name,
            functools.partial(_values, row),
            frozenset({"core", "full"} if i < len(_NAMED) else {"full"}),
        )
        for i, (name, row) in enumerate(rows)
    )


def changes() -> dict[str, dict[str, Any]]:
    """For each option, arguments that set it on the plain case; tests look for the effect."""
    batch, t, heads, groups, _, _, size = _SHAPES["plain"]
    gate = jax.random.uniform(jax.random.key(9), (batch, t, heads)) + 0.5
    lists = lists_of(jax.random.key(8), (batch, t, groups), size, 2)
    return {
        "g_cmp": {"g_cmp": gate},
        "g_slc": {"g_slc": gate},
        "g_swa": {"g_swa": gate, "window_size": 5},
        "block_indices": {"block_indices": lists},
        "block_counts": {
            "block_counts": jnp.arange(t)[None, :, None] % 3 + jnp.ones((1, 1, 2), int)
        },
        "block_size": {"block_size": size},
        "window_size": {"g_swa": gate, "window_size": 2},
        "softmax_scale": {"softmax_scale": 1.5},
        "cu_seqlens": {"cu_seqlens": jnp.asarray(PACKED, jnp.int32)},
    }


# what both ops share
FAMILY: dict[str, Any] = {
    "unpack": unpack,
    "outputs": lambda args: ("out",),
    "output_axes": {"out": ("b", "t", "h", "e")},
    "examples": examples,
    "twin": twin,
    "shardable": frozenset({"b", "h", "g"}),
    "aliases": {"g": "h"},
    "localize": localize,
    "instead": "split the batch or the heads: a token may select any block before it",
}

SPEC = _spec.OpSpec(
    name="native_sparse_attention",
    work=_work_sparse.native_sparse_attention,
    args=NativeSparseAttentionArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.native_sparse_attention:native_sparse_attention",
    formula="ejkernel.kernels._xla.native_sparse_attention.formula:native_sparse_attention",
    differentiable=frozenset({"query", "key", "value", "g_cmp", "g_slc", "g_swa", "softmax_scale"}),
    residuals=(
        *residuals_of(
            ("slc_out", "slc_lse", "selected"),
            "the selected branch",
            lambda args: branches(args).selected,
        ),
        *residuals_of(
            ("swa_out", "swa_lse"), "the sliding window", lambda args: branches(args).window
        ),
    ),
    cases=cases,
    padded=("packed",),
    changes=changes,
    config=NativeSparseAttentionConfig,
    publish=publish,
    check=check_lists,
    debug=check_values,
    **FAMILY,
)
