"""The linear recurrence forward, in plain JAX: a scan over groups of chunks carries the states.

A chunk is computed by products of matrices, or token by token. Layout inside: [n, b, h, c, x].
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared import token_chunks
from ejkernel.kernels._shared.precision import xla_precision
from ejkernel.kernels._shared.products import wide
from ejkernel.kernels._specs.linear_recurrence import num_heads
from ejkernel.kernels._xla._blocks import chunks, loops
from ejkernel.kernels._xla.linear_recurrence import chunk, config, recurrent


class Where(NamedTuple):
    """Of each chunk: its sequence, and whether it is that sequence's first or last; or None."""

    sequence: jax.Array | None
    first: jax.Array | None
    last: jax.Array | None


class Plan(NamedTuple):
    """How a call is cut."""

    chunks: token_chunks.Chunks
    recurrent: bool
    exact: Any
    scale: Any
    dtype: Any  # to compute in

    def where(self) -> Where:
        cut = self.chunks
        return (
            Where(None, None, None)
            if cut.sequence is None
            else Where(cut.sequence, cut.first, cut.last)
        )

    def grouped(self, xs: Any) -> Any:
        """[m, …] as [groups, chunks at once, …]."""
        at_once = self.chunks.at_once
        return jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), xs)

    def widened(self, x: chunk.Operands) -> chunk.Operands:
        """Operands to compute with; all chunks together stay as narrow as the call's arrays."""
        wide = jax.tree.map(lambda y: y.astype(self.dtype), x)
        return wide._replace(q=wide.q * self.scale)

    def ungrouped(self, xs: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), xs)


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and the last states when asked for); no residuals."""
    return outputs(args, cfg, lambda body: body), ()


def outputs(args: Any, cfg: config.Config, wrap: Callable) -> tuple[jax.Array, ...]:
    """The outputs; `wrap` may change the function that computes a group of chunks."""
    plan, start = make_plan(args, cfg), initial(args)
    if nothing_to_do(plan, start):
        heads, e = start.shape[1], start.shape[3]
        out = jnp.zeros((*args.query.shape[:2], heads, e), args.query.dtype)
        return (out, start) if args.return_state else (out,)

    def group(carry: Any, xs: Any) -> Any:
        x, where = xs
        if plan.recurrent:
            run = functools.partial(step_by_step, plan, start)
            carry, out = chunks.scan(run, carry, (plan.widened(x), where))
            return carry, out.astype(x.q.dtype)
        made = chunk.prepare(plan.widened(x))
        carry, states = advance(plan, start, carry, made, where)
        return carry, chunk.emit(states, made, plan.exact).astype(x.q.dtype)

    xs = plan.grouped((operands(args, plan.chunks), plan.where()))
    carry, out = chunks.scan(wrap(group), first_carry(plan, start), xs)
    out = plan.chunks.join(plan.ungrouped(out))
    return (out, last_states(plan, carry)) if args.return_state else (out,)


def nothing_to_do(plan: Plan, start: jax.Array) -> bool:
    """True without a token of a sequence, or where states are empty: outputs are then zeros."""
    return not plan.chunks.count or not start.size


def make_plan(args: Any, cfg: config.Config) -> Plan:
    at_once = 1 if cfg.recurrent else cfg.block_n
    size = config.chunk_size(args, cfg)
    cut = token_chunks.Chunks(args.query.shape[1], size, at_once, args.cu_seqlens, args.reverse)
    dtype = wide(args.query.dtype)
    return Plan(cut, cfg.recurrent, xla_precision(dtype), args.softmax_scale, dtype)


def operands(args: Any, cut: token_chunks.Chunks) -> chunk.Operands:
    """The arrays of all chunks; gates of a head become part of those of its rows, if any."""
    dtype = wide(args.query.dtype)
    rows = None
    if args.g is not None:
        rows = args.g.astype(dtype)[..., None]
    if args.g_gamma is not None:
        gamma = jnp.broadcast_to(
            args.g_gamma.astype(dtype)[None, None, :, None],
            (*args.query.shape[:2], num_heads(args), 1),
        )
        rows = gamma if rows is None else rows + gamma
    if args.gk is not None:
        rows = args.gk if rows is None else args.gk.astype(dtype) + rows
    made = chunk.Operands(args.query, args.key, args.value, rows, args.gv)
    return jax.tree.map(cut.cut, made)


def initial(args: Any) -> jax.Array:
    """The states before the first token, [n, h, d, e]."""
    batch, _, _, d = args.query.shape
    rows = batch if args.cu_seqlens is None else args.cu_seqlens.shape[0] - 1
    dtype = wide(args.query.dtype)
    if args.initial_state is not None:
        return loops.vary_like(args.initial_state.astype(dtype), args.query)
    zeros = jnp.zeros((rows, num_heads(args), d, args.value.shape[-1]), dtype)
    return loops.vary_like(zeros, args.query)


# States between chunks; a carry is the state and, packed, the states of all sequences


def first_carry(plan: Plan, start: jax.Array) -> Any:
    # packed, the state of no sequence yet: zeros that vary as the others do
    return (start, None) if plan.chunks.sequence is None else (start[:1] * 0, start)


def last_states(plan: Plan, carry: Any) -> jax.Array:
    return carry[0] if plan.chunks.sequence is None else carry[1]


def enter(states: jax.Array, h: jax.Array, sequence: Any, here: Any) -> jax.Array:
    """The state before a chunk: that of its sequence, if packed and this is the sequence's end."""
    if sequence is None:
        return h
    return jnp.where(here, states[jnp.minimum(sequence, states.shape[0] - 1)][None], h)


def leave(states: jax.Array | None, h: jax.Array, sequence: Any) -> jax.Array | None:
    """The states of all sequences with that of the chunk's; later chunks write it again."""
    if sequence is None or states is None:
        return states
    return states.at[sequence].set(h[0], mode="drop")


def advance(
    plan: Plan, start: jax.Array, carry: Any, x: chunk.Operands, where: Where
) -> tuple[Any, jax.Array]:
    """The carry after the chunks of a group, and the state before each."""

    def step(carry: Any, xs: Any) -> Any:
        added, totals, at = xs
        h = enter(start, carry[0], at.sequence, at.first)
        after = chunk.fade(h, *totals) + added
        return (after, leave(carry[1], after, at.sequence)), h

    return chunks.scan(step, carry, (chunk.absorb(x, plan.exact), chunk.totals(x), where))


def step_by_step(plan: Plan, start: jax.Array, carry: Any, xs: Any) -> Any:
    """The carry after one chunk, and its outputs."""
    x, at = xs
    h = enter(start, carry[0], at.sequence, at.first)
    after, out = recurrent.run(h, x, plan.exact)
    return (after, leave(carry[1], after, at.sequence)), out
