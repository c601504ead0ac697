"""`blocksparse_attention`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from ejkernel.kernels import _cases, _spec
from ejkernel.kernels._specs import _attention_cases, _common, _work_sparse, flash_attention
from ejkernel.kernels._specs._common import MASK_HINT
from ejkernel.ops.core.types import BwdParams, FwdParams
from ejkernel.types import block_mask
from ejkernel.xla_utils import segments

OP = "blocksparse_attention"
_FORMS = " Or [nq, nk] for all heads, [h, nq, nk] per head."


@_spec.op_args
class BlocksparseAttentionArgs(_spec.OpArgs):
    """Arguments of `blocksparse_attention`; see the public function for their meaning."""

    query: Float[Array, "b t h d"]
    key: Float[Array, "b s g d"]
    value: Float[Array, "b s g e"]
    sparsity_mask: Shaped[Array, "#b #h nq nk"] | None = _spec.array(ranks=(2, 3), hint=_FORMS)
    block_size: int = _spec.static(default=64, computed=True)
    bias: Float[Array, "#b #h #t #s"] | None = _spec.array(hint=MASK_HINT)
    attention_mask: Shaped[Array, "#b #h #t #s"] | None = _spec.array(hint=MASK_HINT)
    causal: bool = _spec.static(default=False)
    softmax_scale: _common.Scale = _spec.static(
        default=None, unset=flash_attention.default_scale, computed=True
    )
    sliding_window: int | tuple[int | None, int | None] | None = _spec.static(
        default=None, unset=flash_attention.no_window
    )
    logits_soft_cap: float | None = _spec.static(default=None)
    softmax_aux: Float[Array, "#h sinks"] | None = _spec.array(ranks=(1,))
    q_segment_ids: Int[Array, "b t"] | None = None
    kv_segment_ids: Int[Array, "b s"] | None = None
    mask_builder: block_mask.BlockMask | None = _spec.static(default=None)
    return_lse: bool = _spec.static(default=False)
    # what blocks shared with `flash_attention` ask for and this op does not offer
    dropout_prob: ClassVar[float] = 0.0
    deterministic: ClassVar[bool] = False
    alibi_slopes: ClassVar[None] = None
    cum_seqlens_q: ClassVar[None] = None
    cum_seqlens_k: ClassVar[None] = None
    q_positions: ClassVar[None] = None
    kv_positions: ClassVar[None] = None


@dataclasses.dataclass(frozen=True)
class BlocksparseAttentionConfig:
    """How to run `blocksparse_attention`; what is None is chosen by the library."""

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
    platform: str | None = None
    backend: str | None = None


def canonicalize(values: dict[str, Any]) -> BlocksparseAttentionArgs:
    """Checks a call and brings it to the one form that kernels see: a table of rank 4."""
    call = values
    query, key, value = (jnp.asarray(call[name]) for name in ("query", "key", "value"))
    _, t, num_q_heads, head_dim = query.shape
    _, s, num_kv_heads, _ = key.shape
    _common.check_floats(OP, query=query, key=key, value=value)
    _common.check_heads(OP, num_q_heads, num_kv_heads)
    causal, mask = bool(call["causal"]), call["attention_mask"]
    window = _common.canonical_window(OP, call["sliding_window"], causal)
    q_ids, kv_ids = _common.pair_up(OP, call, ("q_segment_ids", "kv_segment_ids"), t, s)
    as_array = flash_attention.as_array
    return BlocksparseAttentionArgs(
        query=query,
        key=key,
        value=value,
        sparsity_mask=_table(call, t, s, window),
        block_size=_whole_block(int(call["block_size"]), max(t, s)),
        bias=as_array(call["bias"]),
        attention_mask=flash_attention.as_mask(OP, mask),
        causal=causal,
        softmax_scale=_common.canonical_scale(OP, call["softmax_scale"], head_dim, query.dtype),
        sliding_window=window,
        logits_soft_cap=_common.canonical_cap(OP, call["logits_soft_cap"]),
        softmax_aux=_common.canonical_sinks(OP, call["softmax_aux"], num_q_heads),
        q_segment_ids=as_array(q_ids, jnp.int32),
        kv_segment_ids=as_array(kv_ids, jnp.int32),
        return_lse=bool(call["return_lse"]),
    )


def _whole_block(size: int, length: int) -> int:
    """A block beyond every token, in whole tiles of 128: kernels fill rows up to whole blocks."""
    return min(size, max(-(-length // 128), 1) * 128)


def _table(call: dict[str, Any], t: int, s: int, window: Any) -> jax.Array:
    """The mask of blocks as [1 or b, 1 or h, nq, nk]."""
    mask, builder, size = (call[n] for n in ("sparsity_mask", "mask_builder", "block_size"))
    if size < 1:
        raise ValueError(f"`{OP}`: `block_size` must be at least 1; got {size}.")
    limited = window != (None, None)
    if (mask is None) == (builder is None) and not (mask is None and limited):
        given = "neither" if mask is None else "both"
        raise ValueError(
            f"`{OP}`: give either `sparsity_mask` or `mask_builder`; got {given}. A mask and a "
            "pattern combine as `mask & jnp.asarray(pattern.build(t, s, block_size))`; with "
            "`causal` or `sliding_window` both may be left out."
        )
    whole = _whole_block(int(size), max(t, s))  # of as many blocks
    if mask is None and builder is None:
        return jnp.asarray(_inside_window(t, s, whole, window))[None, None]
    if mask is None:
        return jnp.asarray(builder.build(t, s, whole))[None, None]
    mask = segments.as_bool_mask(OP, "sparsity_mask", mask)
    mask = mask[(None,) * (4 - mask.ndim)]
    wanted = (-(-t // size), -(-s // size))
    if mask.shape[2:] != wanted:
        raise ValueError(
            f"`{OP}`: `sparsity_mask` must have {wanted[0]} x {wanted[1]} blocks for {t} queries, "
            f"{s} keys and blocks of {size}; got {mask.shape[2]} x {mask.shape[3]}."
        )
    for axis, (name, full) in enumerate((("batch", call["query"].shape[0]),
                                         ("heads", call["query"].shape[2]))):  # fmt: skip
        if mask.shape[axis] not in (1, full):
            raise ValueError(
                f"`{OP}`: `sparsity_mask` must have 1 or {full} {name}; got {mask.shape[axis]}."
            )
    return mask


def _inside_window(t: int, s: int, size: int, window: Any) -> np.ndarray:
    """The blocks [nq, nk] with a pair inside a window."""
    left, right = (t + s if limit is None else min(limit, t + s) for limit in window)
    first, key = np.arange(0, t, size)[:, None] + (s - t), np.arange(0, s, size)[None]
    last = np.minimum(first + size, s) - 1
    return (np.minimum(key + size, s) > first - left) & (key <= last + right)


def publish(args: BlocksparseAttentionArgs) -> dict[str, Any]:
    """Canonical arguments as the public function takes them: -1 for no limit of a window."""
    window = tuple(-1 if w is None else w for w in args.sliding_window)
    return args.arrays() | args.statics() | {"sliding_window": window}


def examples(args: BlocksparseAttentionArgs) -> dict[str, jax.Array]:
    """A quarter of the blocks and the diagonal; masks and ids as `flash_attention` has them."""
    shape = args.sparsity_mask.shape
    some = jax.random.bernoulli(jax.random.key(5), 0.25, shape)
    nq, nk = shape[2:]
    made = {"sparsity_mask": some | jnp.eye(nq, nk, max(nk - nq, 0), dtype=bool)[None, None]}
    if args.attention_mask is not None:
        shape = args.attention_mask.shape
        made["attention_mask"] = jax.random.bernoulli(jax.random.key(3), 0.9, shape)
    for name, like in (("q_segment_ids", args.query), ("kv_segment_ids", args.key)):
        batch, length = like.shape[:2]
        ids = jnp.arange(length, dtype=jnp.int32) * 4 // max(length, 1)
        made[name] = jnp.broadcast_to(ids, (batch, length))
    return made


def twin(args: BlocksparseAttentionArgs, block: int) -> dict[str, int]:
    """One row, two key heads, and lengths of two blocks and the call's own remainder."""
    (t, num_q_heads), (s, num_kv_heads) = args.query.shape[1:3], args.key.shape[1:3]
    groups, size = min(num_kv_heads, 2), args.block_size
    t, s = (min(n, 2 * size + n % size) for n in (t, s))
    return {
        "b": 1,
        "g": groups,
        "h": groups * (num_q_heads // num_kv_heads),
        "t": t,
        "s": s,
        "nq": -(-t // size),
        "nk": -(-s // size),
    }


# (batch, t, s, heads, kv heads, d, e, block size): odd lengths, grouped heads, d != e
_SHAPES = {
    "square": (2, 40, 40, 4, 2, 16, 16, 16),
    "long_keys": (1, 19, 50, 3, 1, 8, 24, 16),
    "long_queries": (2, 45, 33, 2, 2, 32, 16, 32),
}
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "shape": tuple(_SHAPES),
    "blocks": ("shared", "heads", "rows", "all", "builder"),
    "causal": (False, True),
    "window": (None, 7, (9, -1)),
    "mask": (None, "key_padding"),
    "bias": (None, "full", "shared"),
    "ids": (False, True),
    "sinks": (None, "shared", "per_head"),
    "cap": (None, 5.0),
    "return_lse": (False, True),
}


def _some(*shape: int) -> jax.Array:
    """Half of the blocks, and a row of blocks without a key."""
    mask = np.random.default_rng(shape[-1]).random(shape) < 0.5
    mask[..., 1, :] = False
    return jnp.asarray(mask)


def _values(row: dict[str, Any], dtype: Any, key: jax.Array) -> dict[str, Any]:
    """Public arguments of one row of options; every array from a key of its own."""
    batch, t, s, heads, kv_heads, d, e, size = _SHAPES[row["shape"]]
    keys = iter(jax.random.split(key, 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

    values: dict[str, Any] = {
        "query": normal(batch, t, heads, d),
        "key": normal(batch, s, kv_heads, d),
        "value": normal(batch, s, kv_heads, e),
        "block_size": size,
        "causal": row["causal"],
        "sliding_window": row["window"],
        "logits_soft_cap": row["cap"],
        "return_lse": row["return_lse"],
    }
    lead = {"shared": (), "heads": (heads,), "rows": (batch, 1), "all": (batch, heads)}
    if row["blocks"] == "everything":
        values["sparsity_mask"] = jnp.ones((-(-t // size), -(-s // size)), bool)
    elif row["blocks"] == "builder":
        values["mask_builder"] = block_mask.local(1) | block_mask.random(1, seed=7)
    else:
        values["sparsity_mask"] = _some(*lead[row["blocks"]], -(-t // size), -(-s // size))
    if "scale" in row:
        values["softmax_scale"] = row["scale"]
    if row["mask"]:
        values["attention_mask"] = jnp.arange(s)[None, None, None] < s - 5
    if row["bias"]:
        values["bias"] = normal(*((batch, heads, t, s) if row["bias"] == "full" else (1, 1, 1, s)))
    if row["ids"]:
        values["q_segment_ids"] = jnp.asarray(_attention_cases.segment_rows(batch, t))
        values["kv_segment_ids"] = jnp.asarray(_attention_cases.segment_rows(batch, s))
    if row["sinks"]:
        values["softmax_aux"] = normal(heads if row["sinks"] == "per_head" else 1, 2)
    return values


_PLAIN = {name: values[0] for name, values in _OPTIONS.items()}
_NAMED: dict[str, dict[str, Any]] = {
    "plain": {},
    "per_head_causal": {"blocks": "heads", "causal": True, "return_lse": True, "scale": 0.5},
    "causal_window_sinks": {"causal": True, "window": 7, "sinks": "per_head", "blocks": "all"},
    "segments_window_bias": {"ids": True, "window": (9, -1), "bias": "full", "blocks": "rows"},
}
_CORE_ROWS = 4


@functools.cache
def cases() -> tuple[_spec.Case, ...]:
    """Named triples first, then the cover; the head of the table is the core."""
    rows = [(name, _PLAIN | row) for name, row in _NAMED.items()]
    cover = _cases.pairwise(_OPTIONS, seed=5)
    cover.sort(key=lambda row: sum(row[name] == _PLAIN[name] for name in row))
    rows += [(f"cover{i:02d}", row) for i, row in enumerate(cover)]
    made = []
    for index, (name, row) in enumerate(rows):
        tags = frozenset({"core", "full"} if index < len(_NAMED) + _CORE_ROWS else {"full"})
        made.append(_spec.Case(name, functools.partial(_values, row), tags))
    row = _PLAIN | {"ids": True, "blocks": "everything", "return_lse": True}
    made.append(_spec.Case("padded", functools.partial(_values, row), frozenset({"padding"})))
    return tuple(made)


def changes() -> dict[str, dict[str, Any]]:
    """For each option, arguments that set it on the plain case; tests look for the effect."""
    batch, t, s, heads, *_ = _SHAPES["square"]
    finer = jnp.repeat(jnp.repeat(_some(3, 3), 2, axis=0), 2, axis=1)[:5, :5]
    ids = {"q_segment_ids": jnp.asarray(_attention_cases.segment_rows(batch, t))}
    return {
        "sparsity_mask": {"sparsity_mask": jnp.eye(3, dtype=bool)},
        # the same pairs in smaller blocks
        "block_size": {"block_size": 8, "sparsity_mask": finer},
        "bias": {"bias": jax.random.normal(jax.random.key(23), (batch, heads, t, s))},
        "attention_mask": {"attention_mask": jnp.arange(s)[None, None, None] % 3 != 0},
        "causal": {"causal": True},
        "softmax_scale": {"softmax_scale": 0.7},
        "sliding_window": {"sliding_window": (5, 2)},
        "logits_soft_cap": {"logits_soft_cap": 0.5},
        "softmax_aux": {"softmax_aux": jnp.asarray([[1.0, 2.0, 0.5]])},
        "q_segment_ids": ids,
        "kv_segment_ids": ids
        | {"kv_segment_ids": jnp.asarray(_attention_cases.segment_rows(batch, s)[::-1])},
        "mask_builder": {"sparsity_mask": None, "mask_builder": block_mask.local(1)},
        "return_lse": {"return_lse": True},
    }


SPEC = _spec.OpSpec(
    name=OP,
    work=_work_sparse.blocksparse_attention,
    args=BlocksparseAttentionArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.blocksparse_attention:blocksparse_attention",
    formula="ejkernel.kernels._xla.blocksparse_attention.formula:blocksparse_attention",
    differentiable=flash_attention.SPEC.differentiable,
    outputs=flash_attention.SPEC.outputs,
    output_axes=flash_attention.SPEC.output_axes,
    residuals=(_common.LSE,),
    cases=cases,
    padded=("padded",),
    changes=changes,
    examples=examples,
    twin=twin,
    config=BlocksparseAttentionConfig,
    publish=publish,
    shardable=flash_attention.SPEC.shardable,
    aliases=flash_attention.SPEC.aliases,
    instead=flash_attention.SPEC.instead,
)
