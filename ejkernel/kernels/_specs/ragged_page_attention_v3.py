"""`ragged_page_attention_v3`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from ejkernel.kernels import _derived, _spec
from ejkernel.kernels._shared import page_slots
from ejkernel.kernels._specs import (
    _common,
    _paged,
    _work_paged,
    page_attention,
    ragged_page_attention,
    update_kv_pages,
)
from ejkernel.ops.core.types import FwdParams


@_spec.op_args
class RaggedPageAttentionV3Args(_spec.OpArgs):
    """Arguments of `ragged_page_attention_v3`; see the public function for their meaning."""

    queries: Float[Array, "n h d"]
    keys: Float[Array, "n g d"]
    values: Float[Array, "n g d"]
    kv_pages: Shaped[Array, "p w g2 d"]
    kv_lens: Int[Array, "i"]
    block_tables: Int[Array, "i m"]
    query_start_loc: Int[Array, "i1"]
    distribution: Int[Array, "three"]
    softmax_scale: _common.Scale = _spec.static(
        default=None, unset=ragged_page_attention.default_scale, computed=True
    )
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
    # about buffers outside a jit, which no kernel can see
    donate_cache: bool = _spec.static(default=False, unset=lambda value, args: True)


@dataclasses.dataclass(frozen=True)
class RaggedPageAttentionV3Config:
    """How to run `ragged_page_attention_v3`; what is None is chosen by the library."""

    fwd_params: FwdParams | None = None
    platform: str | None = None
    backend: str | None = None
    bwd_params: None = None


def canonicalize(values: dict[str, Any]) -> RaggedPageAttentionV3Args:
    """Checks a call and brings it to the one form that kernels see."""
    op = "ragged_page_attention_v3"
    floats = {n: jnp.asarray(values[n]) for n in ("queries", "keys", "values", "kv_pages")}
    integers = {
        name: jnp.asarray(values[name], jnp.int32)
        for name in ("kv_lens", "block_tables", "query_start_loc", "distribution")
    }
    _, num_q_heads, head_dim = floats["queries"].shape
    num_kv_heads, double = floats["keys"].shape[1], floats["kv_pages"].shape[2]
    _common.check_floats(op, **{n: floats[n] for n in ("queries", "keys", "values")})
    page_attention.check_caches(op, floats["queries"], kv_pages=floats["kv_pages"])
    if double != 2 * num_kv_heads:
        raise ValueError(
            f"`{op}`: `kv_pages` must have {2 * num_kv_heads} heads, keys and values of each head "
            f"of `keys` in turn; got {double}."
        )
    if (places := math.prod(floats["kv_pages"].shape[:2])) > 2**31 - 1:
        raise ValueError(
            f"`{op}`: `kv_pages` must have fewer than 2**31 slots, which are numbered in 32 bits; "
            f"got {places}. Split the pages, and the sequences over them, into several calls."
        )
    count = integers["kv_lens"].shape[0]
    for name, size, rule in (
        ("query_start_loc", count + 1, "one more than `kv_lens`"),
        ("distribution", 3, "the ends of decode, prefill and mixed sequences"),
    ):
        if integers[name].shape != (size,):
            raise ValueError(
                f"`{op}`: `{name}` must be [{size}], {rule}; got {integers[name].shape}."
            )
    return RaggedPageAttentionV3Args(  # no kernel sees `donate_cache`
        **floats,
        **integers,
        **page_attention.decode_options(
            op,
            values,
            num_q_heads,
            num_kv_heads,
            head_dim,
            floats["queries"].dtype,
            ("`queries`", "`keys`"),
        ),
    )


def check_distribution(values: dict[str, Any]) -> None:
    """Refuses known numbers of sequences that the tables do not have."""
    ends, tables = _spec.known(values["distribution"]), values["block_tables"]
    if ends is None or ends.shape != (3,) or getattr(tables, "ndim", 0) != 2:
        return
    if (np.diff([0, *ends, tables.shape[0]]) < 0).any():
        raise ValueError(
            "`ragged_page_attention_v3`: `distribution` must not decrease and stay in [0, "
            f"{tables.shape[0]}], the rows of `block_tables`; got {ends.tolist()}."
        )


def check_values(values: dict[str, Any]) -> None:
    """Checks known lengths, tables and destinations, for `EJKERNEL_DEBUG`."""
    names = ("kv_lens", "block_tables", "query_start_loc", "distribution")
    arrays = _paged.concrete(values, *names)
    if arrays is None:
        return
    op, (lens, tables, starts, ends) = "ragged_page_attention_v3", arrays
    count, shape = int(ends[2]), values["kv_pages"].shape[:2]
    lens, tables, starts = lens[:count], tables[:count], starts[: count + 1]
    _paged.check_tables(op, "kv_lens", lens, tables, shape)
    _paged.check_starts(op, starts, "kv_lens", lens, len(values["queries"]))
    queries = np.diff(starts)
    if (row := _paged.first(queries[: ends[0]] != 1)) is not None:
        raise ValueError(
            f"`{op}`: the first {ends[0]} sequences decode by `distribution` and must have one "
            f"query; got {queries[row]} for sequence {row}."
        )
    owner = np.repeat(np.arange(count), queries)
    place = (lens - starts[1:])[owner] + starts[0] + np.arange(len(owner))
    slots = tables[owner, place // shape[1]] * shape[1] + place % shape[1]
    if (pair := _paged.repeated(slots)) is not None:
        raise ValueError(
            f"`{op}`: tokens must go to different places; got page {slots[pair[0]] // shape[1]} "
            f"written by sequences {owner[pair[0]]} and {owner[pair[1]]}."
        )


def examples(args: RaggedPageAttentionV3Args) -> dict[str, jax.Array]:
    """Equal shares of the queries, over contexts in shuffled pages of their own."""
    count, blocks = args.block_tables.shape
    tokens, (pages, size) = args.queries.shape[0], args.kv_pages.shape[:2]
    own = min(pages // max(count, 1), blocks)
    tables = np.zeros((count, blocks), np.int32)
    order = np.random.default_rng(0).permutation(max(pages, 1))[: count * own]
    tables[:, :own] = order.reshape(count, own)
    starts = np.linspace(0, tokens, count + 1).astype(np.int32)
    lens = np.maximum(np.linspace(own * size // 2, own * size, count), np.diff(starts))
    decode = count if tokens == count else 0
    return page_attention.example_caches(args, "kv_pages") | {
        "kv_lens": jnp.asarray(np.minimum(lens, own * size), jnp.int32),
        "block_tables": jnp.asarray(tables),
        "query_start_loc": jnp.asarray(starts),
        "distribution": jnp.asarray([decode, decode, count]),
    }


# (heads, kv heads, d, page size, blocks of a table)
_SHAPES = {"small": (4, 2, 16, 4, 5), "odd": (3, 1, 8, 3, 6)}
# two decode, two prefill (one of nothing), two mixed, and one that does not count
_STARTS = (0, 1, 2, 9, 9, 18, 20, 99)


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
    if row["bad_ids"]:  # of pages that this step writes: their tokens are not stored
        tables[2, 0], tables[4, 1], tables[5, 0] = -1, 2**30, pages
    new = jax.random.normal(jax.random.fold_in(key, 1), (2, tokens, groups, d), jnp.float32)
    return options | {
        "queries": queries,
        "keys": new[0].astype(dtype),
        "values": new[1].astype(dtype),
        "kv_pages": kv_pages,
        "kv_lens": jnp.asarray([11, 2 * size + 1, 7, 5, 14, 2, 9], jnp.int32),
        "block_tables": jnp.asarray(tables, jnp.int32),
        "query_start_loc": jnp.asarray(_STARTS, jnp.int32),
        "distribution": jnp.asarray([2, 4, count - 1], jnp.int32),
    }


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    return page_attention.case_table(_values)


def changes() -> dict[str, dict[str, Any]]:
    # nothing to see in the numbers of the last: whose memory the result takes
    return page_attention.decode_changes(_SHAPES["small"][0]) | {
        "donate_cache": {"donate_cache": True}
    }


def outputs(args: RaggedPageAttentionV3Args) -> tuple[str, ...]:
    return ("out", "kv_pages", "lse") if args.return_lse else ("out", "kv_pages")


def as_update(args: RaggedPageAttentionV3Args) -> update_kv_pages.UpdateKVPagesArgs:
    """The write of a step: its tokens as the pages hold them, and their slots."""
    dtype = args.kv_pages.dtype
    return update_kv_pages.UpdateKVPagesArgs(
        kv_pages=args.kv_pages,
        keys=page_slots.narrow(args.keys, args.k_scale, dtype),
        values=page_slots.narrow(args.values, args.v_scale, dtype),
        slot_mapping=page_slots.slots(
            args.query_start_loc,
            args.kv_lens,
            args.distribution[2],
            args.block_tables,
            args.keys.shape[0],
            args.kv_pages.shape[:2],
        ),
    )


_SHARED = [f.name for f in dataclasses.fields(ragged_page_attention.RaggedPageAttentionArgs)]


def as_attention(
    args: RaggedPageAttentionV3Args,
) -> ragged_page_attention.RaggedPageAttentionArgs:
    """The attention of a step, over the pages of `args`."""
    shared = {name: getattr(args, name) for name in _SHARED if hasattr(args, name)}
    lens, ends = args.kv_lens, args.distribution
    return ragged_page_attention.RaggedPageAttentionArgs(
        **shared, context_lens=lens, num_seqs=ends[2:]
    )


# The write comes first, so attention reads tokens as the pages hold them, rounded to their dtype.
LOWERING = _derived.Lowering(
    ragged_page_attention.SPEC,
    as_attention,
    before=_derived.Step(
        update_kv_pages.SPEC,
        as_update,
        absorb=lambda args, outputs: args.with_arrays({"kv_pages": outputs[0]}),
    ),
    outputs=lambda args, outputs: (outputs[0], args.kv_pages, *outputs[1:]),
)

SPEC = ragged_page_attention.PagedSpec(
    name="ragged_page_attention_v3",
    work=_work_paged.ragged_page_attention_v3,
    args=RaggedPageAttentionV3Args,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.ragged_page_attention_v3:ragged_page_attention_v3",
    lowers_to=LOWERING,
    differentiable=frozenset(),
    outputs=outputs,
    output_axes={
        "out": ("n", "h", "d"),
        "kv_pages": ("p", "w", "g2", "d"),
        "lse": ("n", "h"),
    },
    cases=cases,
    padded=page_attention.PADDED,
    changes=changes,
    examples=examples,
    twin=ragged_page_attention.twin,
    config=RaggedPageAttentionV3Config,
    scalars=page_attention.SCALARS,
    publish=page_attention.publish,
    check=check_distribution,
    debug=check_values,
    written=("kv_pages",),
    shardable=frozenset({"h", "g"}),
    aliases={"g": "h"},
)
