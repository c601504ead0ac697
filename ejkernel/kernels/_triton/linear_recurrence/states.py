"""States between chunks, carried from one to the next: forward, and their gradients backward.

One program holds a block [BD, BE] of the state of one row and head, and takes its chunks in turn.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton._blocks import chunks as blocks
from ejkernel.kernels._triton._blocks import decays
from ejkernel.kernels._triton.linear_recurrence import call

UNSPECIALISED = ("chunks.num_tokens", "chunks.num_chunks")


class Block(NamedTuple):
    """The block of a state that a program holds."""

    row: Any
    head: Any
    o_d: Any  # [BD]
    o_e: Any  # [BE]


@triton.jit
def block_of(sizes, BD: tl.constexpr, BE: tl.constexpr):
    """The block of this program; those of one row and head are neighbours, and share inputs."""
    pid = tl.program_id(0)
    BLOCKS_D: tl.constexpr = (sizes.D + BD - 1) // BD
    BLOCKS_E: tl.constexpr = (sizes.E + BE - 1) // BE
    i_e = pid % BLOCKS_E
    i_d = (pid // BLOCKS_E) % BLOCKS_D
    i_r = pid // (BLOCKS_E * BLOCKS_D)
    o_d = i_d * BD + tl.arange(0, BD)
    o_e = i_e * BE + tl.arange(0, BE)
    return Block(i_r // sizes.HEADS, i_r % sizes.HEADS, o_d, o_e)


@triton.jit
def state_pointers(base, place, i_h, o_d, o_e, sizes):
    """[BD, BE] in an array [.., h, d, e]."""
    first = base + (place.to(tl.int64) * sizes.HEADS + i_h) * (sizes.D * sizes.E)
    return first + o_d[:, None] * sizes.E + o_e[None, :]


@triton.jit
def inside(o_d, o_e, sizes):
    return (o_d < sizes.D)[:, None] & (o_e < sizes.E)[None, :]


@triton.jit
def load_state(base, place, i_h, o_d, o_e, sizes):
    p = state_pointers(base, place, i_h, o_d, o_e, sizes)
    return tl.load(p, mask=inside(o_d, o_e, sizes), other=0.0)


@triton.jit
def store_state(base, tile, place, i_h, o_d, o_e, sizes):
    p = state_pointers(base, place, i_h, o_d, o_e, sizes)
    tl.store(p, tile.to(base.dtype.element_ty), mask=inside(o_d, o_e, sizes))


@triton.jit
def _decays(gates, span, i_h, o_c, o_d, chunks, BACKWARD: tl.constexpr):
    """Decays of a chunk's rows to its end (BACKWARD: from its start), and of all its steps."""
    C: tl.constexpr = chunks.SIZE
    if gates.gk is not None:
        b_a = decays.element_gates(gates, span, i_h, o_c, o_d)
        steps = decays.up_to(C) if BACKWARD else decays.after(C)
        factor = decays.decay(decays.sums(steps, b_a, gates.TERMS))  # [C, BD]
        return factor, decays.decay(tl.sum(b_a, 0))
    else:
        b_a = decays.head_gates(gates, span, i_h, o_c)
        start, end, total = decays.head_sums(gates, b_a, span, i_h, C)
        factor = decays.decay(start if BACKWARD else end)[:, None]  # [C, 1]
        return factor, tl.zeros(o_d.shape, tl.float32) + decays.decay(total)


@triton.jit(do_not_specialize=UNSPECIALISED)
def linear_recurrence_states_kernel(
    rows, columns, gates, start, chunks, sizes, states, last,
    BD: tl.constexpr, BE: tl.constexpr, SCALE: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Forward: the state before each chunk, from keys and values, and the state after the last.

    BACKWARD: the gradient of the state after each chunk, from queries and output gradients, and
    of the state before the first.
    """
    block = block_of(sizes, BD, BE)
    row = blocks.row_of(chunks, block.row)
    o_c = tl.arange(0, chunks.SIZE)
    if start is not None:
        b_h = load_state(start, block.row, block.head, block.o_d, block.o_e, sizes).to(tl.float32)
    else:
        b_h = tl.zeros([BD, BE], tl.float32)
    for i in range(0, row.count):
        j = row.count - 1 - i if BACKWARD else i
        span = blocks.span_of(chunks, row, j)
        b_x = blocks.load(rows, span, block.head, o_c, block.o_d)  # [C, BD]
        b_y = blocks.load(columns, span, block.head, o_c, block.o_e)  # [C, BE]
        factor, total = _decays(gates, span, block.head, o_c, block.o_d, chunks, BACKWARD)
        store_state(states, b_h, row.first + j, block.head, block.o_d, block.o_e, sizes)
        b_x = (b_x * factor).to(b_x.dtype)
        added = tl.dot(tl.trans(b_x), b_y, input_precision=sizes.PRECISION)
        b_h = b_h * total[:, None] + added * SCALE
    if last is not None:
        store_state(last, b_h, block.row, block.head, block.o_d, block.o_e, sizes)


def states(made: Any, cfg: Any, last: bool) -> tuple[jax.Array, jax.Array | None]:
    """The state before each chunk, and the last ones if asked for."""
    pair = (made.operand("key"), made.operand("value"))
    return _launch(made, cfg, pair, made.args.initial_state, last, False)


def gradients(
    made: Any, cfg: Any, dout: jax.Array, dlast: jax.Array | None, wanted: bool
) -> tuple[jax.Array, jax.Array | None]:
    """The gradient of the state after each chunk, and of the initial states where wanted."""
    pair = (made.operand("query"), call.operand(dout, made.heads))
    return _launch(made, cfg, pair, dlast, wanted, True)


def _launch(
    made: Any, cfg: Any, pair: Any, start: Any, wanted: bool, backward: bool
) -> tuple[jax.Array, jax.Array | None]:
    shape = (made.heads, made.d, made.e)
    blocks_d, blocks_e = cdiv(made.d, cfg.state_d), cdiv(made.e, cfg.state_e)
    last = jax.ShapeDtypeStruct((made.rows, *shape), jnp.float32) if wanted else None
    found = triton_call(
        linear_recurrence_states_kernel,
        inputs=made.inputs() | {"rows": pair[0], "columns": pair[1], "start": start},
        outputs={
            "states": jax.ShapeDtypeStruct((made.num_chunks, *shape), made.state_dtype),
            "last": last,
        },
        grid=(made.rows * made.heads * blocks_d * blocks_e,),
        **cfg.launch_states(),
        BD=cfg.state_d,
        BE=cfg.state_e,
        SCALE=made.scale if backward else 1.0,
        BACKWARD=backward,
    )
    return found["states"], found["last"]
