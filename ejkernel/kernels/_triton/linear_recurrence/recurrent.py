"""A few tokens of each row one by one, for decoding: the state is read and written once.

The last state takes the memory of the initial one, so a caller that donates it pays no copy.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton._blocks import chunks as blocks
from ejkernel.kernels._triton.linear_recurrence import call, states


@triton.jit
def _vector(x, token, i_h, o_x):
    """One token's numbers of a head, float32 [X]; zeros beyond the width."""
    p = x.base + token * x.STRIDE + (i_h // x.GROUP) * x.WIDTH + o_x
    return tl.load(p, mask=o_x < x.WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _decay(gates, token, i_h, o_d):
    """A step's decay of the state's rows, [BD]."""
    total = tl.zeros(o_d.shape, tl.float32)
    if gates.g is not None:
        total += tl.load(gates.g.base + token * gates.g.STRIDE + i_h).to(tl.float32)
    if gates.gamma is not None:
        total += tl.load(gates.gamma + i_h).to(tl.float32)
    if gates.gk is not None:
        total += _vector(gates.gk, token, i_h, o_d)
    return tl.exp(total)


@triton.jit(do_not_specialize=states.UNSPECIALISED)
def linear_recurrence_step_kernel(
    query, key, value, gates, initial, chunks, sizes, out, last,
    BD: tl.constexpr, BE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """All tokens of a row for one head and BE columns of its state; BD holds all rows."""
    block = states.block_of(sizes, BD, BE)
    row = blocks.row_of(chunks, block.row)
    span = blocks.span_of(chunks, row, 0)
    o_d, o_e, i_h = block.o_d, block.o_e, block.head
    if initial is not None:
        b_h = states.load_state(initial, block.row, i_h, o_d, o_e, sizes).to(tl.float32)
    else:
        b_h = tl.zeros([BD, BE], tl.float32)
    for i in range(0, row.length):
        token = span.token + span.step * i
        q = _vector(query, token, i_h, o_d) * SCALE
        k = _vector(key, token, i_h, o_d)
        v = _vector(value, token, i_h, o_e)
        b_h = b_h * _decay(gates, token, i_h, o_d)[:, None] + k[:, None] * v[None, :]
        b_o = tl.sum(q[:, None] * b_h, 0)
        p = out + (token * sizes.HEADS + i_h) * sizes.E + o_e
        tl.store(p, b_o.to(out.dtype.element_ty), mask=o_e < sizes.E)
    if last is not None:
        states.store_state(last, b_h, block.row, i_h, o_d, o_e, sizes)


def run(args: Any, cfg: Any) -> tuple[jax.Array, jax.Array | None]:
    """Outputs, and the last states where the call wants them."""
    made = call.Call(args, args.query.shape[1])
    initial, shape = args.initial_state, (made.rows, made.heads, made.d, made.e)
    in_place = args.return_state and initial is not None and initial.dtype == jnp.float32
    found = triton_call(
        linear_recurrence_step_kernel,
        inputs=made.inputs("query", "key", "value") | {"initial": initial},
        outputs={
            "out": jax.ShapeDtypeStruct((made.batch, made.t, made.heads, made.e), args.query.dtype),
            "last": jax.ShapeDtypeStruct(shape, jnp.float32) if args.return_state else None,
        },
        aliases={"last": "initial"} if in_place else None,
        zeroed=made.zeroed("out"),
        grid=(made.rows * made.heads * cdiv(made.e, cfg.state_e),),
        **cfg.launch_states(),
        BD=made.padded_d,
        BE=cfg.state_e,
        SCALE=made.scale,
    )
    return found["out"], found["last"]
