"""One step of each cell and its transpose on tiles [BD, BM]: features of the state x batch rows.

A gate is a tile of its own, so that nothing is split or joined between two products. Arrays of all
steps are [b, t, p * n]: for each direction, units of d columns. What a step keeps are units as the
spec's residual `gates` has them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import activations


class Layer(NamedTuple):
    """A call: sizes, cell and activations."""

    batch: Any
    steps: Any
    D: tl.constexpr  # features of a state
    CELL: tl.constexpr  # "lstm", "gru" or "rnn"
    GATES: tl.constexpr  # units of a projection
    KEPT: tl.constexpr  # units that a step keeps
    DIRECTIONS: tl.constexpr
    REVERSED: tl.constexpr  # the only direction runs from the last step to the first
    ACT: tl.constexpr
    GATE: tl.constexpr
    FINE: tl.constexpr  # activations are accurate to the last bits of float32
    PRECISION: tl.constexpr  # of products


class Biases(NamedTuple):
    """Biases [p, gates * d] in float32: of both projections, but for n of a GRU apart."""

    outer: Any
    inner: Any


class Tile(NamedTuple):
    """Features and batch rows of a program, and their direction."""

    o_d: Any  # [BD, 1]
    o_b: Any  # [1, BM], in 64 bits
    inside: Any  # [BD, BM]
    p: Any
    length: Any  # [1, BM]: real steps of each row


# Ints that the code does not depend on: a call and its reduced twin share one compiled kernel.
UNSPECIALISED = ("layer.batch", "layer.steps")


class Step(NamedTuple):
    """Which step a launch is: the loop counts bodies, of which each has `size` launches."""

    body: Any  # int32, in memory
    size: Any
    offset: Any  # of the launch in its body


STEP_UNSPECIALISED = (*UNSPECIALISED, "step.size", "step.offset")


@triton.jit
def number(step):
    """The number of a step, from 0."""
    return tl.load(step.body) * step.size + step.offset


@triton.jit
def tile(layer, lengths, BD: tl.constexpr, BM: tl.constexpr):
    """The tile of this program; programs of one block of batch rows are neighbours."""
    num_d = tl.cdiv(layer.D, BD)
    num_b = tl.cdiv(layer.batch, BM)
    i_d = tl.program_id(0) % num_d
    rest = tl.program_id(0) // num_d
    o_d = (i_d * BD + tl.arange(0, BD))[:, None]
    o_b = ((rest % num_b) * BM + tl.arange(0, BM))[None, :]
    real = o_b < layer.batch
    if lengths is None:
        length = tl.full([1, BM], 0, tl.int32) + layer.steps
    else:
        length = tl.load(lengths + o_b, mask=real, other=0)
    return Tile(o_d, o_b.to(tl.int64), (o_d < layer.D) & real, rest // num_b, length)


@triton.jit
def step_of(layer, p, k):
    """The k-th step that direction p runs."""
    if layer.DIRECTIONS == 2:
        return tl.where(p == 1, layer.steps - 1 - k, k)
    elif layer.REVERSED:
        return layer.steps - 1 - k
    else:
        return k


@triton.jit
def in_steps(at, layer, i, unit, UNITS: tl.constexpr):
    """Offsets [BD, BM] of a unit at step i in an array [b, t, p * UNITS * d]."""
    row = (at.o_b * layer.steps + i) * (layer.DIRECTIONS * UNITS)
    return (row + at.p * UNITS + unit) * layer.D + at.o_d


@triton.jit
def in_states(at, layer):
    """Offsets [BD, BM] in an array [p, b, d]."""
    return (at.p * layer.batch + at.o_b) * layer.D + at.o_d


@triton.jit
def load_unit(base, at, layer, i, unit, UNITS: tl.constexpr):
    """A unit of step i, [BD, BM] in float32."""
    offsets = in_steps(at, layer, i, unit, UNITS)
    return tl.load(base + offsets, mask=at.inside, other=0.0).to(tl.float32)


@triton.jit
def store_unit(base, at, layer, i, unit, x, UNITS: tl.constexpr):
    offsets = in_steps(at, layer, i, unit, UNITS)
    tl.store(base + offsets, x.to(base.dtype.element_ty), mask=at.inside)


@triton.jit
def load_units(base, at, layer, i, UNITS: tl.constexpr):
    """Up to four units of step i; those that there are not are zeros."""
    zero = tl.zeros([at.o_d.shape[0], at.o_b.shape[1]], tl.float32)
    u0 = load_unit(base, at, layer, i, 0, UNITS)
    u1 = load_unit(base, at, layer, i, 1, UNITS) if UNITS > 1 else zero
    u2 = load_unit(base, at, layer, i, 2, UNITS) if UNITS > 2 else zero
    u3 = load_unit(base, at, layer, i, 3, UNITS) if UNITS > 3 else zero
    return u0, u1, u2, u3


@triton.jit
def store_units(base, at, layer, i, u0, u1, u2, u3):
    """The units that a step keeps."""
    store_unit(base, at, layer, i, 0, u0, layer.KEPT)
    if layer.KEPT > 1:
        store_unit(base, at, layer, i, 1, u1, layer.KEPT)
        store_unit(base, at, layer, i, 2, u2, layer.KEPT)
        store_unit(base, at, layer, i, 3, u3, layer.KEPT)


@triton.jit
def store_gradients(base, at, layer, i, d0, d1, d2, d3):
    """Gradients of the kept units, in the order of `_shared/cells.py`."""
    if layer.CELL == "gru":
        store_units(base, at, layer, i, d2, d0, d1, d3)
    else:
        store_units(base, at, layer, i, d0, d1, d2, d3)


@triton.jit
def load_state(base, at, layer):
    return tl.load(base + in_states(at, layer), mask=at.inside, other=0.0).to(tl.float32)


@triton.jit
def store_state(base, at, layer, x):
    tl.store(base + in_states(at, layer), x.to(base.dtype.element_ty), mask=at.inside)


@triton.jit
def _load_bias(bias, at, layer, unit):
    """A unit [BD, 1] of biases [p, gates * d], or zeros."""
    if bias is None:
        return tl.zeros([at.o_d.shape[0], 1], tl.float32)
    else:
        p = bias + (at.p * layer.GATES + unit) * layer.D + at.o_d
        return tl.load(p, mask=at.o_d < layer.D, other=0.0).to(tl.float32)


@triton.jit
def load_biases(biases, at, layer):
    """What the sums of each gate's product begin with, and what a GRU's n adds to its input."""
    s0 = _load_bias(biases.outer, at, layer, 0)
    s1, s2, s3, more = s0, s0, s0, s0
    if layer.GATES > 1:
        s1 = _load_bias(biases.outer, at, layer, 1)
        more = _load_bias(biases.outer, at, layer, 2)
        s2 = more
    if layer.GATES == 3:
        s2 = _load_bias(biases.inner, at, layer, 2)
    if layer.GATES > 3:
        s3 = _load_bias(biases.outer, at, layer, 3)
    return s0, s1, s2, s3, more


@triton.jit
def kept_units(x0, x1, x2, x3, y0, y1, y2, y3, more, layer):
    """What a step keeps of the projections x of its input and y of the state, biases included."""
    if layer.CELL == "gru":
        return x0 + y0, x1 + y1, x2 + more, y2
    else:
        return x0 + y0, x1 + y1, x2 + y2, x3 + y3


@triton.jit
def advance(u0, u1, u2, u3, h, c, layer):
    """The state after a step from the units that it keeps."""
    if layer.CELL == "lstm":
        i = activations.activate(u0, layer.GATE, layer.FINE)
        f = activations.activate(u1, layer.GATE, layer.FINE)
        g = activations.activate(u2, layer.ACT, layer.FINE)
        o = activations.activate(u3, layer.GATE, layer.FINE)
        c = f * c + i * g
        return o * activations.activate(c, layer.ACT, layer.FINE), c
    elif layer.CELL == "gru":
        r = activations.activate(u0, layer.GATE, layer.FINE)
        z = activations.activate(u1, layer.GATE, layer.FINE)
        n = activations.activate(u2 + r * u3, layer.ACT, layer.FINE)
        return (1.0 - z) * n + z * h, c
    else:
        return activations.activate(u0, layer.ACT, layer.FINE), c


@triton.jit
def retreat(u0, u1, u2, u3, h, c, dh, dc, layer):
    """Gradients of the kept units, of h but for the share through its projection, and of c."""
    if layer.CELL == "lstm":
        i = activations.activate(u0, layer.GATE, layer.FINE)
        f = activations.activate(u1, layer.GATE, layer.FINE)
        g = activations.activate(u2, layer.ACT, layer.FINE)
        o = activations.activate(u3, layer.GATE, layer.FINE)
        after = f * c + i * g
        a = activations.activate(after, layer.ACT, layer.FINE)
        dc += dh * o * activations.slope(after, a, layer.ACT)
        d0 = dc * g * activations.slope(u0, i, layer.GATE)
        d1 = dc * c * activations.slope(u1, f, layer.GATE)
        d2 = dc * i * activations.slope(u2, g, layer.ACT)
        d3 = dh * a * activations.slope(u3, o, layer.GATE)
        return d0, d1, d2, d3, tl.zeros_like(dh), dc * f
    elif layer.CELL == "gru":
        r = activations.activate(u0, layer.GATE, layer.FINE)
        z = activations.activate(u1, layer.GATE, layer.FINE)
        before = u2 + r * u3
        n = activations.activate(before, layer.ACT, layer.FINE)
        dn = dh * (1.0 - z) * activations.slope(before, n, layer.ACT)
        d0 = dn * u3 * activations.slope(u0, r, layer.GATE)
        d1 = dh * (h - n) * activations.slope(u1, z, layer.GATE)
        return d0, d1, dn, dn * r, dh * z, dc
    else:
        a = activations.activate(u0, layer.ACT, layer.FINE)
        zero = tl.zeros_like(dh)
        return dh * activations.slope(u0, a, layer.ACT), zero, zero, zero, zero, dc
