"""The linear recurrence forward in chunks (Yang et al., Gated Linear Attention, 2023).

One launch carries the states from chunk to chunk and stores each; a second computes the outputs of
all chunks side by side, from the state before a chunk and the pairs inside it. A few tokens are
taken one by one instead. Arrays are [b, t, h, x], contiguous.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import triton_call
from ejkernel.kernels._triton._blocks import chunks as blocks
from ejkernel.kernels._triton._blocks import decays
from ejkernel.kernels._triton.linear_recurrence import call, config, recurrent, states


@triton.jit
def pair_scores(b_s, b_q, b_k, b_a, gates, C: tl.constexpr, PRECISION: tl.constexpr):
    """Adds the decayed products of queries and keys of a block of elements to b_s [t, s].

    With gates of elements (b_a [C, BD]); pairs of a token and a later one stay 0.
    """
    o_c = tl.arange(0, C)
    own = tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
    b_s += tl.where(o_c[:, None] == o_c[None, :], own[:, None], 0.0)
    LEVELS: tl.constexpr = levels(C)
    for LEVEL in tl.static_range(LEVELS):
        steps = decays.level_weights(C, LEVEL, False)
        factor = decays.decay(decays.sums(steps, b_a, gates.TERMS))  # [C, BD]
        later = (b_q * factor).to(b_q.dtype)
        earlier = (b_k * factor).to(b_k.dtype)
        dots = tl.dot(later, tl.trans(earlier), input_precision=PRECISION)
        b_s += tl.where(decays.level_pairs(C, LEVEL), dots, 0.0)
    return b_s


@triton.constexpr_function
def levels(size):
    """How often blocks of one token double up to a chunk."""
    return size.bit_length() - 1


@triton.jit(do_not_specialize=states.UNSPECIALISED)
def linear_recurrence_fwd_kernel(
    query, key, value, gates, before, chunks, sizes, out,
    BD: tl.constexpr, BE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The outputs of one chunk and head. `before` holds the state before each chunk."""
    i_c = tl.program_id(0) // sizes.HEADS
    i_h = tl.program_id(0) % sizes.HEADS
    span = blocks.chunk_of(chunks, i_c)
    if span.count <= 0:
        return
    C: tl.constexpr = chunks.SIZE
    o_c = tl.arange(0, C)
    o_e = tl.arange(0, BE)
    b_s = tl.zeros([C, C], tl.float32)  # scores of pairs
    b_o = tl.zeros([C, BE], tl.float32)
    for i_d in range(0, (sizes.D + BD - 1) // BD):
        o_d = i_d * BD + tl.arange(0, BD)
        b_q = blocks.load(query, span, i_h, o_c, o_d)  # [C, BD]
        b_k = blocks.load(key, span, i_h, o_c, o_d)
        b_h = states.load_state(before, i_c, i_h, o_d, o_e, sizes)  # [BD, BE]
        if gates.gk is not None:
            b_a = decays.element_gates(gates, span, i_h, o_c, o_d)
            b_s = pair_scores(b_s, b_q, b_k, b_a, gates, C, sizes.PRECISION)
            factor = decays.decay(decays.sums(decays.up_to(C), b_a, gates.TERMS))
            b_q = (b_q * factor).to(b_h.dtype)
        else:
            b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision=sizes.PRECISION)
        b_o = tl.dot(b_q.to(b_h.dtype), b_h, b_o, input_precision=sizes.STATE_PRECISION)
    if gates.gk is None:
        b_a = decays.head_gates(gates, span, i_h, o_c)
        start, _, _ = decays.head_sums(gates, b_a, span, i_h, C)
        b_o *= decays.decay(start)[:, None]
        b_s *= decays.head_pairs(gates, b_a, i_h, C)
    b_v = blocks.load(value, span, i_h, o_c, o_e)  # [C, BE]
    b_s = (b_s * SCALE).to(b_v.dtype)
    b_o = tl.dot(b_s, b_v, b_o * SCALE, input_precision=sizes.PRECISION)
    blocks.store(out, b_o, span, i_h, o_c, o_e, sizes.HEADS, sizes.E)


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and the last states when asked for); no residuals."""
    if call.nothing_to_do(args):
        out, last = _zeros(args)
    elif cfg.recurrent:
        out, last = recurrent.run(args, cfg)
    else:
        out, last = _in_chunks(args, cfg)
    return ((out, last) if args.return_state else (out,)), ()


def _zeros(args: Any) -> tuple[jax.Array, jax.Array]:
    made = call.Call(args, 16)
    last = made.initial_state()
    return jnp.zeros((made.batch, made.t, made.heads, made.e), args.query.dtype), last


def _in_chunks(args: Any, cfg: config.Config) -> tuple[jax.Array, jax.Array | None]:
    made = call.Call(args, cfg.block_t)
    before, last = states.states(made, cfg, last=args.return_state)
    shape = (made.batch, made.t, made.heads, made.e)
    found = triton_call(
        linear_recurrence_fwd_kernel,
        inputs={
            "query": made.operand("query"),
            "key": made.operand("key"),
            "value": made.operand("value"),
            "gates": made.gates,
            "before": before,
            "chunks": made.chunks,
            "sizes": made.sizes,
        },
        outputs={"out": jax.ShapeDtypeStruct(shape, args.query.dtype)},
        zeroed=made.zeroed("out"),
        grid=(made.num_chunks * made.heads,),
        **cfg.launch(),
        BD=cfg.block_d,
        BE=made.padded_e,
        SCALE=made.scale,
    )
    return found["out"], last
