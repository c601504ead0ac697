"""Ring attention (Liu et al., 2023): keys and values travel, queries stay.

At step r, device i holds the keys of device i - r. Each pair of chunks is one call of a platform's
block attention, or none when masks leave nothing of it. Forward merges outputs by their lse.
Backward calls the block's backward with the lse of the whole row, so that its gradients are parts
of the whole; the parts of keys and values travel with them, and go home in one hop at the end.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _attention
from ejkernel.kernels._registry import Backend, KernelEntry, Platform, kernel_registry
from ejkernel.kernels._ring import packed
from ejkernel.kernels._ring.plan import Kind, Plan
from ejkernel.kernels._specs.merge_attention_states import MergeAttentionStatesArgs
from ejkernel.kernels._specs.ring_attention import RingAttentionArgs, as_flash
from ejkernel.xla_utils import dtypes, manual

_NO_WINDOW = (None, None)


class _At(NamedTuple):
    """A pair of chunks: which halves of what is at hand, and which chunks of the sequence."""

    a: Any
    b: Any
    q_chunk: Any
    k_chunk: Any


# (kind, at, keys, (state, sums)) -> (state, sums)
Visit = Callable[[Kind, _At, Any, Any], Any]


def forward(args: RingAttentionArgs, cfg: Any, inner: KernelEntry) -> Any:
    """Outputs and residuals of `ring_attention`."""
    ring = Ring(args, inner)
    (batch, t, heads, _), width = args.query.shape, args.value.shape[-1]
    dtype = dtypes.wide(args.query.dtype)
    out, lse = jnp.zeros((batch, t, heads, width), dtype), _sinks(args, dtype)

    def attend(kind: Kind, at: _At, keys: Any, state: Any) -> Any:
        (out, *_), (lse,) = inner.fn(ring.pair(kind, at, keys), cfg)
        rows = {1: (at.a * ring.plan.t, ring.plan.t)}, {2: (at.a * ring.plan.t, ring.plan.t)}
        state, sums = state
        old_out, old_lse = (take(x, row) for x, row in zip(state, rows, strict=True))
        new = _merge(old_out, old_lse, out.astype(dtype), lse)
        state = tuple(put(x, part, row) for x, part, row in zip(state, new, rows, strict=True))
        return state, sums

    keys = (args.key, args.value, args.kv_segment_ids)
    (out, lse), _ = ring.tour(attend, keys, ring.vary((out, lse)), ())
    out = out.astype(args.query.dtype)
    return ((out, lse) if args.return_lse else (out,)), (lse,)


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
    ring = Ring(args, inner)
    plan, dtype = ring.plan, dtypes.wide(args.query.dtype)
    always = {"query", "key", "value"}
    parts = frozenset(always | ({"bias", "softmax_scale"} & wanted))

    def zeros(x: jax.Array) -> jax.Array:
        return jnp.zeros(x.shape, dtype)

    def push(kind: Kind, at: _At, keys: Any, state: Any) -> Any:
        (dq, dbias, dscale), (dk, dv) = state
        q_rows, k_rows = (at.a * plan.t, plan.t), (at.b * plan.s, plan.s)
        by_row = ({1: q_rows}, {2: q_rows})
        outs, douts = (
            tuple(take(x, row) for x, row in zip(xs, by_row, strict=False))
            for xs in (outputs, cotangents)
        )
        pair = dataclasses.replace(ring.pair(kind, at, keys), return_lse=args.return_lse)
        lse = take(residuals[0], {2: q_rows})
        grads = inner.backward(pair, cfg, outs, (lse,), douts, parts)
        dq = add(dq, grads["query"], {1: q_rows})
        if dbias is not None:
            dbias = add(dbias, grads["bias"], ring.columns(dbias, at))
        if dscale is not None:
            dscale += grads["softmax_scale"]
        dk, dv = (add(x, grads[n], {1: k_rows}) for x, n in ((dk, "key"), (dv, "value")))
        return (dq, dbias, dscale), (dk, dv)

    asked = (zeros(getattr(args, n)) if n in parts else None for n in ("bias", "softmax_scale"))
    state = (zeros(args.query), *asked)
    sums = (zeros(args.key), zeros(args.value))
    keys = (args.key, args.value, args.kv_segment_ids)
    (dq, dbias, dscale), (dk, dv) = ring.tour(push, keys, ring.vary(state), ring.vary(sums))
    grads = {"query": dq, "key": dk, "value": dv}
    if dbias is not None:
        grads["bias"] = dbias
    if dscale is not None:
        grads["softmax_scale"] = dscale
    if "softmax_aux" in wanted:
        delta = _attention.row_sums(args, outputs, cotangents, residuals[0].dtype)
        grads["softmax_aux"] = _attention.sink_gradient(args, residuals[0], delta)
    return {name: grad.astype(getattr(args, name).dtype) for name, grad in grads.items()}


class Ring:
    """One device's view of the ring."""

    def __init__(self, args: RingAttentionArgs, inner: KernelEntry):
        self.args, self.plan = args, Plan.of(args)
        self._packs = inner.backend == Backend.GPU
        single = self.plan.devices == 1
        self.index = np.int32(0) if single else jax.lax.axis_index(args.axis_name)

    def vary(self, tree: Any) -> Any:
        """Arrays that differ from device to device as the queries do, for the state of loops."""
        leaves, form = jax.tree.flatten(tree)
        return form.unflatten(manual.vary_alike([self.args.query, *leaves])[1:])

    def shift(self, tree: Any, by: int = 1) -> Any:
        count = self.plan.devices
        if by % count == 0:
            return tree
        pairs = [(device, (device + by) % count) for device in range(count)]
        together, apart = self._packing(tree)
        send = lambda x: jax.lax.ppermute(x, self.args.axis_name, pairs)
        return apart(jax.tree.map(send, together(tree)))

    def tour(self, visit: Visit, keys: Any, state: Any, sums: Any) -> tuple[Any, Any]:
        """Visits all keys; `state` stays here, `sums`, zeros at first, are the keys' own."""
        last = self.plan.last
        if not last:
            return self._meet(visit, range(1), 0, keys, (state, sums))
        together, apart = self._packing(keys)
        add_up, whole = self._packing(sums)
        keys = together(keys)

        def meet(steps: range, step: Any, keys: Any, state: Any) -> tuple[Any, Any]:
            state, parts = self._meet(visit, steps, step, apart(keys), (state, sums))
            return state, add_up(parts)

        # what travels is under way while the block at hand is computed
        upcoming = self.shift(keys)
        state, carried = meet(range(1), 0, keys, state)

        def step(r: Any, carry: Any) -> Any:
            keys, state, carried = carry
            upcoming, arrived = self.shift((keys, carried))
            state, parts = meet(range(1, last), r, keys, state)
            return upcoming, state, jax.tree.map(jnp.add, arrived, parts)

        if last > 1:
            carry = (upcoming, state, carried)
            carry = jax.lax.fori_loop(np.int32(1), np.int32(last), step, carry)
            upcoming, state, carried = carry
        arrived = self.shift(carried)
        state, parts = meet(range(last, last + 1), last, upcoming, state)
        carried = jax.tree.map(jnp.add, arrived, parts)
        return state, whole(self.shift(carried, -last))

    def _packing(self, tree: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """How arrays become one that travels, and how it becomes arrays again."""
        if not self._packs or len(jax.tree.leaves(tree)) < 2:
            return (lambda tree: tree), (lambda tree: tree)
        made = packed.Packing(tree)
        return made.join, made.split

    def _meet(self, visit: Visit, steps: range, step: Any, keys: Any, state: Any) -> Any:
        """Visits every pair of chunks of one step; `steps` are those that run this code."""
        plan, kinds = self.plan, self.plan.kinds(steps)
        source = (self.index - step) % plan.devices

        def pair(slot: Any, state: Any) -> Any:
            a, b = slot // plan.halves, slot % plan.halves
            at = _At(a, b, plan.chunk(self.index, a), plan.chunk(source, b))

            def branch(kind: Kind) -> Callable[[Any], Any]:
                return lambda state: state if kind == Kind.SKIP else visit(kind, at, keys, state)

            if len(kinds) == 1:
                return branch(kinds[0])(state)
            order = np.zeros(len(Kind), np.int32)
            order[kinds] = np.arange(len(kinds))
            which = jnp.asarray(order)[plan.kind(at.q_chunk, at.k_chunk)]
            return jax.lax.switch(which, [branch(kind) for kind in kinds], state)

        if plan.halves == 1:
            return pair(0, state)
        return jax.lax.fori_loop(np.int32(0), np.int32(plan.halves**2), pair, state)

    def columns(self, x: jax.Array, at: _At) -> dict[int, tuple[Any, int]]:
        """Rows and columns of a pair of chunks in a mask or bias."""
        places = {2: (at.a * self.plan.t, self.plan.t)}
        places[3] = (self.plan.k_start(at.k_chunk), self.plan.s)
        return {axis: place for axis, place in places.items() if x.shape[axis] > 1}

    def pair(self, kind: Kind, at: _At, keys: Any) -> Any:
        """A pair of chunks as a call of `flash_attention`, without sinks."""
        args, plan = self.args, self.plan
        key, value, kv_ids = keys
        q_rows, k_rows = {1: (at.a * plan.t, plan.t)}, {1: (at.b * plan.s, plan.s)}
        free = kind == Kind.FULL
        changes: dict[str, Any] = {
            "query": take(args.query, q_rows),
            "key": take(key, k_rows),
            "value": take(value, k_rows),
            "causal": args.causal and not free,
            "sliding_window": _NO_WINDOW if free else args.sliding_window,
            "softmax_aux": None,
            "return_lse": False,
        }
        for name in ("attention_mask", "bias"):
            if (x := getattr(args, name)) is not None:
                changes[name] = take(x, self.columns(x, at))
        if args.q_segment_ids is not None:
            changes["q_segment_ids"] = take(args.q_segment_ids, q_rows)
            changes["kv_segment_ids"] = take(kv_ids, k_rows)
        if kind == Kind.SHIFTED:
            starts = {"q": (plan.q_start(at.q_chunk), plan.t)}
            starts["kv"] = (plan.k_start(at.k_chunk), plan.s)
            for name, (start, size) in starts.items():
                index = np.arange(size, dtype=np.int32)
                changes[f"{name}_positions"] = (start + index)[None]
        return as_flash(args, **changes)


Places = dict[int, tuple[Any, int]]  # by axis: where a block starts, and its size


def take(x: jax.Array, places: Places) -> jax.Array:
    """A block of an array."""
    for axis, (start, size) in places.items():
        if x.shape[axis] != size:
            x = jax.lax.dynamic_slice_in_dim(x, jnp.int32(start), size, axis)
    return x


def put(x: jax.Array, block: jax.Array, places: Places) -> jax.Array:
    """An array with one of its blocks exchanged."""
    if x.shape == block.shape:
        return block
    start = [places[axis][0] if axis in places else 0 for axis in range(x.ndim)]
    return jax.lax.dynamic_update_slice(x, block, list(map(jnp.int32, start)))


def add(x: jax.Array, block: jax.Array, places: Places) -> jax.Array:
    """An array with something added to one of its blocks."""
    return put(x, take(x, places) + block.astype(x.dtype), places)


def _merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[jax.Array, jax.Array]:
    entry = kernel_registry.list("merge_attention_states", Platform.XLA)[0]
    made = MergeAttentionStatesArgs(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    return entry.fn(made, None)[0]


def _sinks(args: RingAttentionArgs, dtype: Any) -> jax.Array:
    """The lse of rows before any key: sinks are counted here, once."""
    batch, t, heads, _ = args.query.shape
    if args.softmax_aux is None:
        return jnp.full((batch, heads, t), -jnp.inf, dtype)
    rows = jax.nn.logsumexp(args.softmax_aux.astype(dtype), axis=-1)
    return jnp.broadcast_to(rows[None, :, None], (batch, heads, t))
