"""Recurrent cells forward in Triton: one launch a step, or all steps in one program.

The inputs of all steps are projected by one matrix product before. A step's launch multiplies the
state by a block of rows of each gate's weights and finishes the cell; the weights come from the
L2 cache. The state goes from launch to launch in the dtype of products, in two halves of an
array that take turns; each program keeps its own part of it in float32 besides. Where all weights
fit into a multiprocessor, a program holds them and runs all steps of its batch rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import triton_call
from ejkernel.kernels._shared import cells as shared
from ejkernel.kernels._triton.recurrent import call, cells, config


class Carried(NamedTuple):
    """Arrays that a step's launch changes in place."""

    factors: Any  # [2, p, b, d]: the state in the dtype of products; step k reads half k % 2
    h: Any  # [p, b, d], float32
    c: Any
    out: Any  # [b, t, p * d]
    states: Any
    gates: Any
    cells: Any


@triton.jit
def _products(
    weight, factors, s0, s1, s2, s3, at, layer, half,
    BD: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Each gate's weights times the state, [BD, BM]; sums begin with s0 to s3, [BD, 1]."""
    a0, a1 = tl.broadcast_to(s0, [BD, BM]), tl.broadcast_to(s1, [BD, BM])
    a2, a3 = tl.broadcast_to(s2, [BD, BM]), tl.broadcast_to(s3, [BD, BM])
    rows = weight + (at.p * layer.GATES * layer.D + at.o_d) * layer.D  # [BD, 1]
    state = factors + ((half * layer.DIRECTIONS + at.p) * layer.batch + at.o_b) * layer.D  # [1, BM]
    o_k = tl.arange(0, BK)
    unit = layer.D * layer.D
    in_rows, in_batch = at.o_d < layer.D, at.o_b < layer.batch
    for j in range(0, layer.D, BK):
        b_h = tl.load(
            state + (j + o_k)[:, None], mask=in_batch & (j + o_k < layer.D)[:, None], other=0.0
        )  # [BK, BM]
        m_w = in_rows & (j + o_k < layer.D)[None, :]
        p_w = rows + (j + o_k)[None, :]
        b_w = tl.load(p_w, mask=m_w, other=0.0)  # [BD, BK]
        a0 = tl.dot(b_w, b_h, a0, input_precision=layer.PRECISION)
        if layer.GATES > 1:
            b_w = tl.load(p_w + unit, mask=m_w, other=0.0)
            a1 = tl.dot(b_w, b_h, a1, input_precision=layer.PRECISION)
            b_w = tl.load(p_w + 2 * unit, mask=m_w, other=0.0)
            a2 = tl.dot(b_w, b_h, a2, input_precision=layer.PRECISION)
        if layer.GATES > 3:
            b_w = tl.load(p_w + 3 * unit, mask=m_w, other=0.0)
            a3 = tl.dot(b_w, b_h, a3, input_precision=layer.PRECISION)
    return a0, a1, a2, a3


@triton.jit(do_not_specialize=cells.STEP_UNSPECIALISED)
def recurrent_fwd_step_kernel(
    x, weight, biases, lengths, step, layer, old, factors, h, c, out, states, gates, cells_out,
    BD: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One step; `old` are the arrays that the outputs share their memory with."""
    at = cells.tile(layer, lengths, BD, BM)
    k = cells.number(step)
    i = cells.step_of(layer, at.p, k)
    x0, x1, x2, x3 = cells.load_units(x, at, layer, i, layer.GATES)
    s0, s1, s2, s3, more = cells.load_biases(biases, at, layer)
    b_h = cells.load_state(h, at, layer)
    b_c = b_h
    if c is not None:
        b_c = cells.load_state(c, at, layer)
        cells.store_unit(cells_out, at, layer, i, 0, b_c, 1)
    cells.store_unit(states, at, layer, i, 0, b_h, 1)
    y0, y1, y2, y3 = _products(weight, factors, s0, s1, s2, s3, at, layer, k % 2, BD, BM, BK)
    u0, u1, u2, u3 = cells.kept_units(x0, x1, x2, x3, y0, y1, y2, y3, more, layer)
    cells.store_units(gates, at, layer, i, u0, u1, u2, u3)
    new_h, new_c = cells.advance(u0, u1, u2, u3, b_h, b_c, layer)
    seen = i < at.length
    cells.store_unit(out, at, layer, i, 0, tl.where(seen, new_h, 0.0), 1)
    new_h = tl.where(seen, new_h, b_h)
    cells.store_state(h, at, layer, new_h)
    if c is not None:
        cells.store_state(c, at, layer, tl.where(seen, new_c, b_c))
    other = factors + (1 - k % 2) * layer.DIRECTIONS * layer.batch.to(tl.int64) * layer.D
    cells.store_state(other, at, layer, new_h)


@triton.jit(do_not_specialize=cells.UNSPECIALISED)
def recurrent_fwd_kernel(
    x, weight, biases, lengths, start, layer, h, c, out, states, gates, cells_out,
    BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """All steps of a block of batch rows; BD is at least all features."""
    at = cells.tile(layer, lengths, BD, BM)
    w0, w1, w2, w3 = call.load_weights(weight, at.p, layer, BD, False)  # [BD, BD]
    s0, s1, s2, s3, more = cells.load_biases(biases, at, layer)
    b_h = cells.load_state(start.h, at, layer)
    b_c = b_h
    if c is not None:
        b_c = cells.load_state(start.c, at, layer)
    i = cells.step_of(layer, at.p, 0)
    x0, x1, x2, x3 = cells.load_units(x, at, layer, i, layer.GATES)
    for k in range(layer.steps):
        i = cells.step_of(layer, at.p, k)
        # the next step's projections are on their way while this one is computed
        following = cells.step_of(layer, at.p, tl.minimum(k + 1, layer.steps - 1))
        n0, n1, n2, n3 = cells.load_units(x, at, layer, following, layer.GATES)
        cells.store_unit(states, at, layer, i, 0, b_h, 1)
        if c is not None:
            cells.store_unit(cells_out, at, layer, i, 0, b_c, 1)
        factor = b_h.to(weight.dtype.element_ty)
        y0, y1 = tl.broadcast_to(s0, [BD, BM]), tl.broadcast_to(s1, [BD, BM])
        y2, y3 = tl.broadcast_to(s2, [BD, BM]), tl.broadcast_to(s3, [BD, BM])
        y0 = tl.dot(w0, factor, y0, input_precision=layer.PRECISION)
        if layer.GATES > 1:
            y1 = tl.dot(w1, factor, y1, input_precision=layer.PRECISION)
            y2 = tl.dot(w2, factor, y2, input_precision=layer.PRECISION)
        if layer.GATES > 3:
            y3 = tl.dot(w3, factor, y3, input_precision=layer.PRECISION)
        u0, u1, u2, u3 = cells.kept_units(x0, x1, x2, x3, y0, y1, y2, y3, more, layer)
        cells.store_units(gates, at, layer, i, u0, u1, u2, u3)
        new_h, new_c = cells.advance(u0, u1, u2, u3, b_h, b_c, layer)
        seen = i < at.length
        cells.store_unit(out, at, layer, i, 0, tl.where(seen, new_h, 0.0), 1)
        b_h = tl.where(seen, new_h, b_h)
        b_c = tl.where(seen, new_c, b_c)
        x0, x1, x2, x3 = n0, n1, n2, n3
    cells.store_state(h, at, layer, b_h)
    if c is not None:
        cells.store_state(c, at, layer, b_c)


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Outputs and final states; residuals are states and columns of each step."""
    made = call.Call(args, cfg)
    if 0 in args.inputs.shape[:2]:
        return made.nothing()
    is_lstm = args.cell is not None
    outputs = {
        "out": made.of_steps(1, args.inputs.dtype),
        "states": made.of_steps(1),
        "gates": made.of_steps(made.layer.KEPT),
        "cells_out": made.of_steps(1) if is_lstm else None,
    }
    inputs = {
        "x": made.projections(),
        "weight": args.w_hh.astype(made.dtype),
        "biases": cells.Biases(*shared.biases(args)),
        "lengths": args.lengths,
        "layer": made.layer,
    }
    run = _in_one_program if cfg.one_program else _by_steps
    found = run(made, inputs, outputs)
    kept = (found["states"], found["gates"]) + ((found["cells_out"],) if is_lstm else ())
    return (found["out"], *made.finals(found["h"], found["c"])), kept


def _in_one_program(made: call.Call, inputs: Any, outputs: Any) -> dict[str, jax.Array]:
    h, c = made.starts()
    states = {"h": made.state(), "c": None if c is None else made.state()}
    return triton_call(
        recurrent_fwd_kernel,
        inputs=inputs | {"start": call.States(h, c)},
        outputs=outputs | states,
        grid=made.grid(),
        cost=made.cost(steps=made.args.inputs.shape[1]),
        **made.cfg.launch(),
        BD=made.cfg.block_d,
        BM=made.cfg.block_b,
    )


def _by_steps(made: call.Call, inputs: Any, outputs: Any) -> dict[str, jax.Array]:
    h, c = made.starts()
    factors = jnp.broadcast_to(h.astype(made.dtype)[None], (2, *h.shape))
    room = call.empty(outputs, made.args.inputs)
    room = {"factors": factors, "h": h, "c": c, **room}
    shapes = {
        n: x if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in room.items()
    }
    members = {"cells_out": "cells"}

    def step(number: cells.Step, room: dict[str, Any]) -> dict[str, Any]:
        old = Carried(**{members.get(n, n): x for n, x in room.items()})
        return triton_call(
            recurrent_fwd_step_kernel,
            inputs=inputs | {"step": number, "old": old},
            outputs=shapes,
            grid=made.grid(),
            aliases={n: f"old.{members.get(n, n)}" for n, x in room.items() if x is not None},
            cost=made.cost(steps=1),
            **made.cfg.launch(),
            BD=made.cfg.block_d,
            BM=made.cfg.block_b,
            BK=made.cfg.block_k,
        )

    return made.loop(step, room)
