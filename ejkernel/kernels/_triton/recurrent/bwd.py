"""Recurrent cells backward in Triton: one launch a step, or all steps in one program.

Steps run in the opposite order. A launch multiplies the gradients of the units that the step before
it (in this order) kept by the transposed weights, which gives the gradient of the state, and from
that makes the gradients of its own step's units. Those of weights and inputs are products over all
steps, after the loop. Gates are computed again from the units that forward kept.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import triton_call
from ejkernel.kernels._shared import cells as shared
from ejkernel.kernels._shared.products import multiply
from ejkernel.kernels._triton.recurrent import call, cells, config

Gradients = dict[str, jax.Array]


class Kept(NamedTuple):
    """What forward kept, and the gradient of its outputs, [b, t, p * n]."""

    states: Any
    gates: Any
    cells: Any
    dout: Any


class Carried(NamedTuple):
    """Arrays that a step's launch changes in place."""

    dh: Any  # [p, b, d]: without the share through the projection of the state
    dc: Any
    columns: Any  # [b, t, p * n]: gradients of the kept units, in the dtype of products


@triton.jit
def _product(
    weight, columns, at, layer, i, count, BD: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    """The transposed weights times the gradients of step i's units of the state's projection.

    `count` is the features of a unit, or 0 if there is no such step.
    """
    acc = tl.zeros([BD, BM], tl.float32)
    o_k = tl.arange(0, BK)
    rows = weight + (at.p * layer.D + at.o_d) * (layer.GATES * layer.D)  # [BD, 1]
    first = (at.o_b * layer.steps + i) * layer.DIRECTIONS + at.p
    units = columns + first * (layer.KEPT * layer.D)  # [1, BM]
    # before the units of a GRU's projection of states stands one of its inputs alone
    FIRST: tl.constexpr = layer.KEPT - layer.GATES
    in_rows, in_batch = at.o_d < layer.D, at.o_b < layer.batch
    for j in range(0, count, BK):
        m_w = in_rows & (j + o_k < layer.D)[None, :]
        m_d = in_batch & (j + o_k < layer.D)[:, None]
        p_w, p_d = rows + (j + o_k)[None, :], units + (FIRST * layer.D + j + o_k)[:, None]
        b_w, b_d = tl.load(p_w, mask=m_w, other=0.0), tl.load(p_d, mask=m_d, other=0.0)
        acc = tl.dot(b_w, b_d, acc, input_precision=layer.PRECISION)
        if layer.GATES > 1:
            b_w = tl.load(p_w + layer.D, mask=m_w, other=0.0)
            b_d = tl.load(p_d + layer.D, mask=m_d, other=0.0)
            acc = tl.dot(b_w, b_d, acc, input_precision=layer.PRECISION)
            b_w = tl.load(p_w + 2 * layer.D, mask=m_w, other=0.0)
            b_d = tl.load(p_d + 2 * layer.D, mask=m_d, other=0.0)
            acc = tl.dot(b_w, b_d, acc, input_precision=layer.PRECISION)
        if layer.GATES > 3:
            b_w = tl.load(p_w + 3 * layer.D, mask=m_w, other=0.0)
            b_d = tl.load(p_d + 3 * layer.D, mask=m_d, other=0.0)
            acc = tl.dot(b_w, b_d, acc, input_precision=layer.PRECISION)
    return acc


@triton.jit
def _load_kept(kept, at, layer, i):
    """Units of step i, states before it and the gradient of its output."""
    u0, u1, u2, u3 = cells.load_units(kept.gates, at, layer, i, layer.KEPT)
    dout = cells.load_unit(kept.dout, at, layer, i, 0, 1)
    b_h, b_c = dout, dout
    if layer.CELL == "gru":
        b_h = cells.load_unit(kept.states, at, layer, i, 0, 1)
    if layer.CELL == "lstm":
        b_c = cells.load_unit(kept.cells, at, layer, i, 0, 1)
    return u0, u1, u2, u3, b_h, b_c, dout


@triton.jit(do_not_specialize=cells.STEP_UNSPECIALISED)
def recurrent_bwd_step_kernel(
    weight, lengths, step, layer, kept, old, dh, dc, columns,
    BD: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One step; `old` are the arrays that the outputs share their memory with."""
    at = cells.tile(layer, lengths, BD, BM)
    k = cells.number(step)
    last = layer.steps - 1
    i = cells.step_of(layer, at.p, last - k)
    u0, u1, u2, u3, b_h, b_c, dout = _load_kept(kept, at, layer, i)
    b_dh = cells.load_state(dh, at, layer)
    b_dc = b_dh
    if dc is not None:
        b_dc = cells.load_state(dc, at, layer)
    count = tl.where(k > 0, layer.D, 0)
    following = cells.step_of(layer, at.p, tl.minimum(last - k + 1, last))
    b_dh += _product(weight, columns, at, layer, following, count, BD, BM, BK)
    seen = i < at.length
    b_dh += tl.where(seen, dout, 0.0)
    d0, d1, d2, d3, direct, before = cells.retreat(u0, u1, u2, u3, b_h, b_c, b_dh, b_dc, layer)
    d0, d1 = tl.where(seen, d0, 0.0), tl.where(seen, d1, 0.0)
    d2, d3 = tl.where(seen, d2, 0.0), tl.where(seen, d3, 0.0)
    cells.store_gradients(columns, at, layer, i, d0, d1, d2, d3)
    cells.store_state(dh, at, layer, tl.where(seen, direct, b_dh))
    if dc is not None:
        cells.store_state(dc, at, layer, tl.where(seen, before, b_dc))


@triton.jit(do_not_specialize=cells.UNSPECIALISED)
def recurrent_bwd_kernel(
    weight, lengths, layer, kept, start, dh, dc, columns, BD: tl.constexpr, BM: tl.constexpr
):
    """All steps of a block of batch rows; BD is at least all features."""
    at = cells.tile(layer, lengths, BD, BM)
    w0, w1, w2, w3 = call.load_weights(weight, at.p, layer, BD, True)  # [BD, BD]
    b_dh = cells.load_state(start.h, at, layer)
    b_dc = b_dh
    if dc is not None:
        b_dc = cells.load_state(start.c, at, layer)
    last = layer.steps - 1
    i = cells.step_of(layer, at.p, last)
    u0, u1, u2, u3, b_h, b_c, dout = _load_kept(kept, at, layer, i)
    for k in range(layer.steps):
        i = cells.step_of(layer, at.p, last - k)
        # what forward kept of the next step is on its way while this one is computed
        following = cells.step_of(layer, at.p, tl.maximum(last - k - 1, 0))
        n0, n1, n2, n3, next_h, next_c, next_dout = _load_kept(kept, at, layer, following)
        seen = i < at.length
        b_dh += tl.where(seen, dout, 0.0)
        d0, d1, d2, d3, direct, before = cells.retreat(u0, u1, u2, u3, b_h, b_c, b_dh, b_dc, layer)
        d0, d1 = tl.where(seen, d0, 0.0), tl.where(seen, d1, 0.0)
        d2, d3 = tl.where(seen, d2, 0.0), tl.where(seen, d3, 0.0)
        cells.store_gradients(columns, at, layer, i, d0, d1, d2, d3)
        DTYPE: tl.constexpr = weight.dtype.element_ty
        acc = tl.dot(w0, d0.to(DTYPE), direct, input_precision=layer.PRECISION)
        if layer.GATES > 1:
            acc = tl.dot(w1, d1.to(DTYPE), acc, input_precision=layer.PRECISION)
        if layer.GATES == 3:
            acc = tl.dot(w2, d3.to(DTYPE), acc, input_precision=layer.PRECISION)
        if layer.GATES > 3:
            acc = tl.dot(w2, d2.to(DTYPE), acc, input_precision=layer.PRECISION)
            acc = tl.dot(w3, d3.to(DTYPE), acc, input_precision=layer.PRECISION)
        b_dh = tl.where(seen, acc, b_dh)
        b_dc = tl.where(seen, before, b_dc)
        u0, u1, u2, u3, b_h, b_c, dout = n0, n1, n2, n3, next_h, next_c, next_dout
    cells.store_state(dh, at, layer, b_dh)
    if dc is not None:
        cells.store_state(dc, at, layer, b_dc)


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> Gradients:
    """The gradients of the `wanted` arguments."""
    made = call.Call(args, cfg)
    dout, *dstates = cotangents
    starts = call.States(*(made.stacked(x) for x in (*dstates, None)[:2]))
    if 0 in args.inputs.shape[:2]:
        dh, dc, found = starts.h, starts.c, {}
    else:
        states, gates, *more = residuals
        kept = Kept(states, gates, more[0] if more else None, dout)
        # transposed once, so that rows of a tile are contiguous in both passes
        weight = args.w_hh.astype(made.dtype).swapaxes(1, 2)
        inputs = {"weight": weight, "lengths": args.lengths, "layer": made.layer, "kept": kept}
        run = _in_one_program if cfg.one_program else _by_steps
        dh, dc, columns = run(made, inputs, starts)
        found = _products(made, columns, states, wanted)
    found |= dict(zip(("hidden", "cell"), made.finals(dh, dc), strict=False))
    zeros = lambda name: jnp.zeros(getattr(args, name).shape, jnp.float32)
    every = {name: found[name] if name in found else zeros(name) for name in wanted}
    return {name: x.astype(getattr(args, name).dtype) for name, x in every.items()}


def _products(made: call.Call, columns: jax.Array, states: jax.Array, wanted: Any) -> Gradients:
    """Gradients of weights and inputs, of all directions."""
    args, layer = made.args, made.layer
    parts = []
    for p in range(layer.DIRECTIONS):
        part = lambda x, units, p=p: x[..., p * units * layer.D : (p + 1) * units * layer.D]
        inputs = lambda: shared.seen_inputs(args, args.inputs, 0)
        factors = (inputs, lambda part=part: part(states, 1))
        own = shared.by_projection(args, part(columns, layer.KEPT))
        parts.append(shared.products(args, own, factors, p, wanted))
    join = lambda name: sum if name == "inputs" else jnp.stack
    return {name: join(name)([part[name] for part in parts]) for name in parts[0]}


def _in_one_program(made: call.Call, inputs: Any, starts: call.States) -> tuple[Any, Any, Any]:
    found = triton_call(
        recurrent_bwd_kernel,
        inputs=inputs | {"start": starts},
        outputs={
            "dh": made.state(),
            "dc": None if starts.c is None else made.state(),
            "columns": made.of_steps(made.layer.KEPT, made.dtype),
        },
        grid=made.grid(),
        cost=made.cost(steps=made.args.inputs.shape[1]),
        **made.cfg.launch(),
        BD=made.cfg.block_d,
        BM=made.cfg.block_b,
    )
    return found["dh"], found["dc"], found["columns"]


def _by_steps(made: call.Call, inputs: Any, starts: call.States) -> tuple[Any, Any, Any]:
    columns = {"columns": made.of_steps(made.layer.KEPT, made.dtype)}
    room = {"dh": starts.h, "dc": starts.c, **call.empty(columns, made.args.inputs)}
    shapes = {
        n: x if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in room.items()
    }

    def step(number: cells.Step, room: dict[str, Any]) -> dict[str, Any]:
        return triton_call(
            recurrent_bwd_step_kernel,
            inputs=inputs | {"step": number, "old": Carried(**room)},
            outputs=shapes,
            grid=made.grid(),
            aliases={n: f"old.{n}" for n, x in room.items() if x is not None},
            cost=made.cost(steps=1),
            **made.cfg.launch(),
            BD=made.cfg.block_d,
            BM=made.cfg.block_b,
            BK=made.cfg.block_k,
        )

    found = made.loop(step, room)
    return _with_first_step(made, **found)


def _with_first_step(
    made: call.Call, dh: jax.Array, dc: jax.Array | None, columns: jax.Array
) -> tuple[Any, Any, Any]:
    """Adds to dh what the first step gives through its projection of the state."""
    args, width = made.args, made.layer.KEPT * made.layer.D
    shares = []
    for p, backwards in enumerate(call.directions(args)):
        own = columns[:, -1 if backwards else 0, p * width : (p + 1) * width]
        weight = args.w_hh[p].astype(made.dtype)
        shares.append(multiply("bm,md->bd", shared.of_states(args, own), weight))
    return dh + jnp.stack(shares), dc, columns
