"""Recurrent cells backward: a loop over a block's steps, then one product for each gradient.

Gates are computed again from the projections that forward kept. A block's loop gives the gradients
of its projections; those of weights and inputs follow from them by products over all its steps.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.precision import xla_precision
from ejkernel.kernels._xla._blocks import loops
from ejkernel.kernels._xla.recurrent import cells, fwd

Gradients = dict[str, jax.Array]


def backward(
    args: Any,
    cfg: None,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> Gradients:
    """The gradients of the `wanted` arguments."""
    kept = fwd.Residuals(*residuals)
    dout, *dstates = cotangents

    def run(blocks: list[fwd.Block], carry: Any) -> Any:
        grads, made = carry
        grads, ds = _unroll(args, kept, dout, blocks, grads)
        for block, d in zip(blocks, ds, strict=True):
            made = _add(args, kept, block, (d[0], d[-1]), made)
        return grads, made

    sums = ("inputs", "w_ih", "w_hh", "b_ih", "b_hh")
    made = {n: fwd.zeros(args, *getattr(args, n).shape) for n in sums if n in wanted}
    first = fwd.by_direction(args, dstates)
    states, made = fwd.over_blocks(args, run, (first, made), back=True)
    made |= dict(zip(("hidden", "cell"), fwd.finals(args, states), strict=False))
    return {name: made[name].astype(getattr(args, name).dtype) for name in wanted}


def _unroll(
    args: Any,
    kept: fwd.Residuals,
    dout: jax.Array,
    blocks: list[fwd.Block],
    grads: list[cells.State],
) -> tuple[list[cells.State], list[tuple[jax.Array, ...]]]:
    """Gradients of the states before a block, and of its projections [b, s, m]."""
    cell, functions = cells.of(args)
    _, m, d = args.w_hh.shape
    weights = args.w_hh.astype(kept.states.dtype)
    size, exact = blocks[0].size, xla_precision(weights.dtype)
    # those of inputs and of states; only a GRU's differ
    count = 2 if args.cell_type == "gru" else 1
    room = tuple(fwd.zeros(args, args.inputs.shape[0], size, m) for _ in range(count))

    def body(k: Any, carry: Any) -> Any:
        before, made = [], []
        for block, grad, ds in zip(blocks, *carry, strict=True):
            p, (j, i) = block.p, block.step(size - 1 - k)
            seen = True if args.lengths is None else (i < args.lengths)[:, None]
            shown = fwd.read(dout, i, p, d).astype(weights.dtype)
            total = (grad[0] + jnp.where(seen, shown, 0), *grad[1:])
            old = tuple(fwd.read(x, i, p, d) for x in (kept.states, kept.cells) if x is not None)
            gates = fwd.read(kept.gates, i, p, cell.kept * d)
            *rows, direct = cell.back(functions, gates, old, total)
            rows = [jnp.where(seen, x, 0) for x in rows[:count]]
            made.append(tuple(fwd.write(x, r, j, 0) for x, r in zip(ds, rows, strict=True)))
            dh = jnp.dot(rows[-1], weights[p], precision=exact)
            dh = dh if direct[0] is None else dh + direct[0]
            new = (dh, *direct[1:])
            before.append(tuple(jnp.where(seen, a, b) for a, b in zip(new, total, strict=True)))
        return before, made

    return loops.fori(0, size, body, (grads, [room] * len(blocks)))


def _add(
    args: Any,
    kept: fwd.Residuals,
    block: fwd.Block,
    ds: tuple[jax.Array, jax.Array],
    made: Gradients,
) -> Gradients:
    """Adds what a block gives; `ds` are gradients of the projections of inputs and states."""
    (dx, dy), p, made = ds, block.p, dict(made)
    d, exact = args.w_hh.shape[2], xla_precision(dx.dtype)
    if "inputs" in made:
        w = args.w_ih[p].astype(dx.dtype)
        rows = jnp.einsum("btm,mi->bti", dx, w, precision=exact) + fwd.steps(made["inputs"], block)
        start = (jnp.int32(0), jnp.int32(block.start), jnp.int32(0))
        made["inputs"] = jax.lax.dynamic_update_slice(made["inputs"], rows, start)
    more = {
        "w_ih": lambda: _product(dx, fwd.seen_inputs(args, block)),
        "w_hh": lambda: _product(dy, fwd.steps(kept.states, block)[..., p * d : (p + 1) * d]),
        "b_ih": lambda: dx.sum(axis=(0, 1)),
        "b_hh": lambda: dy.sum(axis=(0, 1)),
    }
    return made | {n: made[n].at[p].add(f()) for n, f in more.items() if n in made}


def _product(d: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.einsum("btm,bti->mi", d, x, precision=xla_precision(d.dtype))
