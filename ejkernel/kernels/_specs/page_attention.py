"""`page_attention`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from ejkernel.kernels import _cases, _spec
from ejkernel.kernels._specs import _common, _paged, _work_paged
from ejkernel.ops.core.types import FwdParams
from ejkernel.xla_utils import dtypes

NARROW = ("int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def no_window(window: Any, args: Any) -> bool:
    return window in (None, (None, 0))


def default_scale(scale: float | None, args: Any) -> bool:
    return scale in (None, _common.default_scale(args.query.shape[-1]))


@_spec.op_args
class PageAttentionArgs(_spec.OpArgs):
    """Arguments of `page_attention`; see the public function for their meaning."""

    query: Float[Array, "b h d"]
    key_cache: Shaped[Array, "p g w d"]
    value_cache: Shaped[Array, "p g w e"]
    context_lens: Int[Array, "b"]
    block_tables: Int[Array, "b m"]
    softmax_scale: _common.Scale = _spec.static(default=None, unset=default_scale, computed=True)
    block_size: int | None = _spec.static(
        default=None, unset=lambda size, args: size in (None, args.key_cache.shape[2])
    )
    sliding_window: int | tuple[int | None, int | None] | None = _spec.static(
        default=None, unset=no_window
    )
    logits_soft_cap: float | None = _spec.static(default=None)
    softmax_aux: Float[Array, "#h sinks"] | None = _spec.array(ranks=(1,))
    alibi_slopes: Float[Array, "h"] | None = None
    k_scale: Float[Array, "g"] | None = _spec.array(ranks=(0,))
    v_scale: Float[Array, "g"] | None = _spec.array(ranks=(0,))
    # only a hint: a kernel that does not split keys has nothing to honour
    num_splits: int | None = _spec.static(default=None, unset=lambda value, args: True)
    return_lse: bool = _spec.static(default=False)


@dataclasses.dataclass(frozen=True)
class PageAttentionConfig:
    """How to run `page_attention`; what is None is chosen by the library."""

    fwd_params: FwdParams | None = None
    platform: str | None = None
    backend: str | None = None
    bwd_params: None = None


def check_caches(op: str, query: jax.Array, **caches: jax.Array) -> None:
    """Keys and values have the dtype of the query, or both a narrow one that scales widen."""
    _common.check_floats(op, query=query)
    for name, array in caches.items():
        if array.dtype != query.dtype and str(array.dtype) not in NARROW:
            raise TypeError(
                f"`{op}`: `{name}` must have the dtype of `query`, {query.dtype}, or be int8 or "
                f"float8; got {array.dtype}. Cast with `{name}.astype(query.dtype)`."
            )
    if len({array.dtype for array in caches.values()}) > 1:
        given = ", ".join(f"`{name}` {array.dtype}" for name, array in caches.items())
        raise TypeError(f"`{op}`: keys and values must have one dtype; got {given}.")


def decode_options(
    op: str,
    call: dict[str, Any],
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any,
    names: tuple[str, str] = ("`query`", "`key`"),
) -> dict[str, Any]:
    """The options that all ops over cached keys share, in canonical form."""
    _common.check_heads(op, num_q_heads, num_kv_heads, names)
    slopes, splits = call["alibi_slopes"], call["num_splits"]
    if splits is not None and splits < 1:
        raise ValueError(f"`{op}`: `num_splits` must be at least 1; got {splits}.")
    return {
        "softmax_scale": _common.canonical_scale(op, call["softmax_scale"], head_dim, dtype),
        "sliding_window": _common.canonical_window(op, call["sliding_window"], causal=True),
        "logits_soft_cap": _common.canonical_cap(op, call["logits_soft_cap"]),
        "softmax_aux": _common.canonical_sinks(op, call["softmax_aux"], num_q_heads),
        "alibi_slopes": None if slopes is None else jnp.asarray(slopes),
        "k_scale": _head_scale(op, "k_scale", call["k_scale"], num_kv_heads),
        "v_scale": _head_scale(op, "v_scale", call["v_scale"], num_kv_heads),
        "num_splits": splits,
        "return_lse": bool(call["return_lse"]),
    }


def _head_scale(op: str, name: str, scale: Any, num_kv_heads: int) -> jax.Array | None:
    if scale is None:
        return None
    if jnp.shape(scale) not in ((), (num_kv_heads,)):
        raise ValueError(
            f"`{op}`: `{name}` must be a number or [{num_kv_heads}], one a key head; "
            f"got {jnp.shape(scale)}."
        )
    scale = jnp.asarray(scale)
    scale = scale.astype(dtypes.wide(scale.dtype))
    return jnp.broadcast_to(scale, (num_kv_heads,))


def scale_array(scale: Any) -> Any:
    """A Python number as an array, so that a new value compiles nothing; arrays pass."""
    plain = isinstance(scale, int | float | np.generic) and not isinstance(scale, bool)
    return np.asarray(scale, np.float32) if plain else scale


SCALARS = {"k_scale": scale_array, "v_scale": scale_array}


def canonicalize(values: dict[str, Any]) -> PageAttentionArgs:
    """Checks a call and brings it to the one form that kernels see."""
    op = "page_attention"
    query, key_cache, value_cache = (
        jnp.asarray(values[name]) for name in ("query", "key_cache", "value_cache")
    )
    _, num_q_heads, head_dim = query.shape
    _, num_kv_heads, page_size, _ = key_cache.shape
    check_caches(op, query, key_cache=key_cache, value_cache=value_cache)
    if values["block_size"] not in (None, page_size):
        raise ValueError(
            f"`{op}`: `block_size` must be the page size of `key_cache`, {page_size}; "
            f"got {values['block_size']}. Leave it out."
        )
    return PageAttentionArgs(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        context_lens=jnp.asarray(values["context_lens"], jnp.int32),
        block_tables=jnp.asarray(values["block_tables"], jnp.int32),
        block_size=page_size,
        **decode_options(
            op,
            values,
            num_q_heads,
            num_kv_heads,
            head_dim,
            query.dtype,
            ("`query`", "`key_cache`"),
        ),
    )


def publish(args: Any) -> dict[str, Any]:
    """Canonical arguments as the public function takes them: -1 for no limit of a window."""
    window = tuple(-1 if w is None else w for w in args.sliding_window)
    hidden = {f.name for f in _spec.static_fields(type(args)) if f.metadata.get("internal")}
    statics = {n: v for n, v in args.statics().items() if n not in hidden}
    return args.arrays() | statics | {"sliding_window": window}


def check_values(values: dict[str, Any]) -> None:
    """Checks known lengths and tables, for `EJKERNEL_DEBUG`."""
    arrays = _paged.concrete(values, "context_lens", "block_tables")
    if arrays is not None:
        lens, tables = arrays
        pages, _, page_size, _ = values["key_cache"].shape
        _paged.check_tables("page_attention", "context_lens", lens, tables, (pages, page_size))


def example_caches(args: Any, *names: str) -> dict[str, jax.Array]:
    """Keys and values of narrow dtypes, with scales that bring them to about one."""
    made = {}
    for index, name in enumerate(names):
        array = getattr(args, name)
        if array.dtype == jnp.int8:
            key = jax.random.key(7 + index)
            made[name] = jax.random.randint(key, array.shape, -127, 128, jnp.int8)
    for name in ("k_scale", "v_scale"):
        if (scale := getattr(args, name)) is not None:
            made[name] = jnp.full(scale.shape, 0.02 if made else 0.5)
    return made


def examples(args: PageAttentionArgs) -> dict[str, jax.Array]:
    """Lengths between half and all of the tables, over shuffled pages."""
    batch, blocks = args.block_tables.shape
    pages, page_size = args.key_cache.shape[0], args.key_cache.shape[2]
    order = np.random.default_rng(0).permutation(max(batch * blocks, 1))[: batch * blocks]
    lens = np.linspace(blocks * page_size // 2, blocks * page_size, batch).astype(np.int32)
    return example_caches(args, "key_cache", "value_cache") | {
        "context_lens": jnp.asarray(lens),
        "block_tables": jnp.asarray(order.reshape(batch, blocks) % max(pages, 1), jnp.int32),
    }


def twin(args: PageAttentionArgs, block: int) -> dict[str, int]:
    """Two rows, two key heads, and tables of two blocks and a page."""
    num_kv_heads, page_size = args.key_cache.shape[1:3]
    groups = min(num_kv_heads, 2)
    pages = 2 * -(-block // max(page_size, 1)) + 1
    repeat = args.query.shape[1] // num_kv_heads
    return {"b": 2, "g": groups, "h": groups * repeat, "m": pages, "p": 2 * pages}


# (batch, heads, kv heads, d, e, page size, blocks of a table)
_SHAPES = {"small": (4, 4, 2, 16, 16, 4, 5), "odd": (3, 3, 1, 8, 24, 3, 4)}
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "shape": tuple(_SHAPES),
    "window": (None, 6, (2, -1)),
    "cap": (None, 5.0),
    "sinks": (None, "shared", "per_head"),
    "alibi": (False, True),
    "cache": (None, "int8", "float8_e4m3fn"),
    "return_lse": (False, True),
}
_PLAIN = {name: values[0] for name, values in _OPTIONS.items()} | {"bad_ids": False, "scale": None}
_NAMED = {
    "plain": {},
    "causal_window_sinks": {"window": 6, "sinks": "per_head", "return_lse": True, "scale": 0.3},
    "bad_page_ids": {"bad_ids": True, "return_lse": True},
    "int8_scales": {"cache": "int8", "shape": "odd"},
    "float8_scales": {"cache": "float8_e4m3fn", "cap": 5.0},
}


PADDED = ("padded",)  # unused pages, and slots beyond a length


def cache_values(
    row: dict[str, Any], dtype: Any, key: jax.Array, heads: int, *shapes: tuple[int, ...]
) -> tuple[list[jax.Array], dict[str, Any]]:
    """Query, keys and values of the three shapes, and the options of a row of the table."""
    keys = iter(jax.random.split(key, 6))
    num_kv_heads = row["groups"]
    arrays = [jax.random.normal(next(keys), s, jnp.float32).astype(dtype) for s in shapes]
    options: dict[str, Any] = {
        "sliding_window": row["window"],
        "logits_soft_cap": row["cap"],
        "return_lse": row["return_lse"],
    }
    if row["scale"] is not None:
        options["softmax_scale"] = row["scale"]
    if row["cache"] is not None:
        factor = 30.0 if row["cache"] == "int8" else 1.0
        arrays[1:] = [(x * factor).astype(row["cache"]) for x in arrays[1:]]
        options["k_scale"] = 1.5 / factor
        options["v_scale"] = jnp.linspace(0.5, 2.0, num_kv_heads) / factor
    if row["sinks"] is not None:
        shape = (heads if row["sinks"] == "per_head" else 1, 2)
        options["softmax_aux"] = jax.random.normal(next(keys), shape).astype(dtype)
    if row["alibi"]:
        options["alibi_slopes"] = 2.0 ** -(1.0 + jnp.arange(heads, dtype=jnp.float32))
    return arrays, options


def block_tables(row: dict[str, Any], pages: int, shape: tuple[int, int]) -> np.ndarray:
    """Shuffled pages; the first two sequences begin with the same ones.

    With `bad_ids`, some ids name no page: in the first three places of two sequences, which their
    lengths reach, and past the third place, where some lengths end. Kernels read the nearest page.
    """
    count = shape[0] * shape[1]
    tables = np.random.default_rng(1).permutation(pages)[:count].reshape(shape)
    tables[1, :2] = tables[0, :2]
    if row["bad_ids"]:
        tables[0, :2] = -1, pages
        tables[1, :3] = 2**30, -(2**31), pages + 5  # 2**30 pages of 4 keys are 0 in 32 bits
        tables[1::2, 3:] = 2**31 - 1
        tables[2::2, 3:] = -7
    return tables


def _values(row: dict[str, Any], dtype: Any, key: jax.Array) -> dict[str, Any]:
    """Public arguments of one row of options, over shuffled pages, some shared, some unused."""
    batch, heads, groups, d, e, page_size, blocks = _SHAPES[row["shape"]]
    pages = batch * blocks + 2
    (query, k, v), options = cache_values(
        row | {"groups": groups},
        dtype,
        key,
        heads,
        (batch, heads, d),
        (pages, groups, page_size, d),
        (pages, groups, page_size, e),
    )
    tables = block_tables(row, pages, (batch, blocks))
    lens = [blocks * page_size, 2 * page_size + 1, 0, page_size][:batch]
    return options | {
        "query": query,
        "key_cache": k,
        "value_cache": v,
        "context_lens": jnp.asarray(lens, jnp.int32),
        "block_tables": jnp.asarray(tables, jnp.int32),
    }


def case_table(values: Any, paged: bool = True) -> tuple[_spec.Case, ...]:
    """Named rows first, then a pairwise cover; the head of the table is the core."""
    rows = [(name, _PLAIN | row) for name, row in _NAMED.items() if paged or "bad_ids" not in row]
    cover = _cases.pairwise(_OPTIONS, seed=3)
    cover.sort(key=lambda row: sum(row[name] == _PLAIN[name] for name in row))
    core = len(rows) + 3
    rows += [(f"cover{i:02d}", _PLAIN | row) for i, row in enumerate(cover)]
    tags = [{"core", "full"} if i < core else {"full"} for i in range(len(rows))]
    rows.append((*PADDED, _PLAIN | {"return_lse": True}))
    return tuple(
        _spec.Case(name, functools.partial(values, row), frozenset(own), grads=())
        for (name, row), own in zip(rows, [*tags, {"padding"}], strict=True)
    )


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    return case_table(_values)


def decode_changes(heads: int) -> dict[str, dict[str, Any]]:
    """For each shared option, arguments that set it on the plain case."""
    return {
        "softmax_scale": {"softmax_scale": 1.5},
        "sliding_window": {"sliding_window": 2},
        "logits_soft_cap": {"logits_soft_cap": 0.5},
        "softmax_aux": {"softmax_aux": jnp.asarray([[1.0, 2.0, 0.5]])},
        "alibi_slopes": {"alibi_slopes": jnp.linspace(0.1, 0.5, heads)},
        "k_scale": {"k_scale": 3.0},
        "v_scale": {"v_scale": 0.5},
        # nothing to see in the numbers: a hint about speed
        "num_splits": {"num_splits": 3},
        "return_lse": {"return_lse": True},
    }


def changes() -> dict[str, dict[str, Any]]:
    _, heads, _, _, _, page_size, _ = _SHAPES["small"]
    return decode_changes(heads) | {"block_size": {"block_size": page_size}}


def outputs(args: Any) -> tuple[str, ...]:
    return ("out", "lse") if args.return_lse else ("out",)


SPEC = _spec.OpSpec(
    name="page_attention",
    work=_work_paged.page_attention,
    args=PageAttentionArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.page_attention:page_attention",
    differentiable=frozenset(),
    outputs=outputs,
    output_axes={"out": ("b", "h", "e"), "lse": ("b", "h")},
    cases=cases,
    padded=PADDED,
    changes=changes,
    examples=examples,
    twin=twin,
    config=PageAttentionConfig,
    scalars=SCALARS,
    publish=publish,
    debug=check_values,
    shardable=frozenset({"b", "h", "g"}),
    aliases={"g": "h"},
)
