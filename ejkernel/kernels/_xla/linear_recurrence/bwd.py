"""The linear recurrence backward: states before chunks are computed again, their gradients scanned.

With both, each chunk is differentiated by itself. Gradients of gates are those of the decays they
make, never a difference of long sums, so that they are right for gates of any strength.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._xla._blocks import chunks
from ejkernel.kernels._xla.linear_recurrence import config, fwd

_SOURCES = {"q": {"query"}, "k": {"key"}, "v": {"value"}, "a": {"g", "gk", "g_gamma"}, "b": {"gv"}}


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[()],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    plan = fwd.make_plan(args, cfg)
    asked = {n: x for n, x in args.arrays().items() if n in wanted and n != "initial_state"}
    x, pull = jax.vjp(lambda given: fwd.operands(args.with_arrays(given), plan.chunks), asked)
    dout = plan.chunks.cut(cotangents[0].astype(x.q.dtype))
    states, last = fwd.scan_states(args, plan, x)
    dlast = cotangents[1].astype(last.dtype) if args.return_state else last * 0
    dstates, dstart = _scan_gradients(plan, x, dout, dlast)
    names = tuple(n for n, sources in _SOURCES.items() if sources & wanted)

    def chunk(xs: Any) -> dict[str, jax.Array]:
        h, x, dout, dh = xs

        def run(part: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            mine = x._replace(**part)
            added, *decays = fwd.absorb(plan, mine)
            return fwd.emit(plan, h, mine), fwd.fade(h, *decays) + added

        _, back = jax.vjp(run, {n: getattr(x, n) for n in names if getattr(x, n) is not None})
        return back((dout, dh))[0]

    found = chunks.each(chunk, (states, x, dout, dstates), plan.at_once)
    whole = jax.tree.map(jnp.zeros_like, x)._replace(**found)
    grads = dict(pull(whole)[0])
    if "initial_state" in wanted:
        grads["initial_state"] = dstart.astype(args.initial_state.dtype)
    return grads


def _scan_gradients(
    plan: fwd.Plan, x: fwd.Operands, dout: jax.Array, dlast: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the state after each chunk, and of the initial states."""
    cut = plan.chunks

    def of_chunk(xs: Any) -> Any:
        x, dout = xs
        return fwd.receive(plan, x, dout), *fwd.absorb(plan, x)[1:]

    parts = chunks.each(of_chunk, (x, dout), plan.at_once)
    if cut.sequence is None:

        def step(dh: jax.Array, parts: Any) -> Any:
            return fwd.fade(dh, *parts[1:]) + parts[0], dh

        dstart, dstates = jax.lax.scan(step, dlast, parts, reverse=True)
        return dstates, dstart
    if not cut.count:
        return jnp.zeros((0, 1, *dlast.shape[1:]), dlast.dtype), dlast

    def step_packed(carry: Any, xs: Any) -> Any:
        dh, dstart = carry
        parts, sequence, end = xs
        here = dlast[jnp.minimum(sequence, dlast.shape[0] - 1)][None]
        dh = jnp.where(end, here, dh)
        before = fwd.fade(dh, *parts[1:]) + parts[0]
        return (before, dstart.at[sequence].set(before[0], mode="drop")), dh

    # an empty sequence hands its state on, and so its gradient
    xs = (parts, cut.sequence, cut.last)
    (_, dstart), dstates = jax.lax.scan(step_packed, (dlast[:1] * 0, dlast), xs, reverse=True)
    return dstates, dstart
