"""Recurrent cells forward on a TPU: all steps in one kernel, which holds weights and states.

The inputs of all steps are projected by one matrix product before. A step multiplies the state by
the weights and finishes the cell, some columns of all gates at a time, so that the matrix unit has
the next columns while the vector unit works on these. The factor of the products, the state in
their dtype, has two buffers: a step reads one and writes the other.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu._blocks import tiles
from ejkernel.kernels._pallas.tpu.recurrent import config
from ejkernel.kernels._pallas.tpu.recurrent.call import Call
from ejkernel.kernels._shared import cells as shared
from ejkernel.ops.core.kernel import FORWARD


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Outputs and final states; residuals are states and columns of each step."""
    call = Call(args, cfg)
    first, inner = shared.biases(args)
    call.add_steps("x", call.projections(first), call.gates)
    weight = call.wide_rows(args.w_hh).swapaxes(1, 2)  # [p, d, gates * width]
    weight = jnp.pad(weight, ((0, 0), (0, call.width - call.d), (0, 0)))
    call.add_weights(weight)
    if inner is not None:
        bias = call.wide_rows(inner)[:, None, 2 * call.width :]
        spec = pl.BlockSpec((None, 1, call.width), lambda p, b, n, table: (p, 0, 0))
        call.operands.add("inner_bias", bias, spec)
    call.add_lengths()
    call.add_state("h_start", args.hidden)
    call.add_state("c_start", args.cell)
    out = {
        "out": call.of_steps(1, args.inputs.dtype),
        "states": call.of_steps(1),
        "gates": call.of_steps(call.kept),
        "h": call.of_state(),
    }
    if args.cell is not None:
        out |= {"cells": call.of_steps(1), "c": call.of_state()}
    factor = pltpu.VMEM((2, call.rows, call.width), call.dtype)
    made = call.run("recurrent_fwd_kernel", _kernel, out, {"factor": factor}, FORWARD)
    kept = [call.as_given(made[n]) for n in ("states", "gates", "cells") if n in made]
    return (call.as_given(made["out"]), *call.finals(made["h"], made.get("c"))), tuple(kept)


def _kernel(call: Call, refs: Any) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        refs.h[...] = refs.h_start[...]
        refs.factor[0] = refs.h_start[...].astype(call.dtype)
        if refs.c is not None:
            refs.c[...] = refs.c_start[...]

    def step(j: Any, i: Any, turn: Any) -> None:
        factor = refs.factor[turn]  # [rows, width]
        for start in call.parts():
            _part(call, refs, (j, i, 1 - turn), factor, start)

    call.for_steps(refs, step)


def _part(call: Call, refs: Any, at: tuple[Any, Any, Any], factor: jax.Array, start: int) -> None:
    """A step of some columns of the state; `at` is the step and the buffer of the next factor."""
    (j, i, turn), columns = at, call.part(start)
    units = [call.part(start, g) for g in range(call.gates)]
    x = tuple(refs.x[j, :, unit] for unit in units)  # [rows, columns]
    y = [tiles.product(factor, refs.weight[:, unit]) for unit in units]
    if refs.inner_bias is not None:
        y[2] = y[2] + refs.inner_bias[:, columns]
    h = refs.h[:, columns]
    c: Any = None if refs.c is None else refs.c[:, columns]
    new = call.cell.step(x, tuple(y), h, c)
    refs.states[j, :, columns] = h
    for number, tile in enumerate(new.kept):
        refs.gates[j, :, call.part(start, number)] = tile
    seen = call.seen(refs, i)
    shown, after = new.h, new.h
    if seen is not None:
        shown, after = jnp.where(seen, new.h, 0.0), jnp.where(seen, new.h, h)
    refs.out[j, :, columns] = shown.astype(refs.out.dtype)
    refs.h[:, columns] = after
    refs.factor[turn, :, columns] = after.astype(call.dtype)
    if refs.c is not None:
        refs.cells[j, :, columns] = c
        refs.c[:, columns] = new.c if seen is None else jnp.where(seen, new.c, c)
