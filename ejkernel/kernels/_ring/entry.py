"""`ring_attention` on a platform: the schedule around that platform's `flash_attention`."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from ejkernel._device import Target
from ejkernel.kernels._registry import Backend, KernelEntry, Platform, kernel_registry
from ejkernel.kernels._ring import gather, plan, schedule
from ejkernel.kernels._ring.plan import Kind, Plan
from ejkernel.kernels._specs.flash_attention import FlashAttentionArgs
from ejkernel.kernels._specs.ring_attention import RingAttentionArgs, as_flash


class RingEntry:
    """Kernel and configuration in one: configs are those of the attention inside."""

    def __init__(self, platform: Platform, backend: Backend):
        self.platform, self.backend = platform, backend

    @property
    def inner(self) -> KernelEntry:
        """The attention of one pair of blocks."""
        entries = kernel_registry.list("flash_attention", self.platform)
        return next(e for e in entries if (e.priority, e.backend) == (0, self.backend))

    def forward(self, args: RingAttentionArgs, cfg: Any) -> Any:
        return _module(args).forward(args, cfg, self.inner)

    def backward(
        self, args: RingAttentionArgs, cfg: Any, outputs, residuals, cotangents, wanted
    ) -> dict[str, jax.Array]:
        return _module(args).backward(args, cfg, self.inner, outputs, residuals, cotangents, wanted)

    def requires(self, args: RingAttentionArgs) -> str | None:
        """Why the blocks of a call cannot be served."""
        strategy = plan.strategy(args)
        if args.dropout_prob and args.devices > 1 and strategy != "ulysses":
            return (
                "drops weights by indices within a block, which are those of the whole sequence on "
                f"one device or with strategy='ulysses', not with {strategy!r}"
            )
        return _first(self.inner.why_not(call) for call in _blocks(args))

    def backward_requires(self, args: RingAttentionArgs) -> str | None:
        return _first(self.inner.backward_requires(call) for call in _blocks(args))

    def device_requires(self, args: RingAttentionArgs, target: Target) -> str | None:
        return _first(self.inner.device_requires(call, target) for call in _blocks(args))

    # Configuration

    @property
    def Config(self) -> type:
        return self.inner.config.Config

    def heuristic(self, args: RingAttentionArgs, direction: str, target: Target) -> Any:
        return self.inner.config.heuristic(_blocks(args)[0], direction, target)

    def candidates(self, args: RingAttentionArgs, direction: str, target: Target) -> Sequence[Any]:
        if args.devices > 1:  # one device alone cannot be measured
            return ()
        return self.inner.config.candidates(_blocks(args)[0], direction, target)

    def memory(self, args: RingAttentionArgs, direction: str, cfg: Any) -> int | None:
        return self.inner.memory(_blocks(args)[0], direction, cfg)

    def testing(self, args: RingAttentionArgs, direction: str) -> Any:
        return self.inner.config.testing(_blocks(args)[0], direction)

    def from_params(self, guess: Any, settings: dict[str, int]) -> Any:
        return self.inner.config.from_params(guess, settings)


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _module(args: RingAttentionArgs) -> Any:
    return schedule if plan.strategy(args) == "ring" else gather


def _blocks(args: RingAttentionArgs) -> Sequence[FlashAttentionArgs]:
    """The kinds of calls that one device makes, by their shapes."""
    (_, t, heads, _), (_, s, groups, _) = args.query.shape, args.key.shape
    strategy, count = plan.strategy(args), args.devices
    if strategy == "ring":
        made = Plan.of(args)
        kinds = [kind for kind in made.kinds() if kind != Kind.SKIP] or [Kind.ALIGNED]
        return [_block(args, made.t, made.s, heads, groups, kind) for kind in kinds]
    if strategy == "ulysses":
        shares = heads // count, max(groups // count, 1)
        return [_block(args, t * count, s * count, *shares, Kind.ALIGNED)]
    located = args.sliding_window != (None, None) or args.alibi_slopes is not None
    kind = Kind.SHIFTED if located and count > 1 else Kind.ALIGNED
    return [_block(args, t, s * count, heads, groups, kind)]


def _block(
    args: RingAttentionArgs, t: int, s: int, heads: int, groups: int, kind: Kind
) -> FlashAttentionArgs:
    batch, ring = args.query.shape[0], plan.strategy(args) == "ring"
    sizes = {args.query.shape[2]: heads}

    def shaped(name: str, *shape: int) -> Any:
        array = getattr(args, name)
        return None if array is None else jax.ShapeDtypeStruct(shape, array.dtype)

    def of_pairs(name: str) -> Any:
        array = getattr(args, name)
        if array is None:
            return None
        full = (batch, heads, t, s)
        return shaped(name, *(1 if n == 1 else m for n, m in zip(array.shape, full, strict=True)))

    def of_heads(name: str) -> Any:
        array = getattr(args, name)
        if array is None:
            return None
        count: int = array.shape[0]
        return shaped(name, sizes.get(count, count), *array.shape[1:])

    changes: dict[str, Any] = {
        "query": shaped("query", batch, t, heads, args.query.shape[3]),
        "key": shaped("key", batch, s, groups, args.key.shape[3]),
        "value": shaped("value", batch, s, groups, args.value.shape[3]),
        "attention_mask": of_pairs("attention_mask"),
        "bias": of_pairs("bias"),
        "softmax_aux": None if ring else of_heads("softmax_aux"),
        "alibi_slopes": of_heads("alibi_slopes"),
        "q_segment_ids": shaped("q_segment_ids", batch, t),
        "kv_segment_ids": shaped("kv_segment_ids", batch, s),
    }
    if kind == Kind.FULL:
        changes |= {"causal": False, "sliding_window": (None, None)}
    if kind == Kind.SHIFTED:
        changes["q_positions"] = jax.ShapeDtypeStruct((1, t), "int32")
        if ring:
            changes["kv_positions"] = jax.ShapeDtypeStruct((1, s), "int32")
    return as_flash(args, **changes)


def register(platform: Platform, backend: Backend, by_name: str | None = None) -> None:
    """Registers `ring_attention` for a platform whose `flash_attention` is registered.

    `by_name` says why only calls that name the platform take it.
    """
    entry = RingEntry(platform, backend)
    honours = entry.inner.honours
    if honours is not None:
        # what a ring has of it, and what the schedule itself acts on
        honours &= {field.name for field in dataclasses.fields(RingAttentionArgs)}
        honours |= {"axis_name", "strategy", "layout", "softmax_aux"}
    kernel_registry.register(
        "ring_attention",
        platform,
        backend,
        backward=entry.backward,
        honours=honours,
        config=None if entry.inner.config is None else entry,
        requires=entry.requires,
        backward_requires=entry.backward_requires,
        device_requires=entry.device_requires,
        version=entry.inner.version,
        by_name=by_name or entry.inner.by_name,
    )(entry.forward)
