"""`ragged_page_attention`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, Shaped

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _common, _paged, _work_paged, page_attention
from ejkernel.ops.core.sharding import Layout
from ejkernel.ops.core.types import FwdParams


def default_scale(scale: float | None, args: Any) -> bool:
    return scale in (None, _common.default_scale(args.queries.shape[-1]))


@_spec.op_args
class RaggedPageAttentionArgs(_spec.OpArgs):
    """Arguments of `ragged_page_attention`; see the public function for their meaning."""

    queries: Float[Array, "n h d"]
    kv_pages: Shaped[Array, "p w g2 d"]
    context_lens: Int[Array, "i"]
    block_tables: Int[Array, "i m"]
    query_start_loc: Int[Array, "i1"]
    num_seqs: Integer[Array, "one"] = dataclasses.field(metadata={"ranks": (0,)})
    softmax_scale: _common.Scale = _spec.static(default=None, unset=default_scale, computed=True)
    sliding_window: int | tuple[int | None, int | None] | None = _spec.static(
        default=None, unset=page_attention.no_window
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
class RaggedPageAttentionConfig:
    """How to run `ragged_page_attention`; what is None is chosen by the library."""

    fwd_params: FwdParams | None = None
    platform: str | None = None
    backend: str | None = None
    bwd_params: None = None


def canonicalize(values: dict[str, Any]) -> RaggedPageAttentionArgs:
    """Checks a call and brings it to the one form that kernels see."""
    op = "ragged_page_attention"
    queries, kv_pages = jnp.asarray(values["queries"]), jnp.asarray(values["kv_pages"])
    integers = {
        name: jnp.asarray(values[name], jnp.int32)
        for name in ("context_lens", "block_tables", "query_start_loc", "num_seqs")
    }
    _, num_q_heads, head_dim = queries.shape
    _, _, double, _ = kv_pages.shape
    page_attention.check_caches(op, queries, kv_pages=kv_pages)
    if double % 2:
        raise ValueError(
            f"`{op}`: `kv_pages` must have an even number of heads, keys and values in turn; got "
            f"{double}."
        )
    count = integers["context_lens"].shape[0]
    if integers["query_start_loc"].shape != (count + 1,):
        raise ValueError(
            f"`{op}`: `query_start_loc` must be [{count + 1}], one more than `context_lens`; got "
            f"{integers['query_start_loc'].shape}."
        )
    if integers["num_seqs"].size != 1:
        raise ValueError(
            f"`{op}`: `num_seqs` must be one number; got {integers['num_seqs'].shape}."
        )
    integers["num_seqs"] = integers["num_seqs"].reshape(1)
    return RaggedPageAttentionArgs(
        queries=queries,
        kv_pages=kv_pages,
        **integers,
        **page_attention.decode_options(
            op,
            values,
            num_q_heads,
            double // 2,
            head_dim,
            queries.dtype,
            ("`queries`", "keys in `kv_pages`"),
        ),
    )


def check_count(values: dict[str, Any], op: str = "ragged_page_attention") -> None:
    """Refuses a known number of sequences that the tables do not have."""
    number, tables = _spec.known(values["num_seqs"]), values["block_tables"]
    if number is None or number.size != 1 or getattr(tables, "ndim", 0) != 2:
        return
    if not 0 <= (count := int(number.flat[0])) <= tables.shape[0]:
        raise ValueError(
            f"`{op}`: `num_seqs` must be in [0, {tables.shape[0]}], the rows of `block_tables`; "
            f"got {count}."
        )


def check_values(values: dict[str, Any]) -> None:
    """Checks known lengths, for `EJKERNEL_DEBUG`."""
    names = ("context_lens", "block_tables", "query_start_loc", "num_seqs")
    arrays = _paged.concrete(values, *names)
    if arrays is None:
        return
    op, (lens, tables, starts, number) = "ragged_page_attention", arrays
    count = int(number.reshape(()))
    lens, tables = lens[:count], tables[:count]
    _paged.check_tables(op, "context_lens", lens, tables, values["kv_pages"].shape[:2])
    _paged.check_starts(op, starts[: count + 1], "context_lens", lens, len(values["queries"]))


@dataclasses.dataclass(frozen=True, eq=False)
class PagedSpec(_spec.OpSpec):
    """An op over `kv_pages`, whose heads are split like the queries'; one key head stays whole."""

    def layout(self, args: Any) -> Layout | None:
        made = super().layout(args)
        if made is None:
            return None
        if args.kv_pages.shape[2] == 2:
            return dataclasses.replace(made, localize=self._one_writer)
        return dataclasses.replace(
            made,
            shardable=made.shardable | {"g2"},
            aliases=made.aliases | {"g2": "h"},
            units={"g2": 2},
            localize=self._whole_heads,
        )

    def _one_writer(self, args: Any, offsets: dict[str, jax.Array]) -> Any:
        """Refuses to write one key head on every device: nobody could tell that they agree."""
        if self.written and offsets:
            raise ValueError(
                f"`{self.name}`: one key head in `kv_pages` cannot be split over devices that all "
                "write it; repeat it, one a device, in `keys`, `values` and `kv_pages`, or call "
                "the function in a `shard_map` of your own with `check_vma=False`."
            )
        return args

    def _whole_heads(self, args: Any, offsets: dict[str, jax.Array]) -> Any:
        """Refuses a piece of the pages that parts keys from their values."""
        if args.kv_pages.shape[2] % 2:
            raise ValueError(
                f"`{self.name}`: the number of devices must divide the key heads; got pieces of "
                f"{args.kv_pages.shape[2]} heads of `kv_pages`, where keys and values take turns."
            )
        return args


def twin(args: Any, block: int) -> dict[str, int]:
    """Two key heads, three sequences over a block and two pages each, and a few dozen queries."""
    size, double = args.kv_pages.shape[1:3]
    groups = min(double // 2, 2)
    count, pages = min(args.block_tables.shape[0], 3), block // max(size, 1) + 2
    heads = groups * (args.queries.shape[1] // max(double // 2, 1))
    sizes = {"i": count, "i1": count + 1, "m": pages, "p": count * pages}
    tokens = args.queries.shape[0]
    return sizes | {"n": 40 + tokens % 8, "h": heads, "g": groups, "g2": 2 * groups}


def examples(args: RaggedPageAttentionArgs) -> dict[str, jax.Array]:
    """Sequences of equal shares of the queries, over long contexts in shuffled pages."""
    count, blocks = args.block_tables.shape
    tokens, (pages, size) = args.queries.shape[0], args.kv_pages.shape[:2]
    order = np.random.default_rng(0).permutation(max(count * blocks, 1))[: count * blocks]
    starts = np.linspace(0, tokens, count + 1).astype(np.int32)
    lens = np.maximum(np.linspace(blocks * size // 2, blocks * size, count), np.diff(starts))
    return page_attention.example_caches(args, "kv_pages") | {
        "context_lens": jnp.asarray(np.minimum(lens, blocks * size), jnp.int32),
        "block_tables": jnp.asarray(order.reshape(count, blocks) % max(pages, 1), jnp.int32),
        "query_start_loc": jnp.asarray(starts),
        "num_seqs": jnp.asarray([count]),
    }


# (heads, kv heads, d, page size, blocks of a table)
_SHAPES = {"small": (4, 2, 16, 4, 5), "odd": (3, 1, 8, 3, 6)}
_STARTS = (0, 7, 8, 8, 17, 19, 99)  # prefill, decode, nothing, prefill, mixed; one that is no more


def _values(row: dict[str, Any], dtype: Any, key: jax.Array) -> dict[str, Any]:
    """Public arguments of one row of options; the last sequence and two tokens do not count."""
    heads, groups, d, size, blocks = _SHAPES[row["shape"]]
    count = len(_STARTS) - 1
    tokens, pages = _STARTS[-2] + 2, count * blocks + 2
    (queries, kv_pages), options = page_attention.cache_values(
        row | {"groups": groups},
        dtype,
        key,
        heads,
        (tokens, heads, d),
        (pages, size, 2 * groups, d),
    )
    tables = page_attention.block_tables(row, pages, (count, blocks))
    return options | {
        "queries": queries,
        "kv_pages": kv_pages,
        "context_lens": jnp.asarray([7, 11, 5, 14, 2 * size + 1, 9], jnp.int32),
        "block_tables": jnp.asarray(tables, jnp.int32),
        "query_start_loc": jnp.asarray(_STARTS, jnp.int32),
        "num_seqs": count - 1,
    }


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    return page_attention.case_table(_values)


def changes() -> dict[str, dict[str, Any]]:
    return page_attention.decode_changes(_SHAPES["small"][0])


SPEC = PagedSpec(
    name="ragged_page_attention",
    work=_work_paged.ragged_page_attention,
    args=RaggedPageAttentionArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.ragged_page_attention:ragged_page_attention",
    differentiable=frozenset(),
    outputs=page_attention.outputs,
    output_axes={"out": ("n", "h", "d"), "lse": ("n", "h")},
    cases=cases,
    padded=page_attention.PADDED,
    changes=changes,
    examples=examples,
    twin=twin,
    config=RaggedPageAttentionConfig,
    scalars=page_attention.SCALARS
    | {"num_seqs": functools.partial(_common.int32_array, "ragged_page_attention", "num_seqs")},
    publish=page_attention.publish,
    check=check_count,
    debug=check_values,
    shardable=frozenset({"h", "g"}),
    aliases={"g": "h"},
)
