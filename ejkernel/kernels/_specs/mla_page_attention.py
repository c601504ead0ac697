"""`mla_page_attention`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, Shaped

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _common, _work_paged, page_attention, ragged_page_attention
from ejkernel.ops.core.types import FwdParams

_OP = "mla_page_attention"


@_spec.op_args
class MLAPageAttentionArgs(_spec.OpArgs):
    """Arguments of `mla_page_attention`; see the public function for their meaning."""

    q_nope: Float[Array, "n h l"]
    q_pe: Float[Array, "n h r"]
    kv_pages: Shaped[Array, "p w lr"]
    context_lens: Int[Array, "i"]
    block_tables: Int[Array, "i m"]
    query_start_loc: Int[Array, "i1"]
    num_seqs: Integer[Array, "one"] = dataclasses.field(metadata={"ranks": (0,)})
    softmax_scale: _common.Scale = _spec.static(default=None, computed=True)  # None is refused
    sliding_window: int | tuple[int | None, int | None] | None = _spec.static(
        default=None, unset=page_attention.no_window
    )
    logits_soft_cap: float | None = _spec.static(default=None)
    softmax_aux: Float[Array, "#h sinks"] | None = _spec.array(ranks=(1,))
    alibi_slopes: Float[Array, "h"] | None = None
    k_scale: Float[Array, "one"] | None = _spec.array(ranks=(0,))
    # only a hint: a kernel that does not split keys has nothing to honour
    num_splits: int | None = _spec.static(default=None, unset=lambda value, args: True)
    return_lse: bool = _spec.static(default=False)


@dataclasses.dataclass(frozen=True)
class MLAPageAttentionConfig:
    """How to run `mla_page_attention`; what is None is chosen by the library."""

    fwd_params: FwdParams | None = None
    platform: str | None = None
    backend: str | None = None
    bwd_params: None = None


def canonicalize(values: dict[str, Any]) -> MLAPageAttentionArgs:
    """Checks a call and brings it to the one form that kernels see."""
    q_nope, q_pe, kv_pages = (jnp.asarray(values[n]) for n in ("q_nope", "q_pe", "kv_pages"))
    integers = {
        name: jnp.asarray(values[name], jnp.int32)
        for name in ("context_lens", "block_tables", "query_start_loc", "num_seqs")
    }
    if values["softmax_scale"] is None:
        raise ValueError(
            f"`{_OP}`: `softmax_scale` is required: it depends on the head size d before the "
            "projection to latent vectors, which no argument shows. Pass "
            f"`softmax_scale=(d + {q_pe.shape[-1]}) ** -0.5`, or the model's own."
        )
    _common.check_floats(_OP, q_nope=q_nope, q_pe=q_pe)
    _check_pages(q_nope, q_pe, kv_pages)
    count = integers["context_lens"].shape[0]
    if integers["query_start_loc"].shape != (count + 1,):
        raise ValueError(
            f"`{_OP}`: `query_start_loc` must be [{count + 1}], one more than `context_lens`; got "
            f"{integers['query_start_loc'].shape}."
        )
    if integers["num_seqs"].size != 1:
        raise ValueError(
            f"`{_OP}`: `num_seqs` must be one number; got {integers['num_seqs'].shape}."
        )
    integers["num_seqs"] = integers["num_seqs"].reshape(1)
    options = page_attention.decode_options(
        _OP,
        values | {"v_scale": None},
        num_q_heads=q_nope.shape[1],
        num_kv_heads=1,
        head_dim=q_nope.shape[-1] + q_pe.shape[-1],
        dtype=q_nope.dtype,
    )
    del options["v_scale"]
    return MLAPageAttentionArgs(q_nope=q_nope, q_pe=q_pe, kv_pages=kv_pages, **integers, **options)


def _check_pages(q_nope: jax.Array, q_pe: jax.Array, kv_pages: jax.Array) -> None:
    latent, rope, width = q_nope.shape[-1], q_pe.shape[-1], kv_pages.shape[-1]
    if width != latent + rope:
        raise ValueError(
            f"`{_OP}`: `kv_pages` must have rows of {latent} + {rope}, the latent of `q_nope` and "
            f"the rope part of `q_pe`; got {width}."
        )
    if kv_pages.dtype != q_nope.dtype and str(kv_pages.dtype) not in page_attention.NARROW:
        raise TypeError(
            f"`{_OP}`: `kv_pages` must have the dtype of `q_nope`, {q_nope.dtype}, or be int8 or "
            f"float8; got {kv_pages.dtype}. Cast with `kv_pages.astype(q_nope.dtype)`."
        )


def check_values(values: dict[str, Any]) -> None:
    """Checks concrete lengths, for `EJKERNEL_DEBUG`; traced ones pass."""
    try:
        ragged_page_attention.check_values(values | {"queries": values["q_nope"]})
    except ValueError as error:
        raise ValueError(str(error).replace("ragged_page_attention", _OP)) from None


def examples(args: MLAPageAttentionArgs) -> dict[str, jax.Array]:
    """Sequences of equal shares of the queries, over long contexts in shuffled pages."""
    count, blocks = args.block_tables.shape
    tokens, (pages, size) = args.q_nope.shape[0], args.kv_pages.shape[:2]
    order = np.random.default_rng(0).permutation(max(count * blocks, 1))[: count * blocks]
    starts = np.linspace(0, tokens, count + 1).astype(np.int32)
    lens = np.maximum(np.linspace(blocks * size // 2, blocks * size, count), np.diff(starts))
    made = {
        "context_lens": jnp.asarray(np.minimum(lens, blocks * size), jnp.int32),
        "block_tables": jnp.asarray(order.reshape(count, blocks) % max(pages, 1), jnp.int32),
        "query_start_loc": jnp.asarray(starts),
        "num_seqs": jnp.asarray([count]),
    }
    narrow = args.kv_pages.dtype == jnp.int8
    if narrow:
        key = jax.random.key(7)
        made["kv_pages"] = jax.random.randint(key, args.kv_pages.shape, -127, 128, jnp.int8)
    if args.k_scale is not None:
        made["k_scale"] = jnp.full(1, 0.02 if narrow else 0.5)
    return made


def twin(args: MLAPageAttentionArgs, block: int) -> dict[str, int]:
    """Three sequences over a block and two pages each, and a few dozen queries."""
    count = min(args.block_tables.shape[0], 3)
    pages = block // max(args.kv_pages.shape[1], 1) + 2
    sizes = {"i": count, "i1": count + 1, "m": pages, "p": count * pages}
    return sizes | {"n": 40 + args.q_nope.shape[0] % 8}


# (heads, latent, rope, page size, blocks of a table)
_SHAPES = {"small": (4, 12, 4, 4, 5), "odd": (3, 10, 6, 3, 6)}


def _values(row: dict[str, Any], dtype: Any, key: jax.Array) -> dict[str, Any]:
    """Public arguments of one row of options; the last sequence and two tokens do not count."""
    heads, latent, rope, size, blocks = _SHAPES[row["shape"]]
    starts = (0, 7, 8, 8, 17, 19, 99)  # prefill, decode, nothing, prefill, mixed, one too many
    count = len(starts) - 1
    tokens, pages = starts[-2] + 2, count * blocks + 2
    (queries, kv_pages), options = page_attention.cache_values(
        row | {"groups": 1},
        dtype,
        key,
        heads,
        (tokens, heads, latent + rope),
        (pages, size, latent + rope),
    )
    options.pop("v_scale", None)
    options.setdefault("softmax_scale", 0.3)
    tables = page_attention.block_tables(row, pages, (count, blocks))
    return options | {
        "q_nope": queries[..., :latent],
        "q_pe": queries[..., latent:],
        "kv_pages": kv_pages,
        "context_lens": jnp.asarray([7, 11, 5, 14, 2 * size + 1, 9], jnp.int32),
        "block_tables": jnp.asarray(tables, jnp.int32),
        "query_start_loc": jnp.asarray(starts, jnp.int32),
        "num_seqs": count - 1,
    }


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    return page_attention.case_table(_values)


def changes() -> dict[str, dict[str, Any]]:
    made = page_attention.decode_changes(_SHAPES["small"][0])
    return {name: change for name, change in made.items() if name != "v_scale"}


SPEC = _spec.OpSpec(
    name=_OP,
    work=_work_paged.mla_page_attention,
    args=MLAPageAttentionArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.mla_page_attention:mla_page_attention",
    differentiable=frozenset(),
    outputs=page_attention.outputs,
    output_axes={"out": ("n", "h", "l"), "lse": ("n", "h")},
    cases=cases,
    padded=page_attention.PADDED,
    changes=changes,
    examples=examples,
    twin=twin,
    config=MLAPageAttentionConfig,
    scalars={
        "k_scale": page_attention.scale_array,
        "num_seqs": functools.partial(_common.int32_array, _OP, "num_seqs"),
    },
    publish=page_attention.publish,
    check=functools.partial(ragged_page_attention.check_count, op="mla_page_attention"),
    debug=check_values,
    shardable=frozenset({"h"}),
)
