"""Recurrent cells backward: a loop over a block's steps, then one product for each gradient.

Gates are computed again from the projections that forward kept. A block's loop gives the gradients
of its columns; those of weights and inputs follow from them by products over all its steps.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared import cells as shared
from ejkernel.kernels._shared.precision import xla_precision
from ejkernel.kernels._shared.products import wide
from ejkernel.kernels._xla._blocks import loops
from ejkernel.kernels._xla.recurrent import cells, fwd
from ejkernel.kernels._xla.recurrent.config import Config

Gradients = dict[str, jax.Array]


def backward(
    args: Any,
    cfg: Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> Gradients:
    """The gradients of the `wanted` arguments."""
    kept = fwd.Residuals(*residuals)
    dout, *dstates = cotangents
    weights = args.w_hh.astype(fwd.dtype_of_products(args, cfg))
    steps = _Steps(args, cfg, kept, dout, weights)

    def run(blocks: list[fwd.Block], carry: Any) -> Any:
        grads, made = carry
        grads, columns = steps.run(blocks, grads)
        for block, d in zip(blocks, columns, strict=True):
            made = _add(args, kept, block, d, made)
        return grads, made

    sums = ("inputs", "w_ih", "w_hh", "b_ih", "b_hh")
    made = {n: fwd.zeros(args, *getattr(args, n).shape) for n in sums if n in wanted}
    first = fwd.by_direction(args, dstates)
    states, made = fwd.over_blocks(args, cfg, run, (first, made), back=True)
    made |= dict(zip(("hidden", "cell"), shared.finals(args, states), strict=False))
    return {name: made[name].astype(getattr(args, name).dtype) for name in wanted}


class _Steps:
    """The loop over the steps of a block, from the last to the first."""

    def __init__(
        self, args: Any, cfg: Config, kept: fwd.Residuals, dout: jax.Array, weights: jax.Array
    ):
        self.args, self.cfg, self.kept, self.dout = args, cfg, kept, dout
        self.weights = weights
        self.cell, self.functions = cells.of(args)

    def run(
        self, blocks: list[fwd.Block], grads: list[cells.State]
    ) -> tuple[list[cells.State], list[tuple[jax.Array, jax.Array]]]:
        """Gradients of the states before a block, and of its projections [b, s, m]."""
        args, size = self.args, blocks[0].size
        _, m, d = args.w_hh.shape
        # products of a part of an array copy it on a CPU: there, a GRU's projections have their own
        apart = args.cell_type == "gru" and not self.cfg.late_gates
        widths = [m, m] if apart else [self.cell.kept * d]
        shape = (args.inputs.shape[0], size)
        room = [fwd.zeros(args, *shape, n, dtype=self.weights.dtype) for n in widths]

        def body(k: Any, carry: Any) -> Any:
            before, made = [], []
            for block, grad, rows in zip(blocks, *carry, strict=True):
                j, i = block.step(size - 1 - k)
                columns, new = self._step(block.p, i, grad)
                parts = shared.by_projection(args, columns) if apart else [columns]
                made.append([fwd.write(x, r, j) for x, r in zip(rows, parts, strict=True)])
                before.append(new)
            return before, made

        first = (grads, [room] * len(blocks))
        grads, made = loops.fori(0, size, body, first, self.cfg.unroll)
        join = tuple if apart else lambda rows: shared.by_projection(args, rows[0])
        return grads, [join(rows) for rows in made]

    def _step(self, p: int, i: Any, grad: cells.State) -> tuple[jax.Array, cells.State]:
        args, kept, dtype = self.args, self.kept, self.weights.dtype
        d, sums = args.w_hh.shape[2], wide(dtype)
        seen = True if args.lengths is None else (i < args.lengths)[:, None]
        shown = fwd.read(self.dout, i, p, d).astype(sums)
        total = (grad[0] + jnp.where(seen, shown, 0), *grad[1:])
        old = tuple(fwd.read(x, i, p, d) for x in (kept.states, kept.cells) if x is not None)
        gates = fwd.read(kept.gates, i, p, self.cell.kept * d)
        columns, direct = self.cell.back(self.functions, gates, old, total)
        columns = jnp.where(seen, columns, 0).astype(dtype)
        dh = jnp.dot(
            shared.of_states(args, columns),
            self.weights[p],
            precision=xla_precision(dtype),
            preferred_element_type=sums,
        )
        dh = dh if direct[0] is None else dh + direct[0]
        new = (dh, *direct[1:])
        return columns, tuple(jnp.where(seen, a, b) for a, b in zip(new, total, strict=True))


def _add(
    args: Any,
    kept: fwd.Residuals,
    block: fwd.Block,
    columns: tuple[jax.Array, jax.Array],
    made: Gradients,
) -> Gradients:
    """Adds what a block gives; `columns` are the gradients of its projections."""
    p, made, d = block.p, dict(made), args.w_hh.shape[2]
    inputs = lambda: shared.seen_inputs(args, fwd.steps(args.inputs, block), block.start)
    states = lambda: fwd.steps(kept.states, block)[..., p * d : (p + 1) * d]
    found = shared.products(args, columns, (inputs, states), p, frozenset(made))
    for name, array in found.items():
        if name == "inputs":
            rows = array + fwd.steps(made[name], block)
            start = (jnp.int32(0), jnp.int32(block.start), jnp.int32(0))
            made[name] = jax.lax.dynamic_update_slice(made[name], rows, start)
        else:
            made[name] = made[name].at[p].add(array)
    return made
