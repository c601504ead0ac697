"""Attention of one device over all tokens, of its own heads or for its own queries.

"ulysses" (Jacobs et al., 2023) exchanges tokens for heads with all-to-all; "allgather" collects all
keys. Both bring tokens into their own order, so that any kernel serves them. What they do to arrays
is linear, and JAX transposes it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._registry import KernelEntry
from ejkernel.kernels._ring import plan
from ejkernel.kernels._specs.flash_attention import FlashAttentionArgs
from ejkernel.kernels._specs.ring_attention import RingAttentionArgs, as_flash
from ejkernel.xla_utils import zigzag


def forward(args: RingAttentionArgs, cfg: Any, inner: KernelEntry) -> Any:
    """Outputs and residuals of `ring_attention`."""
    view = view_of(args)
    outputs, (lse,) = inner.fn(view.spread(args), cfg)
    outputs = tuple(view.home(x, axis) for x, axis in zip(outputs, (1, 2), strict=False))
    return outputs, (view.home(lse, 2),)


def backward(
    args: RingAttentionArgs,
    cfg: Any,
    inner: KernelEntry,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    view = view_of(args)

    def of_wanted(arrays: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], FlashAttentionArgs]:
        made = view.spread(args.with_arrays(arrays))
        return {name: getattr(made, name) for name in arrays}, made

    point = {name: getattr(args, name) for name in sorted(wanted)}
    _, pull, made = jax.vjp(of_wanted, point, has_aux=True)
    outs, douts = (
        tuple(view.away(x, axis) for x, axis in zip(xs, (1, 2), strict=False))
        for xs in (outputs, cotangents)
    )
    grads = inner.backward(made, cfg, outs, (view.away(residuals[0], 2),), douts, wanted)
    return pull({name: grads[name] for name in point})[0]


def formula(args: RingAttentionArgs, attend: Callable[[Any], Any]) -> tuple[jax.Array, ...]:
    """The outputs by a formula of `flash_attention`."""
    view = view_of(args)
    outputs = attend(view.spread(args))
    return tuple(view.home(x, axis) for x, axis in zip(outputs, (1, 2), strict=False))


def view_of(args: RingAttentionArgs) -> "AllGather":
    return Ulysses(args) if plan.strategy(args) == "ulysses" else AllGather(args)


class AllGather:
    """All keys, and the queries of this device."""

    def __init__(self, args: RingAttentionArgs):
        self.axis, self.count = args.axis_name, args.devices
        self.zigzag = args.layout == "zigzag"
        self.index = jax.lax.axis_index(self.axis) if self.count > 1 else 0

    def spread(self, args: RingAttentionArgs) -> FlashAttentionArgs:
        """The call that this device computes."""
        changes: dict[str, Any] = {
            name: self.gather(x, 1)
            for name in ("key", "value", "kv_segment_ids")
            if (x := getattr(args, name)) is not None
        }
        located = args.sliding_window != (None, None) or args.alibi_slopes is not None
        if self.count > 1 and located:
            changes["q_positions"] = plan.positions(args, self.index)
        return as_flash(args, **changes)

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        if self.count == 1:
            return x
        return self.natural(jax.lax.all_gather(x, self.axis, axis=axis, tiled=True), axis)

    def natural(self, x: jax.Array, axis: int) -> jax.Array:
        return zigzag.from_zigzag(x, self.count, axis) if self.zigzag else x

    def stored(self, x: jax.Array, axis: int) -> jax.Array:
        return zigzag.to_zigzag(x, self.count, axis) if self.zigzag else x

    def home(self, x: jax.Array, tokens: int) -> jax.Array:
        """An output as the caller has it; `tokens` is its token axis."""
        return x

    def away(self, x: jax.Array, tokens: int) -> jax.Array:
        """The caller's array as the inner call's output."""
        return x


class Ulysses(AllGather):
    """All tokens of this device's share of the heads."""

    def spread(self, args: RingAttentionArgs) -> FlashAttentionArgs:
        if self.count == 1:
            return as_flash(args)
        t, num_q_heads = args.query.shape[1:3]
        share = num_q_heads // self.count
        changes: dict[str, Any] = {"query": self.away(args.query, 1)}
        for name in ("key", "value"):
            x = getattr(args, name)
            repeat = max(self.count // x.shape[2], 1)  # a key head that several devices need
            changes[name] = self.away(x if repeat == 1 else jnp.repeat(x, repeat, axis=2), 1)
        for name in ("q_segment_ids", "kv_segment_ids"):
            if (x := getattr(args, name)) is not None:
                changes[name] = self.gather(x, 1)
        for name in ("softmax_aux", "alibi_slopes"):
            if (x := getattr(args, name)) is not None and x.shape[0] == num_q_heads:
                changes[name] = self.own(x, 0, share)
        for name in ("attention_mask", "bias"):
            if (x := getattr(args, name)) is not None:
                changes[name] = self._of_pairs(x, t, share)
        if args.dropout_seed is not None:
            first = jnp.stack([jnp.uint32(0), jnp.uint32(self.index * share)])
            known = args.dropout_offset
            changes["dropout_offset"] = first if known is None else known + first
        return as_flash(args, **changes)

    def _of_pairs(self, x: jax.Array, t: int, share: int) -> jax.Array:
        """All rows of the own heads of a mask or bias [b, h, t, columns]."""
        if x.shape[1] == 1:
            return self.gather(x, 2) if x.shape[2] == t else x
        return self.away(x, 2) if x.shape[2] == t else self.own(x, 1, share)

    def own(self, x: jax.Array, axis: int, share: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, jnp.int32(self.index * share), share, axis)

    def away(self, x: jax.Array, tokens: int) -> jax.Array:
        """All tokens of the own heads, from all heads of the own tokens."""
        if self.count == 1:
            return x
        heads = 3 - tokens  # [b, t, h, …] or [b, h, t, …]
        x = jax.lax.all_to_all(x, self.axis, split_axis=heads, concat_axis=tokens, tiled=True)
        return self.natural(x, tokens)

    def home(self, x: jax.Array, tokens: int) -> jax.Array:
        if self.count == 1:
            return x
        heads = 3 - tokens
        x = self.stored(x, tokens)
        return jax.lax.all_to_all(x, self.axis, split_axis=tokens, concat_axis=heads, tiled=True)
