"""Recurrent cells backward on a TPU: one kernel for all steps, from the last that ran to the first.

Gates are computed again from the projections that forward kept. A step makes the gradients of its
columns, then multiplies them by the weights for the gradient of the state before it. Those of
weights and inputs follow from the columns of all steps, by one matrix product each, outside.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu._blocks import grid, tiles
from ejkernel.kernels._pallas.tpu.recurrent import config
from ejkernel.kernels._pallas.tpu.recurrent.call import Call
from ejkernel.kernels._shared import cells as shared
from ejkernel.ops.core.kernel import BACKWARD


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """The gradients of the `wanted` arguments."""
    call = Call(args, cfg, back=True)
    dout, dh, *dc = cotangents
    columns, states = _columns_of_steps(call, residuals, dout, (dh, *dc))
    made = dict(zip(("hidden", "cell"), states, strict=False))
    own = _of_columns(call, columns, residuals[0], wanted - made.keys())
    made |= own
    return {name: made[name].astype(getattr(args, name).dtype) for name in wanted}


def _columns_of_steps(
    call: Call,
    residuals: tuple[jax.Array, ...],
    dout: jax.Array,
    dstates: tuple[jax.Array, ...],
) -> tuple[jax.Array, list[jax.Array]]:
    """Gradients of the columns of all steps [b, t, p * kept * d], and of the states before all."""
    args = call.args
    states, gates, *cells = residuals
    call.add_steps("dout", call.by_steps(dout, 1), 1)
    call.add_steps("gates", call.by_steps(gates, call.kept), call.kept)
    if args.cell_type == "lstm":
        call.add_steps("cells", call.by_steps(cells[0], 1), 1)
    elif args.cell_type == "gru":
        call.add_steps("states", call.by_steps(states, 1), 1)
    call.add_weights(grid.pad_to(call.wide_rows(args.w_hh), 2, call.width))
    call.add_lengths()
    call.add_state("dh_last", dstates[0])
    out = {"columns": call.of_steps(call.kept, call.dtype), "dh": call.of_state()}
    if args.cell is not None:
        call.add_state("dc_last", dstates[1])
        out["dc"] = call.of_state()
    room = pltpu.VMEM((2, call.rows, call.width), jnp.float32)
    made = call.run("recurrent_bwd_kernel", _kernel, out, {"room": room}, BACKWARD)
    return call.as_given(made["columns"]), call.finals(made["dh"], made.get("dc"))


def _kernel(call: Call, refs: Any) -> None:
    has_cell = call.args.cell is not None

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        refs.room[0] = refs.dh_last[...]
        if has_cell:
            refs.dc[...] = refs.dc_last[...]

    def step(j: Any, i: Any, turn: Any) -> None:
        refs.room[1 - turn] = jnp.zeros_like(refs.dh)
        for start in call.parts():
            columns = _part(call, refs, (j, i, turn), start)
            _add_products(call, refs, 1 - turn, columns, start)

    call.for_steps(refs, step)

    @pl.when(pl.program_id(2) == call.blocks - 1)
    def _() -> None:
        refs.dh[...] = refs.room[call.t % 2]


def _part(call: Call, refs: Any, at: tuple[Any, Any, Any], start: int) -> list[jax.Array]:
    """Gradients of some columns of a step, and of states without the projections' share.

    `at` is the step and the buffer with the gradient of the state after it.
    """
    (j, i, turn), own = at, call.part(start)
    has_cell, seen = call.args.cell is not None, call.seen(refs, i)
    kept = tuple(refs.gates[j, :, call.part(start, n)] for n in range(call.kept))
    before = refs.cells if has_cell else refs.states
    state = None if before is None else before[j, :, own]
    shown = refs.dout[j, :, own].astype(jnp.float32)
    dh = refs.room[turn, :, own] + (shown if seen is None else jnp.where(seen, shown, 0.0))
    dc: Any = refs.dc[:, own] if has_cell else None
    made = call.cell.back(kept, state, dh, dc)
    columns = made.columns
    if seen is not None:
        columns = tuple(jnp.where(seen, x, 0.0) for x in columns)
    columns = [x.astype(call.dtype) for x in columns]
    for number, tile in enumerate(columns):
        refs.columns[j, :, call.part(start, number)] = tile
    direct = jnp.zeros_like(dh) if made.dh is None else made.dh
    if seen is not None:
        direct = jnp.where(seen, direct, dh)
    refs.room[1 - turn, :, own] += direct
    if has_cell:
        refs.dc[:, own] = made.dc if seen is None else jnp.where(seen, made.dc, dc)
    return columns[call.kept - call.gates :]


def _add_products(call: Call, refs: Any, turn: Any, columns: list[jax.Array], start: int) -> None:
    """Adds what some columns of the states' projection give to the gradient of the state before.

    Rows without the step have columns of zeros.
    """
    for first in call.parts():
        own = call.part(first)
        total = refs.room[turn, :, own]
        for gate, tile in enumerate(columns):
            total += tiles.product(tile, refs.weight[call.part(start, gate), own])
        refs.room[turn, :, own] = total


def _of_columns(
    call: Call, columns: jax.Array, states: jax.Array, wanted: frozenset[str]
) -> dict[str, jax.Array]:
    """Gradients of inputs, weights and biases; those of the inputs are sums over directions."""
    args, d = call.args, call.d
    found = []
    for p in range(call.count):
        own = columns[..., p * call.kept * d : (p + 1) * call.kept * d]
        factors = (
            lambda: shared.seen_inputs(args, args.inputs, 0),
            lambda p=p: states[..., p * d : (p + 1) * d],
        )
        found.append(shared.products(args, shared.by_projection(args, own), factors, p, wanted))
    made = {n: jnp.stack([x[n] for x in found]) for n in wanted if n != "inputs"}
    if "inputs" in wanted:
        made["inputs"] = sum(x["inputs"] for x in found[1:]) + found[0]["inputs"]
    return made
