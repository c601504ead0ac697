"""`ring_attention`: its arguments, their checks and canonical form, and its cases."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer, Shaped

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _attention_cases, _common, _work_attention, flash_attention
from ejkernel.kernels._specs._common import MASK_HINT
from ejkernel.kernels._specs.flash_attention import FlashAttentionArgs
from ejkernel.ops.core.sharding import Layout
from ejkernel.ops.core.types import BwdParams, FwdParams
from ejkernel.xla_utils import manual

_OP = "ring_attention"
STRATEGIES = ("auto", "ring", "ulysses", "allgather")
LAYOUTS = ("contiguous", "zigzag")


@_spec.op_args
class RingAttentionArgs(_spec.OpArgs):
    """Arguments of `ring_attention`, of one device's block when `devices` is more than one."""

    query: Float[Array, "b t h d"]
    key: Float[Array, "b s g d"]
    value: Float[Array, "b s g e"]
    axis_name: str = _spec.static(default="ring")
    causal: bool = _spec.static(default=True)
    strategy: str = _spec.static(default="auto")
    layout: str = _spec.static(default="contiguous")
    # columns are the keys of all devices, in their own order
    attention_mask: Shaped[Array, "#b #h #t #columns"] | None = _spec.array(hint=MASK_HINT)
    bias: Float[Array, "#b #h #t #columns"] | None = _spec.array(hint=MASK_HINT)
    softmax_scale: _common.Scale = _spec.static(
        default=None, unset=flash_attention.default_scale, computed=True
    )
    dropout_prob: float = _spec.static(default=0.0)
    dropout_seed: Integer[Array, "words"] | None = _spec.array(ranks=(0,))
    sliding_window: int | tuple[int | None, int | None] | None = _spec.static(
        default=None, unset=flash_attention.no_window
    )
    logits_soft_cap: float | None = _spec.static(default=None)
    softmax_aux: Float[Array, "#h sinks"] | None = _spec.array(ranks=(1,))
    q_segment_ids: Int[Array, "b t"] | None = None
    kv_segment_ids: Int[Array, "b s"] | None = None
    alibi_slopes: Float[Array, "h"] | None = None
    return_lse: bool = _spec.static(default=False)
    dropout_offset: Integer[Array, "two"] | None = _spec.internal()
    # nobody sets it: the mesh says it
    devices: int = _spec.hidden(default=1, unset=lambda value, args: True)


@dataclasses.dataclass(frozen=True)
class RingAttentionConfig:
    """How to run `ring_attention`: blocks of the attention inside; None lets the library choose."""

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
    platform: str | None = None
    backend: str | None = None


def canonicalize(values: dict[str, Any]) -> RingAttentionArgs:
    """Checks a call and finds out how many devices share it."""
    call = dict(values)
    for name, allowed in (("strategy", STRATEGIES), ("layout", LAYOUTS)):
        if call[name] not in allowed:
            raise ValueError(
                f"`{_OP}`: `{name}` must be one of {', '.join(allowed)}; got {call[name]!r}."
            )
    devices = _devices(call["axis_name"])
    unused = dict.fromkeys(("cum_seqlens_q", "cum_seqlens_k"))
    made = flash_attention.canonicalize(call | unused, op=_OP)
    own = {name: call[name] for name in ("axis_name", "strategy", "layout")}
    shared = {
        f.name: getattr(made, f.name)
        for f in dataclasses.fields(RingAttentionArgs)
        if hasattr(made, f.name)
    }
    args = RingAttentionArgs(**shared, **own, devices=devices)
    _check_columns(args)
    return _split(args) if devices > 1 else args


def _devices(axis_name: str) -> int:
    """How many devices are on a mesh axis; 1 outside every shard_map."""
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        bound = jax.sharding.get_abstract_mesh().manual_axes
        if bound:
            raise ValueError(
                f"`{_OP}`: `axis_name` must be an axis of the shard_map around the call, one of "
                f"{tuple(bound)}; got {axis_name!r}."
            ) from None
        return 1


def _check_columns(args: RingAttentionArgs) -> None:
    keys = args.key.shape[1] * args.devices
    for name in ("attention_mask", "bias"):
        array = getattr(args, name)
        if array is not None and array.shape[3] not in (1, keys):
            raise ValueError(
                f"`{_OP}`: `{name}` must have 1 or {keys} columns, one for each key of "
                f"{args.devices} devices; got {array.shape}."
            )


def _split(args: RingAttentionArgs) -> RingAttentionArgs:
    """The arguments of one of several devices; what they cannot share is refused."""
    t, s, count = args.query.shape[1], args.key.shape[1], args.devices
    if args.layout == "zigzag" and (t % 2 or s % 2):
        raise ValueError(
            f"`{_OP}`: `layout='zigzag'` needs two equal chunks on each device; got {t} queries "
            f"and {s} keys a device. Pad the sequence to a multiple of {2 * count}."
        )
    if args.strategy == "ulysses" and not heads_divide(args):
        num_q_heads, num_kv_heads = args.query.shape[2], args.key.shape[2]
        raise ValueError(
            f"`{_OP}`: `strategy='ulysses'` gives each of {count} devices an equal share of the "
            f"heads; got {num_q_heads} query heads, which must be a multiple of {count}, and "
            f"{num_kv_heads} key heads, which must be a multiple or a divisor. Use 'ring'."
        )
    # blocks that are equal on all devices still have places of their own in the sequence
    here = jax.lax.axis_index(args.axis_name)
    q, k, v = manual.vary_alike([here, args.query, args.key, args.value])[1:]
    return dataclasses.replace(args, query=q, key=k, value=v)


def heads_divide(args: RingAttentionArgs) -> bool:
    """Whether the heads of a call can be shared out; a few key heads may be repeated."""
    count, num_kv_heads = args.devices, args.key.shape[2]
    return args.query.shape[2] % count == 0 and (
        num_kv_heads % count == 0 or count % num_kv_heads == 0
    )


def as_flash(args: RingAttentionArgs, **changes: Any) -> FlashAttentionArgs:
    """The same attention over the tokens at hand, as a call of `flash_attention`."""
    known = {f.name for f in dataclasses.fields(FlashAttentionArgs)}
    shared = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name in known}
    return FlashAttentionArgs(**shared | changes)


def localize(args: RingAttentionArgs, offsets: dict[str, jax.Array]) -> RingAttentionArgs:
    """The local block's arguments in the op's own shard_map."""
    changes: dict[str, Any] = {}
    if args.dropout_seed is not None:
        offset = jnp.stack([jnp.asarray(offsets.get(axis, 0), jnp.int32) for axis in "bh"])
        changes["dropout_offset"] = offset.astype(jnp.uint32)
    if "t" not in offsets:
        return dataclasses.replace(args, **changes)
    for name in ("query", "key"):
        if args.axis_name not in manual.varying_axes(getattr(args, name)):
            raise ValueError(
                f"`{_OP}`: `{name}` has one token, which cannot be split over {args.axis_name!r}."
            )
    changes["devices"] = jax.lax.axis_size(args.axis_name)
    return _split(dataclasses.replace(args, **changes))


class RingAttentionSpec(_spec.OpSpec):
    """Tokens may be split, over the axis that the call names."""

    def layout(self, args: RingAttentionArgs) -> Layout | None:
        made = super().layout(args)
        only = dict.fromkeys("ts", (args.axis_name,))
        return None if made is None else dataclasses.replace(made, only=only)


def _values(case: _spec.Case, dtype: Any, key: jax.Array) -> dict[str, Any]:
    made = case.values(dtype, key)
    return {n: x for n, x in made.items() if not n.startswith("cum_seqlens")}


def _cases() -> tuple[_spec.Case, ...]:
    """A part of `flash_attention`'s: a single device runs the schedule with one step."""
    made = []
    for index, case in enumerate(_attention_cases.cases()):
        tags = frozenset({"core", "full"} if index < 6 else {"full"})
        if "padding" in case.tags:
            tags = case.tags
        values = lambda dtype, key, case=case: _values(case, dtype, key)
        made.append(dataclasses.replace(case, values=values, tags=tags))
    return tuple(made)


def _changes() -> dict[str, dict[str, Any]]:
    made = _attention_cases.changes()
    unknown = ("cum_seqlens_q", "cum_seqlens_k", "deterministic")
    return {name: change for name, change in made.items() if name not in unknown} | {
        # one device holds all tokens, so there is nothing to see
        "axis_name": {"axis_name": "sequence"},
        "strategy": {"strategy": "ulysses"},
        "layout": {"layout": "zigzag"},
    }


def publish(args: RingAttentionArgs) -> dict[str, Any]:
    """Canonical arguments as the public function takes them, which is not told of devices."""
    made = flash_attention.publish(args)
    return {name: value for name, value in made.items() if name != "devices"}


SPEC = RingAttentionSpec(
    name=_OP,
    work=_work_attention.ring_attention,
    args=RingAttentionArgs,
    canonicalize=canonicalize,
    reference="ejkernel.kernels._reference.ring_attention:ring_attention",
    formula="ejkernel.kernels._ring.formula:ring_attention",
    differentiable=flash_attention.SPEC.differentiable,
    outputs=flash_attention.SPEC.outputs,
    output_axes=flash_attention.SPEC.output_axes,
    residuals=flash_attention.SPEC.residuals,
    cases=_cases,
    padded=("padded_segments",),
    changes=_changes,
    examples=lambda args: flash_attention.examples(as_flash(args)),
    twin=lambda args, block: _twin(args, block),
    config=RingAttentionConfig,
    scalars={"dropout_seed": functools.partial(_common.seed_array, "ring_attention")},
    publish=publish,
    shardable=frozenset({"b", "h", "g", "t", "s"}),
    aliases={"g": "h", "s": "t"},
    localize=localize,
)


def _twin(args: RingAttentionArgs, block: int) -> dict[str, int]:
    sizes = flash_attention.twin(as_flash(args), block)
    return sizes | {"columns": sizes["s"]}
