"""What the host makes of a call for both directions: shapes, projections, the loop over steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import Cost, cdiv, triton_call
from ejkernel.kernels._shared import cells as shared
from ejkernel.kernels._specs import recurrent as spec
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.recurrent import cells, config
from ejkernel.xla_utils import manual

directions = spec.directions


class States(NamedTuple):
    """States [p, b, d] in float32."""

    h: Any
    c: Any


@triton.jit
def load_weights(weight, p, layer, BD: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The weights [BD, BD] of each gate; TRANSPOSED: of an array [p, d, gates * d]."""
    o_d = tl.arange(0, BD)
    inside = (o_d < layer.D)[:, None] & (o_d < layer.D)[None, :]
    if TRANSPOSED:
        base = weight + p * layer.GATES * layer.D * layer.D
        p_w = base + o_d[:, None] * (layer.GATES * layer.D) + o_d[None, :]
        unit = layer.D
    else:
        base = weight + p * layer.GATES * layer.D * layer.D
        p_w = base + o_d[:, None] * layer.D + o_d[None, :]
        unit = layer.D * layer.D
    w0 = tl.load(p_w, mask=inside, other=0.0)
    w1, w2, w3 = w0, w0, w0
    if layer.GATES > 1:
        w1 = tl.load(p_w + unit, mask=inside, other=0.0)
        w2 = tl.load(p_w + 2 * unit, mask=inside, other=0.0)
    if layer.GATES > 3:
        w3 = tl.load(p_w + 3 * unit, mask=inside, other=0.0)
    return w0, w1, w2, w3


@triton.jit
def recurrent_room_kernel(like, r0, r1, r2, r3):
    """Writes nothing: its outputs are memory that nobody had to fill with zeros."""


def empty(shapes: dict[str, Any], like: jax.Array) -> dict[str, Any]:
    """Arrays of whatever memory holds, None where there is no shape."""
    names = [f"r{index}" for index in range(4)]
    wanted = dict(zip(names, [*shapes.values(), *[None] * 4], strict=False))
    found = triton_call(
        recurrent_room_kernel, inputs={"like": like}, outputs=wanted, grid=(1,), num_warps=1
    )
    return dict(zip(shapes, found.values(), strict=False))


class Call:
    """A call and its configuration."""

    def __init__(self, args: Any, cfg: config.Config):
        self.args, self.cfg = args, cfg
        self.dtype = shared.product_dtype(args)
        batch, t, _ = args.inputs.shape
        (count, _, d), cell_type = args.w_hh.shape, args.cell_type
        self.layer = cells.Layer(
            batch=batch,
            steps=t,
            D=d,
            CELL=cell_type,
            GATES=spec.GATES[cell_type],
            KEPT=spec.KEPT[cell_type],
            DIRECTIONS=count,
            REVERSED=bool(args.reverse),
            ACT=args.activation,
            GATE=args.gate_activation,
            FINE=args.inputs.dtype.itemsize >= 4 or jnp.dtype(self.dtype).itemsize >= 4,
            PRECISION=_launch.dot_precision(self.dtype),
        )

    def of_steps(self, units: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        """[b, t, p * units * d]."""
        width = self.layer.DIRECTIONS * units * self.layer.D
        return jax.ShapeDtypeStruct((*self.args.inputs.shape[:2], width), dtype)

    def state(self) -> jax.ShapeDtypeStruct:
        shape = (self.layer.DIRECTIONS, self.layer.batch, self.layer.D)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def stacked(self, state: jax.Array | None) -> jax.Array | None:
        """A state like the caller's as [p, b, d] in float32."""
        if state is None:
            return None
        return (state if self.args.bidirectional else state[None]).astype(jnp.float32)

    def starts(self) -> tuple[jax.Array, jax.Array | None]:
        return self.stacked(self.args.hidden), self.stacked(self.args.cell)

    def finals(self, h: jax.Array, c: jax.Array | None) -> list[jax.Array]:
        """States [p, b, d] as arrays like the caller's."""
        states = [(h[p],) if c is None else (h[p], c[p]) for p in range(self.layer.DIRECTIONS)]
        return shared.finals(self.args, states)

    def nothing(self) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """What forward gives without rows or without steps."""
        args, is_lstm = self.args, self.args.cell is not None
        shapes = [self.of_steps(1), self.of_steps(self.layer.KEPT), self.of_steps(1)]
        kept = tuple(jnp.zeros(s.shape, s.dtype) for s in shapes[: 3 if is_lstm else 2])
        out = jnp.zeros(shapes[0].shape, args.inputs.dtype)
        return (out, args.hidden, *((args.cell,) if is_lstm else ())), kept

    def projections(self) -> jax.Array:
        """The inputs of all steps and directions, [b, t, p * m] in float32, without biases.

        XLA would add those in a pass over the whole array, 1 GiB for 64 rows of 512 steps of an
        LSTM with 1024 features.
        """
        args = self.args
        rows = args.w_ih.reshape(-1, args.w_ih.shape[2])
        inputs = shared.seen_inputs(args, args.inputs, 0)
        return shared.project(inputs, rows, None)

    def grid(self) -> tuple[int]:
        """A program for each direction, block of batch rows and block of features."""
        layer, cfg = self.layer, self.cfg
        blocks = cdiv(layer.D, cfg.block_d) * cdiv(layer.batch, cfg.block_b)
        return (layer.DIRECTIONS * blocks,)

    def cost(self, steps: int) -> Cost:
        directions, rows, d = self.args.w_hh.shape
        return Cost(flops=2 * steps * directions * self.layer.batch * rows * d)

    def loop(self, step: Callable[[cells.Step, dict[str, Any]], dict[str, Any]], room: Any) -> Any:
        """Runs `step` for all steps on arrays that it changes in place.

        `unroll` of them are in the body of a loop. They compute their numbers themselves: those
        that XLA computes take a launch each.
        """
        leaves, tree = jax.tree.flatten(room)
        _, *leaves = manual.vary_alike([self.args.inputs, *leaves])
        bodies, rest = divmod(self.layer.steps, self.cfg.unroll)

        def body(i: Any, room: Any, count: int = self.cfg.unroll) -> Any:
            for offset in range(count):
                number = cells.Step(jnp.asarray(i, jnp.int32), self.cfg.unroll, offset)
                room = step(number, room)
            return room

        room = jax.lax.fori_loop(0, bodies, body, jax.tree.unflatten(tree, leaves))
        return body(bodies, room, rest)
