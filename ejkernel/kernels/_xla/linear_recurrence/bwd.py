"""The linear recurrence backward: chunks from the last to the first, each by its own formulas.

A first pass computes the state before each group of chunks again. Gradients of gates are those of
the decays they are in, never a difference of long sums: they are right for gates of any strength.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared import sums, token_chunks
from ejkernel.kernels._xla._blocks import chunks
from ejkernel.kernels._xla.flash_attention import bwd as flash
from ejkernel.kernels._xla.linear_recurrence import chunk, config, fwd, recurrent

_SOURCES = {
    "q": {"query", "softmax_scale"},
    "k": {"key"},
    "v": {"value"},
    "a": {"g", "gk", "g_gamma"},
    "b": {"gv"},
}


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[()],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    plan, start = fwd.make_plan(args, cfg), fwd.initial(args)
    dlast = cotangents[1].astype(start.dtype) if args.return_state else start * 0
    found, dstart = {}, dlast
    if not fwd.nothing_to_do(plan, start):
        x = fwd.operands(args, plan.chunks)
        dout = plan.chunks.cut(cotangents[0])
        names = frozenset(n for n, sources in _SOURCES.items() if sources & wanted)
        found, dstart = _gradients(plan, start, x, dout, dlast, names)
    grads = _public(args, plan.chunks, found, wanted)
    if "initial_state" in wanted:
        grads["initial_state"] = dstart.astype(args.initial_state.dtype)
    return grads


def _gradients(
    plan: fwd.Plan,
    start: jax.Array,
    x: chunk.Operands,
    dout: jax.Array,
    dlast: jax.Array,
    names: frozenset[str],
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Those of the operands in `names`, in chunks, and of the initial states."""

    def group(carry: Any, xs: Any) -> Any:
        x, dout, h, where = xs
        made, dout = chunk.prepare(plan.widened(x)), dout.astype(plan.dtype)
        _, states = fwd.advance(plan, start, (h, None), made, where)
        carry, dstates = _retreat(plan, dlast, carry, (made, dout), where)
        return carry, pick(chunk.gradients(states, dstates, made, dout, plan.exact))

    def step_by_step(carry: Any, xs: Any) -> Any:
        *chunk_xs, h, at = xs
        x, dout, at = jax.tree.map(lambda y: y[0], (*chunk_xs, at))
        x, dout = plan.widened(x), dout.astype(plan.dtype)
        h = fwd.enter(start, h, at.sequence, at.first)
        dh = fwd.enter(dlast, carry[0], at.sequence, at.last)
        before, made = recurrent.gradients(h, dh, x, dout, plan.exact, bool(names & {"a", "b"}))
        carry = before, fwd.leave(carry[1], before, at.sequence)
        return carry, jax.tree.map(lambda y: y[None], pick(made))

    def pick(made: dict[str, jax.Array]) -> dict[str, jax.Array]:
        heads = {"q": x.q.shape[2], "k": x.k.shape[2], "v": x.v.shape[2]}
        # those of keys and values are results as they are, and may be narrow at once
        narrow = {"k": x.k.dtype, "v": x.v.dtype}
        own = {n: _own_heads(y, heads.get(n)) for n, y in made.items() if n in names}
        return {n: y.astype(narrow.get(n, y.dtype)) for n, y in own.items()}

    xs, where = plan.grouped((x, dout)), plan.grouped(plan.where())
    states = _states(plan, start, xs[0], where)
    body = step_by_step if plan.recurrent else group
    carry = fwd.first_carry(plan, dlast)
    carry, found = chunks.scan(body, carry, (*xs, states, where), reverse=True)
    return plan.ungrouped(found), fwd.last_states(plan, carry)


def _states(plan: fwd.Plan, start: jax.Array, x: chunk.Operands, where: fwd.Where) -> jax.Array:
    """The state before each group of chunks, as the group before it left it."""

    def group(carry: Any, xs: Any) -> Any:
        x, where = plan.widened(xs[0]), xs[1]
        if plan.recurrent:
            run = functools.partial(fwd.step_by_step, plan, start)
            return chunks.scan(run, carry, (x, where))[0], carry[0]
        return fwd.advance(plan, start, carry, chunk.prepare(x), where)[0], carry[0]

    h, _ = fwd.first_carry(plan, start)
    return chunks.scan(group, (h, None), (x, where))[1]


def _retreat(plan: fwd.Plan, dlast: jax.Array, carry: Any, xs: Any, where: fwd.Where) -> Any:
    """The carry before the chunks of a group, and the gradient of the state after each."""
    x, dout = xs

    def step(carry: Any, xs: Any) -> Any:
        received, totals, at = xs
        dh = fwd.enter(dlast, carry[0], at.sequence, at.last)
        before = chunk.fade(dh, *totals) + received
        return (before, fwd.leave(carry[1], before, at.sequence)), dh

    parts = (chunk.receive(x, dout, plan.exact), chunk.totals(x), where)
    return chunks.scan(step, carry, parts, reverse=True)


def _own_heads(x: jax.Array, heads: int | None) -> jax.Array:
    """The sum over the heads that share one of an operand's own, [.., h, c, x] to its heads."""
    if heads is None or heads == x.shape[-3]:
        return x
    return x.reshape(*x.shape[:-3], heads, -1, *x.shape[-2:]).sum(axis=-3)


def _public(
    args: Any, cut: token_chunks.Chunks, found: dict[str, jax.Array], wanted: frozenset[str]
) -> dict[str, jax.Array]:
    """Gradients of the arguments of a call from those of its operands; zeros without a token."""
    whole = {name: cut.join(x) for name, x in found.items()}
    made = {
        "query": lambda: whole["q"] * args.softmax_scale,
        "softmax_scale": lambda: flash.scale_gradient(args.query, whole["q"]),
        "key": lambda: whole["k"],
        "value": lambda: whole["v"],
        "g": lambda: whole["a"].sum(axis=-1),
        "gk": lambda: whole["a"],
        "gv": lambda: whole["b"],
        "g_gamma": lambda: sums.by_head(whole["a"]),
    }
    asked = {n: x for n, x in args.arrays().items() if n in wanted and n != "initial_state"}
    return {
        name: made[name]().astype(x.dtype) if found else jnp.zeros_like(x)
        for name, x in asked.items()
    }
